"""`agentspec launch` runs what stands on the PATH as `claude` or `codex`, with what it needs to reach the gateway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentspec.testing import FakeBackend
from tests.proxy.conftest import shared_gateway

__all__ = ["shared_gateway"]
AGENT = """#!{0}
import json, os, signal, sys
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(3)
"""
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def url(shared_gateway: Any) -> str:
    return str(shared_gateway({name: FakeBackend() for name in ("first", "other")}).url)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Starts `agentspec launch` in an empty folder, where Claude Code and Codex are installed."""
    for name in ("claude", "codex"):
        (tmp_path / name).write_text(AGENT.format(sys.executable))
        (tmp_path / name).chmod(0o755)

    def launch(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from agentspec.cli import app; app()", "launch", *arguments]
        environment = {**os.environ, "PATH": str(tmp_path), **variables}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)

    return launch


def test_claude_code_gets_the_gateway_the_model_and_its_own_arguments(launch: Launch, url: str) -> None:
    own = {"ANTHROPIC_API_KEY": "sk-ant-own", "AGENTSPEC_API_KEY": "sk-secret"}
    running = launch("claude", "--url", f"{url}/v1/", "--", "-p", "hello", "--model", "x", **own)
    out, said = running.communicate(timeout=120)
    arguments, environment = json.loads(out)
    assert (arguments, running.returncode) == (["-p", "hello", "--model", "x"], 3)
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (url, "sk-secret")
    assert "ANTHROPIC_API_KEY" not in environment and "agentspec: leaves out ANTHROPIC_API_KEY" in said
    for role in ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL"):
        assert environment[f"ANTHROPIC_{role}"] == "first" and f"sets ANTHROPIC_{role}=first\n" in said
    assert "secret" not in said and "sk-ant" not in said


def test_codex_gets_a_provider_that_its_configuration_reads(launch: Launch, url: str, tmp_path: Path) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    (tmp_path / "agentspec.toml").write_text(f"[server]\nhost = '{host}'\nport = {port}\n")
    running = launch("codex", "--model", "other", "--", "exec", "hi", AGENTSPEC_API_KEY="sk-secret")
    out, said = running.communicate(timeout=120)
    arguments, _ = json.loads(out)
    assert (arguments[-2:], running.returncode) == (["exec", "hi"], 3) and set(arguments[:-2:2]) == {"-c"}
    written = tomllib.loads("\n".join(arguments[1:-2:2]))
    provider = written["model_providers"][written["model_provider"]]
    assert (written["model"], provider["base_url"], provider["wire_api"]) == ("other", f"{url}/v1", "responses")
    assert provider["env_key"] == "AGENTSPEC_API_KEY" and said.count("agentspec: sets -c ") == len(written) + 3


def test_the_agent_receives_signals(launch: Launch, url: str) -> None:
    with launch("claude", "--url", url, "--", "wait") as running:
        assert running.stdout is not None and running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("claude", "--url", "http://127.0.0.1:9"), "could not be reached (ConnectError)"),
        (("claude", "--url", "127.0.0.1:9"), "must begin with http"),
        (("codex", "--url", "URL", "--model", "othr"), "has no model 'othr'; did you mean 'other'?; it has: first"),
        (("codex", "--url", "URL/elsewhere"), "/elsewhere/v1/models answers 404: name a gateway"),
    ],
)
def test_launch_refuses_what_cannot_work_before_the_agent_starts(
    program: Any, launch: Launch, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    done = program("launch", *(one.replace("URL", url) for one in arguments))
    assert done.exit_code in (1, 2) and says in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    done = program("launch", *(one.replace("URL", url) for one in arguments))
    assert (
        done.exit_code == 2
        and f"install it: npm install -g @{'openai' if 'codex' in arguments else 'anthropic'}" in (done.stderr)
    )
