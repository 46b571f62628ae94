"""LoRA adapters: merged exactly, told apart, and refused when they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import load
from agentspec.backends.torch.model.lora import adapter_fingerprint, merge_adapter
from agentspec.backends.torch.text.model_text import ModelText
from agentspec.errors import ModelUnavailableError

RANK, ALPHA = 3, 12
LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "self_attn.v_proj")]


def write_adapter(folder: Path, module: Any, layers: list[str] = LAYERS, **config: Any) -> Path:
    """A random adapter on some layers of `module`, as training tools write it."""
    folder.mkdir(exist_ok=True)
    names = sorted({name.rsplit(".", 1)[1] for name in layers})
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps({**written, **config}))
    noise = torch.Generator().manual_seed(len(layers))
    tensors = {}
    for layer in layers:
        out, width = module.get_submodule(layer).weight.shape
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(RANK, width, generator=noise)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(out, RANK, generator=noise)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def adapter(tiny_model: Any, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_model("llama"))


@pytest.mark.parametrize(("config", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)])
def test_weights_are_those_of_the_papers_formula(
    tiny_model: Any, tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    """W + alpha / r * B A (Hu et al. 2021, section 4.1), with the square root of r where rank-stabilised."""
    plain, folder = tiny_model("llama"), tmp_path / "adapter"
    write_adapter(folder, plain, **config)
    merged = merge_adapter(tiny_model("llama"), str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, weight in plain.state_dict().items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in tensors:
            weight = weight + scale * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(merged.state_dict()[name], weight, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_loaded_packed_and_part_of_the_namespace(saved_model: Path, adapter: Path) -> None:
    plain = load(TorchSettings(model=str(saved_model), device="cpu"))
    loaded = load(TorchSettings(model=str(saved_model), adapter=str(adapter), device="cpu"))
    assert loaded.packed == plain.packed
    assert loaded.adapter == str(adapter) and plain.adapter is None
    assert loaded.namespace("t").model_fingerprint != plain.namespace("t").model_fingerprint
    assert ModelText.load(str(saved_model), adapter=str(adapter)).namespace("t") == loaded.namespace("t")
    rows = [model.target.forward(model.target.new_cache(1), [1, 2, 3]) for model in (plain, loaded)]
    assert not torch.allclose(rows[0], rows[1], atol=0.1)


def test_the_fingerprint_follows_weights_and_configuration(tiny_model: Any, adapter: Path, tmp_path: Path) -> None:
    again = write_adapter(tmp_path / "again", tiny_model("llama"))
    assert adapter_fingerprint(str(again)) == adapter_fingerprint(str(adapter))
    write_adapter(again, tiny_model("llama"), lora_alpha=99)
    assert adapter_fingerprint(str(again)) != adapter_fingerprint(str(adapter))
    write_adapter(again, tiny_model("llama"), LAYERS[:2])
    assert adapter_fingerprint(str(again)) != adapter_fingerprint(str(adapter))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def other_kind(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut_short(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"short")


def of_another_model(folder: Path) -> None:
    change(folder, lambda tensors: {f"{name}.x": tensor for name, tensor in tensors.items()})


def half_missing(folder: Path) -> None:
    change(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "lora_B" not in name})


def of_another_width(folder: Path) -> None:
    change(folder, lambda tensors: {name: torch.cat([tensor, tensor], 1) for name, tensor in tensors.items()})


def change(folder: Path, how: Any) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(how(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_folder, "no adapter folder"),
        (no_config, "no readable adapter_config.json"),
        (other_kind, "of type 'PROMPT_TUNING'"),
        (pickled, "is a pickle"),
        (cut_short, "cannot apply"),
        (of_another_model, "was it made for this model"),
        (half_missing, "was it made for this model"),
        (of_another_width, "cannot apply"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_why(
    saved_model: Path, adapter: Path, damage: Any, message: str
) -> None:
    damage(adapter)
    with pytest.raises(ModelUnavailableError, match=message):
        load(TorchSettings(model=str(saved_model), adapter=str(adapter), device="cpu"))
