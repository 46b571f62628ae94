"""The example for Ray Serve with two replicas, of a scripted engine and of vLLM: one that is killed is replaced."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import FIXED, find_environment
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings, load_settings
from tests.vllm_server import SUFFIX

PYTHON = Path(os.environ.get("AGENTSPEC_RAY_ENV") or Path(__file__).parents[1] / ".venv-ray") / "bin" / "python"
PROGRAM = Path(__file__).parent / "reliability" / "scripted_engine.py"
VLLM = find_environment(Path(__file__).parents[1])

with_ray = pytest.mark.skipif(
    not PYTHON.exists(), reason="no Ray: make .venv-ray with ray[serve] in it, or set AGENTSPEC_RAY_ENV"
)


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.2)


def test_its_configuration_is_one(repository: Path) -> None:
    settings = load_settings(repository / "examples" / "ray_serve" / "agentspec.toml")
    assert settings.models["qwen"].backends == ("ray",)


def kill(program: str) -> None:
    """Kill the one process whose command line has `program` in it."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    [process] = [int(line.split()[0]) for line in lines if program in line]
    os.kill(process, signal.SIGKILL)


@contextmanager
def two_replicas(
    repository: Path, file: Path, engine: str, variables: dict[str, str]
) -> Iterator[Callable[[], list[str]]]:
    """The example with `engine` twice; gives what tells where they serve."""
    environment = (
        os.environ
        | variables
        | {
            "AGENTSPEC_SERVERS": str(file),
            "CPUS": "0.5",
            "GPUS": "0",
            "ENGINE": engine,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # or it leaves a token in the home folder
        }
    )

    def urls() -> list[str]:
        return file.read_text().split() if file.exists() else []

    example = subprocess.Popen([PYTHON, repository / "examples" / "ray_serve" / "engines.py"], env=environment)
    try:
        wait_for(lambda: len(urls()) == 2 or example.poll() is not None, 900)
        yield urls
    finally:
        example.send_signal(signal.SIGINT)
        example.wait(120)


def port_of(url: str) -> str:
    return url.split(":")[2].removesuffix("/v1")


@pytest.mark.long
@with_ray
def test_two_replicas_are_found_and_a_killed_one_is_replaced(repository: Path, tmp_path: Path) -> None:
    engine = f"{sys.executable} {PROGRAM} 0.0.0.0 {{port}} {tmp_path / 'log'} {{model}} plain"
    with two_replicas(repository, tmp_path / "servers", engine, {"MODEL": "m"}) as urls:
        before = urls()
        answers = [httpx.get(url.removesuffix("/v1") + "/health").status_code for url in before]
        assert answers == [200, 200]
        kill(f"{PROGRAM} 0.0.0.0 {port_of(before[0])} ")
        wait_for(lambda: len(urls()) == 2 and before[0] not in urls())
        assert before[1] in urls()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(1800)
@with_ray
@pytest.mark.skipif(VLLM is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV")
def test_two_vllm_replicas_behind_our_gateway_lose_no_call(repository: Path, tmp_path: Path) -> None:
    """Real vLLM servers that draft from one cache; one is killed while calls wait, and another takes its place."""
    model = locate("smollm2-135m")
    if model is None or VLLM is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    drafter = shlex.quote(json.dumps(SUFFIX).replace("{", "{{").replace("}", "}}"))
    engine = f"{VLLM}/bin/vllm serve {{model}} --port {{port}} --served-model-name model --dtype float32"
    engine += f" --max-model-len 2048 --max-num-seqs 16 --enforce-eager --speculative-config {drafter}"
    variables = FIXED | {"MODEL": str(model.folder), "AGENTSPEC_CACHE_PATH": str(tmp_path / "cache")}
    file = tmp_path / "servers"
    with two_replicas(repository, file, engine, variables) as urls:
        before = urls()
        backend = OpenAISettings.model_validate({"base_urls_file": str(file), "server_kind": "vllm"})
        settings = Settings(
            backends={"ray": backend}, models={"m": ModelSettings(backend="ray", upstream_model="model")}
        )
        with TestClient(create_app(Runtime(settings), settings), base_url="http://127.0.0.1") as client:

            def member(session: int) -> str:
                body = {"model": "m", "messages": [{"role": "user", "content": f"Count from {session}."}]}
                headers = {"x-agentspec-session": f"s{session}"}
                answer = client.post(
                    "/v1/chat/completions", json=body | {"max_tokens": 48, "temperature": 0}, headers=headers
                )
                assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
                return answer.headers["x-agentspec-member"]

            with ThreadPoolExecutor(8) as threads:
                assert len(set(threads.map(member, range(8)))) == 2
                asked = [threads.submit(member, session) for session in (*range(8), *range(8))]
                kill(f"--port {port_of(before[0])} ")
                assert len([one.result() for one in asked]) == 16  # none had begun to stream, so that none may fail
                wait_for(lambda: len(urls()) == 2 and before[0] not in urls(), 900)
                new = count(100)  # sessions stay where their context is
                wait_for(lambda: len(set(threads.map(member, islice(new, 8)))) == 2)
