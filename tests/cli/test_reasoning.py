"""`agentspec reasoning`: a judge for a configured backend, with its adapter; pairs of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PAIRS = [{"prompt": "q", "accepted": f"ab{n}", "rejected": f"ac{n}"} for n in range(6)]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return path


def write_adapter(folder: Path, model: Path) -> None:
    """An adapter that changes nothing but the fingerprint."""
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.self_attn.q_proj"
    out, width = load_file(model / "model.safetensors")[f"{name}.weight"].shape
    folder.mkdir()
    known = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**known, "layers_to_transform": [0]}))
    matrices = {"A": torch.ones(1, width), "B": torch.zeros(out, 1)}
    named = {f"base_model.model.{name}.lora_{one}.weight": matrix for one, matrix in matrices.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def test_a_judge_is_trained_for_a_backend_with_its_adapter(
    program: Any, tiny_model: Path, tmp_path: Path, pairs: Path
) -> None:
    pytest.importorskip("peft")
    from safetensors import safe_open

    from agentspec.backends.settings import TorchSettings
    from agentspec.cli.doctor.strategy_checks import Unloaded

    write_adapter(tmp_path / "adapter", tiny_model)
    settings = {"model": str(tiny_model), "adapter": str(tmp_path / "adapter"), "draft_model": "nobody/nothing"}
    config, out = tmp_path / "agentspec.toml", tmp_path / "judge.safetensors"
    config.write_text("[backends.local]\n" + "".join(f"{key} = {json.dumps(one)}\n" for key, one in settings.items()))
    result = program("reasoning", "train-judge", pairs, "--out", out, "--backend", "local", "-c", config)
    assert result.exit_code == 0, result.output
    with safe_open(out, "pt") as head:
        assert head.metadata()["fingerprint"] == Unloaded(TorchSettings(**settings)).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--backend", "nobody"], "no [backends.nobody]"), (["--backend", "b", "--model", "m"], "leave out --model")],
)
def test_a_model_that_is_named_wrongly_is_refused(
    program: Any, tmp_path: Path, pairs: Path, options: list[str], message: str
) -> None:
    out, config = tmp_path / "judge.safetensors", tmp_path / "agentspec.toml"
    config.write_text("")
    result = program("reasoning", "train-judge", pairs, "--out", out, "-c", config, *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split()) and not out.exists()
