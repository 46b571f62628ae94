"""Models that cannot be rewound, models that are refused, and positions that move with the length of a text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import load, prepare
from agentspec.backends.torch.model.compatibility import has_known_masks, max_exact_context
from agentspec.backends.torch.model.kv_cache import StateCache
from agentspec.errors import ModelUnavailableError
from agentspec.types import SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
MAMBA: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "state_size": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 256,
}
HEADS: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}

STATEFUL: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaConfig(**MAMBA),
    "mamba2": lambda: hf.Mamba2Config(**MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SHAPE, **EXPERTS, **LINEAR, head_dim=8, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "jamba": lambda: hf.JambaConfig(
        **SHAPE, **EXPERTS, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**SHAPE, **HEADS, mamba_d_ssm=32, mamba_d_head=8),
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SHAPE, **HEADS, mamba_d_head=16, layer_types=["mamba", "attention"], num_local_experts=2,
        num_experts_per_tok=1, shared_intermediate_size=32,
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **SHAPE, block_types=["recurrent", "attention"], lru_width=32, attention_window_size=6
    ),
    "lfm2": lambda: hf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "llama4": lambda: hf.Llama4TextConfig(
        **SHAPE, head_dim=8, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=64
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=6, max_position_embeddings=512, bos_token_id=None, eos_token_id=256,
    ),
}  # fmt: skip


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.3)
    return module


OFTEN = ("mamba", "qwen3_next", "llama4", "gpt_neo")  # a state, a hybrid, and limits of attention in two ways


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in STATEFUL]
)
def test_a_model_that_cannot_be_rewound_runs_without_speculation_and_says_so_once(
    caplog: pytest.LogCaptureFixture, lab_class: Any, tree_of: Any, name: str
) -> None:
    """Recurrent state, hybrids, and attention limits that the masks do not know: token after token, past any window."""
    with caplog.at_level(logging.WARNING, logger="agentspec"):
        subject = lab_class(model_of(STATEFUL[name]()))
    said = [record.message for record in caplog.records if "without speculation" in record.message]
    assert len(said) == 1 and "tiny" in said[0]
    assert not subject.target.rewindable and isinstance(subject.target.new_cache(1), StateCache)
    sampling, prompt = SamplingParams(temperature=0.9, seed=3), list(range(30))
    outcome = subject.run(prompt, sampling, lambda text, budget: tree_of([1, 2], [-1, 0]), max_tokens=12)
    subject.require_same(prompt, sampling, outcome.tokens, subject.oracle(prompt, sampling, max_tokens=12))
    assert outcome.speculation is None


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (lambda: hf.T5Config(vocab_size=259), r"encoder-decoder model \(t5\)"),
    "decoder of an encoder-decoder": (lambda: hf.BartConfig(vocab_size=259), r"encoder-decoder model \(bart\)"),
    "no text out": (lambda: hf.ViTConfig(), "no language model that continues text: its type is 'vit'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_continue_text_is_refused_before_its_weights_are_read(
    byte_tokens: Any, tmp_path: Path, name: str
) -> None:
    config, message = REFUSED[name]
    config().save_pretrained(tmp_path)
    byte_tokens.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelUnavailableError, match=message):
        load(TorchSettings(model=str(tmp_path), device="cpu"))


def test_a_model_that_reads_in_both_directions_is_refused(byte_tokens: Any) -> None:
    config = hf.BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    with pytest.raises(ModelUnavailableError, match=r"BertLMHeadModel.*not those of the whole text"):
        prepare(model_of(config), byte_tokens, name="bert", fingerprint="f")


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.RwkvConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
        lambda: hf.MiniMaxConfig(
            **SHAPE,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=8,
        ),
    ],
)
def test_a_cache_of_its_own_kind_is_refused(byte_tokens: Any, config: Any) -> None:
    with pytest.raises(ModelUnavailableError, match="the local engine cannot run 'own'"):
        prepare(model_of(config()), byte_tokens, name="own", fingerprint="f")


def test_limits_under_other_names_are_not_overlooked() -> None:
    assert has_known_masks(hf.LlamaConfig(**SHAPE))
    assert has_known_masks(hf.MistralConfig(**SHAPE, sliding_window=6))
    assert not has_known_masks(STATEFUL["gpt_neo"]())
    assert not has_known_masks(STATEFUL["llama4"]())


def longrope() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return hf.Phi3Config(
        **SHAPE, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope
    )


def test_texts_end_where_positions_begin_to_move(lab_class: Any, tree_of: Any, caplog: Any) -> None:
    """Behind that point a draft would change the angles of the tokens before it, and with them the answer."""
    subject = lab_class(model_of(longrope()))
    assert max_exact_context(longrope()) == subject.target.context_length == 32
    assert "takes texts of up to 32 tokens" in caplog.text
    sampling, prompt = SamplingParams(temperature=0), list(range(20))
    want = subject.oracle(prompt, sampling, max_tokens=12, stop_ids=())

    def right(text: list[int], budget: int) -> Any:
        rest = [*prompt, *want][len(text) :][:3]
        return tree_of(rest, range(-1, len(rest) - 1))

    assert subject.run(prompt, sampling, right, max_tokens=12, stop_ids=()).tokens == want
    beyond = subject.logits([*prompt, *want, 1])
    rows = subject.target.new_cache(1)
    subject.target.prefill(rows, [*prompt, *want])
    assert abs(subject.target.forward(rows, [1])[0].cpu().numpy() - beyond).max() > 0.1


def test_fixed_positions_have_no_end_of_their_own() -> None:
    assert max_exact_context(hf.LlamaConfig(**SHAPE)) is None
    assert max_exact_context(hf.Gemma3TextConfig(**SHAPE)) is None
    for kind in ("linear", "dynamic"):
        scaled = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        assert max_exact_context(hf.LlamaConfig(**SHAPE, rope_parameters=scaled)) is None
    assert max_exact_context(hf.GPT2Config()) is None
