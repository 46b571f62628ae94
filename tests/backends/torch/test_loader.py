"""Loading: devices, dtypes, the check of the tree forward, and models that cannot be rewound."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import loader
from agentspec.backends.torch.attention import ATTENTION_NAME
from agentspec.backends.torch.kv_cache import StateCache
from agentspec.backends.torch.loader import Check, choose_device, choose_dtype, load, prepare
from agentspec.backends.torch.model import TargetModel
from agentspec.errors import ConfigurationError, ModelUnavailableError
from agentspec.types import SamplingParams


def mamba() -> Any:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=259, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=256, bos_token_id=None,
        pad_token_id=256, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_auto_means_float32_on_a_cpu() -> None:
    cpu = choose_device("cpu")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_names_that_cannot_be_used_are_configuration_errors() -> None:
    with pytest.raises(ConfigurationError, match="no-such"):
        choose_device("no-such")
    with pytest.raises(ConfigurationError, match="int8"):
        choose_dtype("int8", torch.device("cpu"))


def test_a_model_with_a_state_runs_without_speculation_and_says_so_once(
    caplog: pytest.LogCaptureFixture, lab_class: Any, tree_of: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        subject = lab_class(mamba())
    assert [record.message for record in caplog.records if "without speculation" in record.message] == [
        caplog.records[-1].message
    ]
    assert not subject.target.rewindable and isinstance(subject.target.new_rows(1), StateCache)
    sampling = SamplingParams(temperature=0.9, seed=3)
    prompt = list(range(30))
    outcome = subject.run(prompt, sampling, lambda text, budget: tree_of([1, 2], [-1, 0]))
    subject.require_same(prompt, sampling, outcome.tokens, subject.oracle(prompt, sampling))
    assert outcome.speculation is None


def test_a_wrong_tree_forward_is_not_used(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask that hides nothing from siblings the check fails and the model's own decoding is used."""
    module = tiny_model("llama")
    check = Check.of(module)
    module.set_attn_implementation(ATTENTION_NAME)
    target = TargetModel(module, rewindable=True)
    assert check.passes(target) and check.difference(target) < 1e-4
    target._windows = {"full_attention": 1}
    assert not check.passes(target)
    target._windows = {"full_attention": "all"}  # type: ignore[dict-item]
    assert not check.passes(target)  # an exception counts as a failure


def test_a_model_that_differs_from_itself_is_refused(tiny_model: Any, byte_tokens: Any) -> None:
    module = tiny_model("llama")
    forward = module.forward

    def drifting(*args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        out = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        out.logits = out.logits + (1.0 if kwargs.get("use_cache") else 0.0)
        return out

    module.forward = drifting
    with pytest.raises(ModelUnavailableError, match="LlamaForCausalLM"):
        prepare(module, byte_tokens, name="drifting", fingerprint="f")


def test_low_precision_has_its_head_in_float32(tiny_model: Any, byte_tokens: Any) -> None:
    loaded = prepare(tiny_model("llama").to(torch.bfloat16), byte_tokens, name="m", fingerprint="f")
    logits = loaded.target.forward(loaded.target.new_rows(1), [1, 2, 3])
    assert loaded.target.dtype == torch.bfloat16 and loaded.packed == 0
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(torch.bfloat16).float())


def test_the_namespace_tells_models_tokenizers_and_templates_apart(tiny_model: Any, tokenizer_of: Any) -> None:
    one, other = (
        prepare(tiny_model("llama"), tokenizer_of(template), name="m", fingerprint="f").namespace("t")
        for template in ("{{ messages }}", None)
    )
    assert one.tenant == "t" and one.model_fingerprint == "f"
    assert one.tokenizer_hash == other.tokenizer_hash and one.template_hash != other.template_hash


def test_a_saved_model_is_loaded(saved_model: Path) -> None:
    loaded = load(TorchSettings(model=str(saved_model), device="cpu"))
    assert loaded.target.rewindable and loaded.fingerprint


def test_damaged_files_are_a_model_error(saved_model: Path, tmp_path: Path) -> None:
    for file in saved_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailableError):
        load(TorchSettings(model=str(tmp_path)))


def test_the_check_covers_a_tree() -> None:
    assert len(loader.CHECK_PARENTS) == loader.CHECK_TREE and len(set(loader.CHECK_PARENTS)) < loader.CHECK_TREE
