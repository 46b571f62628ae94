"""`agentspec doctor` says what is broken and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.conftest import Received, upstream

__all__ = ["upstream"]
DOWN = 'kind = "openai"\nbase_url = "http://127.0.0.1:1/v1"\n'


def checks(program: Any, text: str) -> dict[str, dict[str, str]]:
    """The checks by their names, with this configuration."""
    Path("agentspec.toml").write_text(text)
    return {row["name"]: row for row in json.loads(program("doctor", "--json").stdout)}


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


SAID = 'agentspec_vllm_drafter_info{{drafter="{0}",method="{1}",version="0.1.0"}} 1.0\n'


@pytest.mark.parametrize(
    ("owner", "metrics", "state", "detail"),
    [
        ("somebody", None, None, ""),
        ("vllm", SAID.format("agentspec", "suffix"), "ok", "agentspec 0.1.0, as vLLM's suffix method"),
        ("vllm", SAID.format("arctic", "suffix"), "note", "arctic"),
        ("vllm", "vllm:x 1\n" + SAID.format("none", ""), "note", "none"),
        ("vllm", "vllm:x 1\n", "note", "unknown: agentspec's plug-in is not loaded there"),
        ("vllm", None, "note", "unknown"),
    ],
)
def test_doctor_reports_an_upstream_and_its_drafter(program, upstream, owner, metrics, state, detail):
    server = upstream(lambda request: answered(request, owner, metrics))
    found = checks(program, f'[backends.up]\nkind = "openai"\nbase_url = "{server.url}"\n')
    assert found["up: upstream"]["state"] == "ok"
    assert "models: tiny; can do: plain answers only" in found["up: upstream"]["detail"]
    drafter = found.get("up: drafter", {"state": None, "detail": "", "advice": ""})
    assert drafter["state"] == state and drafter["detail"].startswith(detail)
    assert (drafter["advice"] == "") == (state != "note")
    assert ("vLLM refuses min_p and logit_bias" in drafter["detail"]) == (state == "ok")


def test_doctor_reports_upstreams_that_do_not_answer(program):
    found = checks(program, f'[backends.up]\n{DOWN}[backends.keyed]\n{DOWN}api_key_file = "/absent"\n')
    up, keyed = found["up: upstream"], found["keyed: upstream"]
    assert up["state"] == keyed["state"] == "fail"
    assert "backends.up.base_url" in up["advice"] and keyed["advice"] == "correct backends.keyed.api_key_file"
    assert "model store" not in found and "cache folder" not in found
    result = program("doctor")
    lines = result.output.splitlines()
    failed = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert result.exit_code == 1 and failed
    assert all(lines[index + 1].startswith("      -> ") for index in failed)


@pytest.mark.parametrize(
    ("backend", "name", "state", "said"),
    [
        ('device = "cpu"', "local: device", "ok", "cpu in float32"),
        ('device = "nonsense"', "local: device", "fail", "correct backends.local.device"),
        ('device = "cpu"\ndtype = "float16"', "local: device", "fail", "correct backends.local.dtype"),
        ('model = "model"', "local: model", "ok", "model is ready"),
        ('model = "some.gguf"', "local: model", "note", "fetched and prepared at first use"),
        ('model = "smollm2-135m"', "local: model", "note", "agentspec model fetch smollm2-135m"),
        ('model = "./absent"', "local: model", "fail", "correct backends.local.model"),
        ('draft_model = "broken"', "local: draft model", "fail", "correct backends.local.draft_model"),
    ],
)
def test_doctor_checks_devices_and_models(program, tmp_path, model_folder, backend, name, state, said):
    (tmp_path / "some.gguf").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").touch()
    check = checks(program, f'[backends.local]\nkind = "torch"\n{backend}\n')[name]
    assert check["state"] == state and said in check["detail"] + check["advice"]


def test_doctor_checks_the_cache_folder(program, tmp_path: Path):
    (tmp_path / "file").touch()
    below = {tmp_path / "new" / "deep": "ok", tmp_path / "file" / "below": "fail", Path("/proc/new"): "fail"}
    for path, state in below.items():
        assert checks(program, f'[cache]\npath = "{path}"\n')["cache folder"]["state"] == state
    assert not (tmp_path / "new").exists()


def test_doctor_exits_with_0_when_every_check_passes(program, model_folder):
    text = f'[backends.local]\nkind = "torch"\nmodel = "{model_folder}"\ndevice = "cpu"\n'
    assert {row["state"] for row in checks(program, text).values()} == {"ok"}
    result = program("doctor")
    assert result.exit_code == 0 and f"ok    local: model: {model_folder} is ready" in result.output, result.output


def test_a_broken_configuration_is_a_failure_among_the_others(program):
    found = checks(program, "[server]\nprot = 1\n")
    assert found["configuration"]["state"] == "fail" and len(found) > 5
