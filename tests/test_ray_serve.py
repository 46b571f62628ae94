"""The example for Ray Serve with two replicas of a scripted engine: it finds them, and replaces one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentspec.settings.load import load_settings

PYTHON = Path(os.environ.get("AGENTSPEC_RAY_ENV") or Path(__file__).parents[1] / ".venv-ray") / "bin" / "python"
PROGRAM = Path(__file__).parent / "reliability" / "scripted_engine.py"


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.2)


def test_its_configuration_is_one(repository: Path) -> None:
    settings = load_settings(repository / "examples" / "ray_serve" / "agentspec.toml")
    assert settings.models["qwen"].backends == ("ray",)


def running(port: str) -> list[int]:
    """The process of the engine at `port`."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if f"{PROGRAM} 0.0.0.0 {port} " in line]


@pytest.mark.long
@pytest.mark.skipif(
    not PYTHON.exists(), reason="no Ray: make .venv-ray with ray[serve] in it, or set AGENTSPEC_RAY_ENV"
)
def test_two_replicas_are_found_and_a_killed_one_is_replaced(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    environment = os.environ | {
        "AGENTSPEC_SERVERS": str(file),
        "MODEL": "m",
        "CPUS": "0.5",
        "GPUS": "0",
        "ENGINE": f"{sys.executable} {PROGRAM} 0.0.0.0 {{port}} {tmp_path / 'log'} {{model}} plain",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # or it leaves a token in the home folder
    }

    def urls() -> list[str]:
        return file.read_text().split() if file.exists() else []

    example = subprocess.Popen([PYTHON, repository / "examples" / "ray_serve" / "engines.py"], env=environment)
    try:
        wait_for(lambda: len(urls()) == 2 or example.poll() is not None)
        before = urls()
        answers = [httpx.get(url.removesuffix("/v1") + "/health").status_code for url in before]
        assert answers == [200, 200]
        [victim] = running(before[0].split(":")[2].removesuffix("/v1"))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(urls()) == 2 and before[0] not in urls())
        assert before[1] in urls()
    finally:
        example.send_signal(signal.SIGINT)
        example.wait(120)
