"""Loading: the check of the tree forward, low precision, and what damaged files do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import load, load_draft, prepare
from agentspec.errors import ConfigurationError, ModelUnavailableError
from tests.backends.torch.conftest import byte_tokenizer, tiny


def test_a_model_that_differs_from_itself_is_refused(byte_tokens: Any) -> None:
    module = tiny("llama")
    forward = module.forward

    def drifting(*args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        out = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        out.logits = out.logits + (1.0 if kwargs.get("use_cache") else 0.0)
        return out

    module.forward = drifting
    with pytest.raises(ModelUnavailableError, match="LlamaForCausalLM"):
        prepare(module, byte_tokens, name="drifting", fingerprint="f")


def test_the_namespace_tells_models_tokenizers_and_templates_apart() -> None:
    one, other = (
        prepare(tiny("llama"), byte_tokenizer(template), name="m", fingerprint="f").namespace("t")
        for template in ("{{ messages }}", None)
    )
    assert one.tenant == "t" and one.model_fingerprint == "f"
    assert one.tokenizer_hash == other.tokenizer_hash and one.template_hash != other.template_hash


def test_damaged_files_are_a_model_error(saved_model: Path, tmp_path: Path) -> None:
    for file in saved_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailableError):
        load(TorchSettings(model=str(tmp_path)))


def test_missing_weights_are_an_error_and_not_random_numbers(saved_model: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_model, tmp_path / "m")
    weights = load_file(saved_model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError, match=r"lacks 1 weights.*layers.1.mlp.up_proj"):
        load(TorchSettings(model=str(tmp_path / "m"), device="cpu"))


def test_numbers_that_overflow_are_an_error(byte_tokens: Any) -> None:
    module = tiny("llama")
    module.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(ModelUnavailableError, match="no finite numbers in float32"):
        prepare(module, byte_tokens, name="hot", fingerprint="f")


def test_a_draft_model_is_loaded_for_its_target(saved_model: Path) -> None:
    settings = TorchSettings(model=str(saved_model), draft_model=str(saved_model), device="cpu")
    target = load(settings)
    small = load_draft(settings, target)
    assert small is not None and small.model is not target.target
    assert load_draft(TorchSettings(model=str(saved_model)), target) is None


def test_a_draft_model_with_another_vocabulary_is_refused(saved_model: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_model, tmp_path / "other")
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(["area"])
    tokenizer.save_pretrained(tmp_path / "other")
    settings = TorchSettings(model=str(saved_model), draft_model=str(tmp_path / "other"), device="cpu")
    with pytest.raises(ConfigurationError, match="has another vocabulary than"):
        load_draft(settings, load(settings))
