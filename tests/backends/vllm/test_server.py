"""Real vLLM servers with our drafter inside. Made by `.ci/vllm-env`; skipped where there is no such environment."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.cache.storage.codec import decode
from agentspec.proxy import create_app
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams
from tests.vllm_server import SUFFIX, VllmServer, ask

ROOT = Path(__file__).parents[3]
ENVIRONMENT = find_environment(ROOT)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]

PROMPTS = load_prompts("edit_short")[:4]

Launch = Callable[..., VllmServer]
Token = tuple[str, float]
SHORT = SamplingParams(temperature=0.0, max_tokens=48)
EAGER = ("--enforce-eager",)  # starts in half a minute, not in three
NEAR_TIE = 1e-3  # in log-probability


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Starts servers, and stops all at the end."""
    model = locate("smollm2-135m")
    if model is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    folder, started = tmp_path_factory.mktemp("vllm"), list[VllmServer]()

    def launch(name: str, speculative: object = SUFFIX, options: Sequence[str] = (), **variables: str) -> VllmServer:
        assert ENVIRONMENT is not None
        log = folder / f"{len(started)}-{name}.log"
        chosen = (*EAGER, *options)
        server = VllmServer(ENVIRONMENT, model.folder, log, speculative, variables, chosen)  # type: ignore[arg-type]
        started.append(server)
        return server.start()

    yield launch
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def plain(launch: Launch) -> list[list[Token]]:
    """What the model says without speculation."""
    server = launch("plain", None)
    answers = [say(server, prompt) for prompt in PROMPTS]
    server.stop()
    return answers


def exact(server: VllmServer, plain: list[list[Token]]) -> bool:
    answers = [[token for token, _ in say(server, prompt)] for prompt in PROMPTS]
    return all(same_but_for_ties(*pair) for pair in zip(answers, plain, strict=True))


def tokens_per_step(server: VllmServer, prompts: Sequence[str] = PROMPTS) -> float:
    answers = [ask(server, prompt, max_tokens=96) for prompt in prompts]
    return sum(answer.tokens for answer in answers) / sum(answer.steps for answer in answers)


def same_but_for_ties(tokens: list[str], plain: list[Token]) -> bool:
    """Equal, or parting only where two tokens were about as likely: verified rows are computed in other batches."""
    for token, (expected, gap) in zip(tokens, plain, strict=False):
        if token != expected:
            return gap < NEAR_TIE
    return len(tokens) == len(plain)


def post(server: VllmServer, **body: object) -> Any:
    """The open answer to a chat request."""
    data, headers = json.dumps({"model": "model", **body}).encode(), {"Content-Type": "application/json"}
    return urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/v1/chat/completions", data, headers), timeout=300
    )


def say(server: VllmServer, prompt: str) -> list[Token]:
    """The greedy answer token by token, with how much more likely each was than the next best."""
    messages = [{"role": "user", "content": prompt}]
    with post(server, messages=messages, max_tokens=96, temperature=0.0, logprobs=True, top_logprobs=2) as answer:
        content = json.load(answer)["choices"][0]["logprobs"]["content"]
    return [(one["token"], one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"]) for one in content]


def test_same_answers_in_fewer_steps_also_after_kill_and_restart(
    launch: Launch, plain: list[list[Token]], tmp_path: Path
) -> None:
    server = launch("first", SUFFIX, AGENTSPEC_CACHE_PATH=str(tmp_path / "cache"))
    assert server.text().count("agentspec drafts for this server") == 1
    assert exact(server, plain)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: ask(server, prompt, max_tokens=96), PROMPTS * 2))
    assert exact(server, plain)
    assert tokens_per_step(server) > 3
    time.sleep(3)  # until what was said is on disk
    server.kill()
    server = launch("second", SUFFIX, AGENTSPEC_CACHE_PATH=str(tmp_path / "cache"))
    assert tokens_per_step(server) > 3
    assert exact(server, plain)
    server.stop()


def test_what_clients_may_ask_for(launch: Launch, plain: list[list[Token]]) -> None:
    """Leaving in mid-stream, JSON by schema, salts, answers that reach the model's length; there is no database."""
    server = launch("odd", AGENTSPEC_STORE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert "in memory only" in server.text()
    with post(server, messages=[{"role": "user", "content": PROMPTS[1]}], stream=True, ignore_eos=True) as stream:
        assert stream.readline()
    assert exact(server, plain)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answers = [ask(server, "Say a number as JSON.", max_tokens=40, response_format=shaped) for _ in range(2)]
    assert answers[0].text.startswith("{")
    assert answers[0].text == answers[1].text
    assert ask(server, PROMPTS[0], max_tokens=20, cache_salt="pepper").tokens == 20
    long = [ask(server, "word " * 1900, max_tokens=2048 - 1950, ignore_eos=True) for _ in range(2)]
    assert long[0].tokens == long[1].tokens > 50
    server.stop()


@pytest.mark.parametrize(
    "options",
    [("--num-gpu-blocks-override", "17"), ("--tensor-parallel-size", "3"), ("--data-parallel-size", "2")],
    ids=["preempted", "ranks", "engines"],
)
def test_every_output_is_recorded_once_and_whole(
    launch: Launch, plain: list[list[Token]], tmp_path: Path, options: Sequence[str]
) -> None:
    """Requests that begin anew for want of memory, ranks of which one drafts, and engines that share a folder."""
    where = {"AGENTSPEC_CACHE_PATH": str(tmp_path / "cache"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = launch("whole", options=options, **where)
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda prompt: ask(server, prompt, max_tokens=300, ignore_eos=True).text, PROMPTS * 2))
    assert exact(server, plain)
    assert server.metric("vllm:num_preemptions_total") > 0 or "--num-gpu-blocks-override" not in options
    server.stop()
    model = locate("smollm2-135m")
    assert model is not None
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    stored = [decode(row).tokens.tolist() for row in rows(tmp_path / "cache", "*")]
    long = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in stored if len(tokens) == 300]
    assert sorted(long) == sorted(said)


def rows(folder: Path, columns: str) -> Sequence[Any]:
    """Those of the sequences in the database of a server that has stopped."""
    with sa.create_engine(f"sqlite:///{folder}/sequences.sqlite3").connect() as database:
        return database.execute(sa.text(f"SELECT {columns} FROM sequences")).all()


def as_upstream(server: VllmServer) -> Settings:
    return Settings(backends={"up": OpenAISettings(base_url=f"{server.url}/v1")})  # type: ignore[arg-type]


async def generate(server: VllmServer, request: GenerateRequest) -> list[Delta]:
    async with Runtime(as_upstream(server)) as runtime:
        return [delta async for delta in runtime.generate(request)]


def test_a_gateway_in_front(launch: Launch, tmp_path: Path) -> None:
    server = launch("gateway", AGENTSPEC_CACHE_PATH=str(tmp_path / "cache"))
    question = {"role": "user", "content": PROMPTS[0]}
    body = {"model": "model", "messages": [question], "max_tokens": 48, "temperature": 0}
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
        metrics = gateway.get("/metrics").text
    assert [answer["prompt_token_ids"] for answer in answers] == [None, None]
    counted = {line.split("{")[0]: float(line.split()[1]) for line in metrics.splitlines() if '{backend="up"}' in line}
    assert counted["agentspec_upstream_draft_tokens_total"] >= counted["agentspec_upstream_accepted_tokens_total"] > 0
    request = GenerateRequest(model="model", messages=[question], labels=Labels(session="s2"), sampling=SHORT)
    deltas = anyio.run(generate, server, request)
    assert deltas[-1].usage is not None
    assert sum(len(delta.token_ids) for delta in deltas) == deltas[-1].usage.completion_tokens
    left = {"agentspec_session": "left"}
    with post(server, messages=[question], stream=True, ignore_eos=True, max_tokens=1500, vllm_xargs=left) as stream:
        assert stream.readline()
    time.sleep(3)  # until what was said is on disk
    server.stop()
    stored = set(map(tuple, rows(tmp_path / "cache", "session, workflow, step")))
    assert stored == {("s1", "edit", "fix"), ("s2", None, None)}
