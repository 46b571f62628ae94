"""Two real vLLM servers as a pool: sessions stay, and a server that is killed takes no call with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.server import SUFFIX, VllmServer, find_environment
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings

ENVIRONMENT = find_environment(Path(__file__).parents[3])
MEMBER = "x-agentspec-member"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[VllmServer]]:
    """Two, each on a core of its own where there are two."""
    model = locate("smollm2-135m")
    if model is None or ENVIRONMENT is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    cores, started = sorted(os.sched_getaffinity(0)), list[VllmServer]()
    try:
        for number in range(2):
            os.sched_setaffinity(0, {cores[number % len(cores)]})  # processes inherit it
            variables = {"AGENTSPEC_CACHE_PATH": str(tmp_path / "cache")}
            log = tmp_path / f"{number}.log"
            server = VllmServer(ENVIRONMENT, model.folder, log, SUFFIX, variables, ("--enforce-eager",))
            started.append(server)
            server.start()
        os.sched_setaffinity(0, cores)
        yield started
    finally:
        os.sched_setaffinity(0, cores)
        for server in started:
            server.stop()


def test_calls_of_sessions_outlive_a_server_that_is_killed(servers: list[VllmServer]) -> None:
    backend = OpenAISettings.model_validate({"base_urls": [f"{server.url}/v1" for server in servers], "vllm": "on"})
    settings = Settings(backends={"pair": backend}, models={"m": ModelSettings(backend="pair", upstream_model="model")})
    with TestClient(create_app(Runtime(settings), settings), base_url="http://127.0.0.1") as client:

        def say(session: int) -> tuple[str, str]:
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": f"Count from {session}."}],
                "max_tokens": 48,
                "temperature": 0,
            }
            answer = client.post("/v1/chat/completions", json=body, headers={"x-agentspec-session": f"s{session}"})
            assert answer.status_code == 200, answer.text
            return answer.headers[MEMBER], answer.json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(8) as threads:
            first = list(threads.map(say, range(8)))
            assert {member for member, _ in first} == {member for member, _ in map(say, range(8))} and len(
                {member for member, _ in first}
            ) == 2
            asked = [threads.submit(say, session) for session in (*range(8), *range(8))]
            servers[0].kill()
            after = [one.result() for one in asked]  # no call had begun to stream, so that none may fail
        assert len({member for member, _ in map(say, range(8))}) == 1
        assert len(after) == 16 and all(text for _, text in after)
