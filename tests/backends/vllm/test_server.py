"""Real vLLM servers with our drafter inside, in both model runners. Their environment is made by `.ci/vllm-env`."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import anyio
import pytest
from starlette.testclient import TestClient

from agentspec.backends.openai.metrics import parse_load
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import FIXED, find_environment
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams
from tests.backends.conftest import rows_in, stored_in
from tests.engine_server import HANG, EngineServer

ENVIRONMENT = find_environment(Path(__file__).parents[3])
PROMPTS = ["Two plus two", "{" * 40, "The capital of France is"]
ROUNDS = "vllm:spec_decode_num_drafts_total"
INTERPRETED = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).with_name("interpreted"))}
INTERPRETED["TORCHDYNAMO_DISABLE"] = "1"  # torch's compiler asks Triton for a device
RUNNERS = {
    "first": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"method": "suffix", "num_speculative_tokens": 32}),
    "V2": ({"VLLM_USE_V2_MODEL_RUNNER": "1", **INTERPRETED}, {"method": "ngram_gpu", "num_speculative_tokens": 7}),
}
LITTLE = ("--num-gpu-blocks-override", "17", "--block-size", "32")  # memory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(HANG),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]

Launch = Callable[..., EngineServer]


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def launch(runner: str, served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Starts servers with one of the model runners, and stops all at the end."""
    folder, started = tmp_path_factory.mktemp("vllm"), list[EngineServer]()
    variables, speculative = RUNNERS[runner]

    def launch(*options: str, drafts: bool = True, **more: str) -> EngineServer:
        assert ENVIRONMENT is not None
        command = [ENVIRONMENT / "bin" / "vllm", "serve", served_model, "--served-model-name", "model"]
        command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"]
        command += ["--speculative-config", json.dumps(speculative)] if drafts else []
        log = folder / f"{len(started)}.log"
        started.append(EngineServer([*command, *options], log, {**FIXED, **variables, **more}))
        return started[-1].start()

    yield launch
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def plain(launch: Launch) -> list[list[int]]:
    """What the model says without speculation."""
    server = launch(drafts=False)
    answers = say(server)
    server.stop()
    return answers


def post(server: EngineServer, route: str, **body: object) -> Any:
    """The open answer to a request."""
    data, headers = json.dumps({"model": "model", **body}).encode(), {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/{route}", data, headers), timeout=HANG)


def complete(server: EngineServer, prompt: str, **more: object) -> list[int]:
    """Token ids of an answer, a greedy one if nothing else is asked for."""
    asked = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **more}
    with post(server, "completions", prompt=prompt, **asked) as answer:
        return json.load(answer)["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def say(server: EngineServer) -> list[list[int]]:
    """Answers to all prompts at each temperature, many at once: greedy and sampled ones in one batch only in V2, since
    vLLM 0.32 for CPUs loses the temperatures of its first runner's batches when it verifies drafts.
    """
    asked = [(prompt, temperature) for temperature in (0.0, 0.3, 1.0) for prompt in PROMPTS]
    apart = server.variables["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    with ThreadPoolExecutor(len(PROMPTS) if apart else len(asked)) as pool:

        def answers(some: list[tuple[str, float]]) -> list[list[int]]:
            return list(pool.map(lambda one: complete(server, one[0], temperature=one[1], seed=len(one[0])), some))

        return answers(asked[: len(PROMPTS)]) + answers(asked[len(PROMPTS) :]) if apart else answers(asked)


def say_again(server: EngineServer) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts, one request at a time, and the tokens of a step."""
    before, said = server.metric(ROUNDS), [complete(server, prompt) for prompt in PROMPTS]
    return said, sum(map(len, said)) / (len(said) + server.metric(ROUNDS) - before)


def test_same_texts_in_fewer_steps_also_after_kill_and_restart(
    launch: Launch, plain: list[list[int]], tmp_path: Path
) -> None:
    """Greedy texts and sampled ones with a seed, from a cold cache and a warm one, with so little memory that requests
    begin anew; each is recorded once, and whole. Other requests come through a gateway.
    """
    cache, little = tmp_path / "cache", (*LITTLE, "--max-model-len", "512")
    server = launch(*little, AGENTSPEC_CACHE_PATH=str(cache))
    assert server.text().count("agentspec drafts for this server") == 1
    said = say(server)
    assert said == plain
    with ThreadPoolExecutor(8) as pool:
        said += pool.map(lambda prompt: complete(server, prompt, max_tokens=100), PROMPTS * 3)
    assert server.metric("vllm:num_preemptions_total") > 0
    again, per_step = say_again(server)
    assert again == plain[: len(PROMPTS)] and per_step > 3
    while len(stored_in(cache)) < len(said + again):
        time.sleep(0.1)
    server.kill()
    assert stored_in(cache) == sorted(said + again)
    server = launch(*little, AGENTSPEC_CACHE_PATH=str(cache))
    again, per_step = say_again(server)
    assert again == plain[: len(PROMPTS)] and per_step > 3 and say(server) == plain
    call_through_a_gateway(server)
    ask_for_more(server)
    server.stop()
    assert {session for (session,) in rows_in(cache, "session") if session} == {"s1", "s2"}


def ask_for_more(server: EngineServer) -> None:
    """A salt, answers that reach the model's length, what vLLM refuses with drafts, JSON by a schema: Triton's
    interpreter cannot run its kernel.
    """
    schema = {"type": "object", "properties": {"n": {"enum": [17]}}, "required": ["n"], "additionalProperties": False}
    shaped = {
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    if "TRITON_INTERPRET" not in server.variables:
        answers = [complete(server, "Say a number as JSON.", **shaped) for _ in range(2)]
        assert answers[0] == answers[1] and answers[0]
    assert len(complete(server, PROMPTS[0], max_tokens=20, cache_salt="pepper")) == 20
    for refused in ({"min_p": 0.1}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(HTTPError, match="400"):
            complete(server, PROMPTS[0], temperature=1.0, **refused)  # greedy sampling drops min_p
    long = [complete(server, "word " * 95, max_tokens=512 - 475) for _ in range(2)]
    assert long[0] == long[1] and len(long[0]) == 37


def test_every_output_is_recorded_once_and_whole(
    launch: Launch, plain: list[list[int]], tmp_path: Path, runner: str
) -> None:
    """By engines that share a folder, and in V2 by ranks of which one drafts. Counts of drafts are those of vLLM."""
    processes = {"first": ("--data-parallel-size", "2"), "V2": ("--tensor-parallel-size", "2")}[runner]
    (metrics := tmp_path / "metrics").mkdir()
    more = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    server = launch(*processes, AGENTSPEC_CACHE_PATH=str(tmp_path / "cache"), **more)
    said = [complete(server, PROMPTS[0], vllm_xargs={"agentspec_prediction": plain[0]})]
    with ThreadPoolExecutor(8) as pool:
        said += pool.map(lambda prompt: complete(server, prompt), PROMPTS * 3)
    assert said == plain[:1] + plain[: len(PROMPTS)] * 3
    while len(stored_in(tmp_path / "cache")) < len(said):
        time.sleep(0.1)
    complete(server, PROMPTS[0], max_tokens=1)  # vLLM has counted all steps before when it answers
    load = parse_load(server.metrics())
    assert load is not None and load.accepted["prediction"] > 0 and load.accepted["cache"] > 0
    for kind, counts in (("draft", load.drafted), ("accepted", load.accepted)):
        assert sum(counts.values()) == server.metric(f"vllm:spec_decode_num_{kind}_tokens_total")
    server.stop()
    assert stored_in(tmp_path / "cache") == sorted(said)


def as_upstream(server: EngineServer) -> Settings:
    return Settings(backends={"up": OpenAISettings(base_url=f"{server.url}/v1")})  # type: ignore[arg-type]


async def generate(server: EngineServer, request: GenerateRequest) -> list[Delta]:
    async with Runtime(as_upstream(server)) as runtime:
        return [delta async for delta in runtime.generate(request)]


def call_through_a_gateway(server: EngineServer) -> None:
    """Calls with labels, hidden ones, and one that its client leaves."""
    question = {"role": "user", "content": PROMPTS[0]}
    body = {"model": "model", "messages": [question], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    labels = {
        f"x-agentspec-{name}": value for name, value in (("session", "s1"), ("workflow", "edit"), ("step", "fix"))
    }
    with TestClient(create_app(Runtime(as_upstream(server))), base_url="http://127.0.0.1") as gateway:
        while gateway.get("/ready").status_code != 200:
            time.sleep(0.1)
        answers = [gateway.post("/v1/chat/completions", json=body, headers=labels).json() for _ in range(2)]
        for route in ("chat/completions", "messages"):
            hidden = {"x-agentspec-session": "hidden", "x-agentspec-store": "off"}
            assert gateway.post(f"/v1/{route}", json=body, headers=hidden).status_code == 200
    assert [answer["prompt_token_ids"] for answer in answers] == [None, None]
    sampling = SamplingParams(temperature=0.0, max_tokens=48)
    request = GenerateRequest(model="model", messages=[question], labels=Labels(session="s2"), sampling=sampling)
    deltas = anyio.run(generate, server, request)
    assert deltas[-1].usage is not None
    assert sum(len(delta.token_ids) for delta in deltas) == deltas[-1].usage.completion_tokens
    left = {"stream": True, "ignore_eos": True, "max_tokens": 400, "vllm_xargs": {"agentspec_session": "left"}}
    with post(server, "chat/completions", messages=[question], **left) as stream:
        assert stream.readline()
