from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.cli import doctor
from agentspec.cli.doctor import (
    all_checks,
    check_device,
    check_extra,
    check_folder,
    check_model,
    check_upstream,
)
from agentspec.errors import install_advice
from agentspec.settings.load import Settings, load_settings
from tests.proxy.conftest import Received, upstream

__all__ = ["upstream"]


def answered(request: Received, owner: str = "somebody", metrics: str | None = None) -> None:
    """One model is listed, and every chat answered; a server of "vllm" has metrics."""
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    known = {
        "/v1/models": {"data": [{"id": "tiny", "owned_by": owner}]},
        "/v1/chat/completions": {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
    }
    if request.target == "/metrics" and metrics is not None:
        return request.answer(metrics.encode())
    body = known.get(request.target)
    return request.answer(json.dumps(body or {}).encode(), 404 if body is None else 200)


def test_an_upstream_that_answers(upstream):
    [check] = check_upstream("up", OpenAISettings(base_url=upstream(answered).url))
    assert check.state == "ok"
    assert "models: tiny; can do: plain answers only" in check.detail


SAID = 'agentspec_vllm_drafter_info{{drafter="{0}",method="{1}",version="0.1.0"}} 1.0\n'


@pytest.mark.parametrize(
    ("metrics", "state", "detail"),
    [
        (SAID.format("agentspec", "suffix"), "ok", "agentspec 0.1.0, as vLLM's suffix method"),
        (SAID.format("arctic", "suffix"), "note", "arctic"),
        ("vllm:x 1\n" + SAID.format("none", ""), "note", "none"),
        ("vllm:x 1\n", "note", "unknown: agentspec's plug-in is not loaded there"),
        (None, "note", "unknown"),
    ],
)
def test_the_drafter_of_a_vllm_server(upstream, metrics, state, detail):
    server = upstream(lambda request: answered(request, "vllm", metrics))
    _, drafter = check_upstream("up", OpenAISettings(base_url=server.url))
    assert (drafter.name, drafter.state) == ("up: drafter", state)
    assert drafter.detail.startswith(detail)
    assert (drafter.advice == "") == (state == "ok")


def test_an_upstream_that_does_not():
    [check] = check_upstream("up", OpenAISettings(base_url="http://127.0.0.1:1/v1"))
    assert check.state == "fail"
    assert "backends.up.base_url" in check.advice


def test_a_key_file_that_is_missing_is_a_failure():
    [check] = check_upstream("up", OpenAISettings(base_url="http://127.0.0.1:1/v1", api_key_file="/absent"))
    assert (check.state, check.advice) == ("fail", "correct backends.up")


def test_installed_and_missing_packages(monkeypatch):
    assert check_extra("torch", needed=True).state == "ok"
    monkeypatch.setattr(doctor, "EXTRAS", {"torch": ("no_such_package",)})
    missing = check_extra("torch", needed=True)
    assert (missing.state, missing.detail) == ("fail", "missing no-such-package")
    assert missing.advice == install_advice("torch")
    assert check_extra("torch", needed=False).state == "note"


def test_folders(tmp_path: Path):
    assert check_folder("f", tmp_path / "new" / "deep", "X").state == "ok"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    assert check_folder("f", tmp_path / "file" / "below", "X").state == "fail"


def test_devices():
    fine = check_device("local", TorchSettings(device="cpu"))
    assert fine.state == "ok" and "cpu in float32" in fine.detail
    assert check_device("local", TorchSettings(device="nonsense")).advice == "correct backends.local.device"
    assert check_device("local", TorchSettings(device="cpu", dtype="float16")).advice == "correct backends.local.dtype"


def test_a_draft_model_is_checked_like_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    (tmp_path / "config.json").touch()
    settings = Settings(backends={"local": TorchSettings(draft_model=str(tmp_path))})
    found = {check.name: check for check in all_checks(settings)}
    assert found["local: draft model"].advice == "correct backends.local.draft_model"


def test_a_model_that_is_here(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    assert check_model("local", TorchSettings(model=str(model_folder))).state == "ok"
    (model_folder / "config.json").unlink()
    assert check_model("local", TorchSettings(model=str(model_folder))).state == "fail"
    (tmp_path / "some.gguf").write_text("")
    assert check_model("local", TorchSettings(model=str(tmp_path / "some.gguf"))).state == "note"


def test_a_model_that_is_not_here_can_be_fetched_or_not(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    assert check_model("local", TorchSettings(model="smollm2-135m")).advice == "agentspec model fetch smollm2-135m"
    check = check_model("local", TorchSettings(model="./absent"))
    assert check.state == "fail" and "backends.local.model" in check.advice


def test_the_checks_follow_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    up = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1"}
    settings = load_settings(None, {"cache": {"path": str(tmp_path)}, "backends": {"up": up}})
    names = [check.name for check in all_checks(settings)]
    assert "up: upstream" in names
    assert "cache folder" in names
    assert "model store" not in names
    assert "local: model" in [check.name for check in all_checks(load_settings())]


def test_all_is_well(program, model_folder):
    Path("agentspec.toml").write_text(f'[backends.local]\nkind = "torch"\nmodel = "{model_folder}"\ndevice = "cpu"\n')
    result = program("doctor")
    assert result.exit_code == 0, result.output
    assert f"ok    local: model: {model_folder} is ready" in result.output
    rows = json.loads(program("doctor", "--json").output)
    assert {row["state"] for row in rows} == {"ok"}


def test_what_is_broken_says_what_to_do_and_exits_with_1(program):
    Path("agentspec.toml").write_text('[backends.up]\nkind = "openai"\nbase_url = "http://127.0.0.1:1/v1"\n')
    result = program("doctor")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    failed = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert failed
    assert all(lines[index + 1].startswith("      -> ") for index in failed)


def test_a_broken_configuration_is_a_failure_among_the_others(program, model_folder, monkeypatch):
    Path("agentspec.toml").write_text("[server]\nprot = 1\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    rows = json.loads(program("doctor", "--json").output)
    assert rows[0]["name"] == "configuration"
    assert rows[0]["state"] == "fail"
    assert len(rows) > 5
