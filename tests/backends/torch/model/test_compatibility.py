"""Models that are refused, since they cannot be rewound or read no texts, and moving positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import load, max_exact_context, prepare
from agentspec.errors import ModelUnavailableError
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import Lab, tree_of

NARROW: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2}
SHAPE: dict[str, Any] = {
    **NARROW, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None,
    "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
MAMBA: dict[str, Any] = {**NARROW, "state_size": 4, "pad_token_id": 256}
LINEAR = {f"linear_num_{name}_heads": 2 for name in ("value", "key")} | {
    f"linear_{name}_head_dim": 8 for name in ("value", "key")
}
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}

REFUSED_STATES: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaConfig(**MAMBA),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SHAPE, **EXPERTS, **LINEAR, head_dim=8, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **SHAPE, head_dim=8, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=64
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=6, max_position_embeddings=512, bos_token_id=None, eos_token_id=256,
    ),
    "rwkv": lambda: hf.RwkvConfig(**NARROW, attention_hidden_size=32),
    "bert": lambda: hf.BertConfig(**NARROW, num_attention_heads=4, intermediate_size=64),
}  # fmt: skip


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.3)
    return module


@pytest.mark.parametrize("name", REFUSED_STATES)
def test_a_model_that_cannot_be_rewound_is_refused_and_an_alternative_named(byte_tokens: Any, name: str) -> None:
    """Recurrent state, hybrids, attention limits that the masks do not know, and tokens that see later ones."""
    with pytest.raises(ModelUnavailableError, match=r"cannot run 'own' .*rewound.*serve it by vLLM or SGLang"):
        prepare(model_of(REFUSED_STATES[name]()), byte_tokens, name="own", fingerprint="f")


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


def longrope() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return hf.Phi3Config(
        **SHAPE, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope
    )


def test_texts_end_where_positions_begin_to_move(caplog: Any) -> None:
    """Behind that point a draft would change the angles of the tokens before it, and with them the answer."""
    subject = Lab(model_of(longrope()))
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
