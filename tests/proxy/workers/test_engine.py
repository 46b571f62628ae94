"""Local models in a process of their own: the same bytes as from one process, and what happens when it dies."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONFIGURATION = """
[server]
workers = {workers}
hang_timeout = 600
[[server.api_keys]]
tenant = "a \u00e9"
key_file = "{folder}/key"
[[server.api_keys]]
role = "operator"
key_file = "{folder}/operator"
[backends.local]
kind = "torch"
model = "{model}"
[backends.texts]
kind = "encoder"
model = "{encoder}"
device = "cpu"
[models.tiny]
backend = "local"
[models.vectors]
backend = "texts"
[model_aliases]
"gpt-*" = "tiny"
"""
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
_JOINED = ("content", "text", "arguments", "token", "tokens", "token_logprobs", "text_offset", "token_ids")
OFF = {"x-agentspec-speculation": "off"}
_NO_SEED = ("seed", "/v1/messages/count_tokens")
CHATS: list[dict[str, Any]] = [
    {"messages": HI},
    {"messages": HI, "n": 2, "temperature": 1.0},
    {"messages": HI, "logprobs": True, "top_logprobs": 2},
    {"messages": HI, "stop": ["\x1b"]},
    {"messages": HI, "return_token_ids": True},
    {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    {"messages": HI, "response_format": FORM},
    {"messages": HI, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": "x" * 200_000}]},
    {"messages": HI, "max_tokens": 100_000},
    {"messages": HI, "temperature": -1},
    {"messages": HI, "unknown_field": 1},
    {"messages": "nonsense"},
    {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/none"}}}},
    {"model": "none", "messages": HI},
]


@pytest.fixture(scope="module")
def gateways(shared_workers: Any, tiny_model: Path, tiny_encoder: Path, tmp_path_factory: Any) -> Any:
    """The same configuration in one process, and in two workers and an engine's process."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "key").write_text("canary")
    (folder / "operator").write_text("operator-canary")
    given = {"folder": folder, "model": tiny_model, "encoder": tiny_encoder}
    texts = [CONFIGURATION.format(workers=number, **given) for number in (1, 2)]
    started = [shared_workers(text) for text in texts]
    started[0].said("ready")
    return started[0], started[1].ready()


@pytest.fixture(scope="module")
def both(gateways: Any) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    with gateways[0].client("canary") as one, gateways[1].client("canary") as several:
        yield one, several


def shape(answer: httpx.Response) -> tuple[int, dict[str, str], str]:
    """An answer without what differs by chance: ids, times, and the seconds that are an estimate."""
    dropped = ("date", "content-length", "x-request-id", "request-id")
    headers = {name: value for name, value in answer.headers.items() if name not in dropped}
    text = re.sub(r'"(id|created|estimated_seconds_saved)":("[^"]*"|-?[\d.e-]+)', r'"\1":0', answer.text)
    if "event-stream" in headers["content-type"]:
        text = whole(text)
    return answer.status_code, headers, re.sub(r"req-\w+", "", text)


def whole(stream: str) -> str:
    """What a stream says, however many tokens went into one event, which is a matter of timing."""
    found: dict[str, Any] = {}
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        for path, value in leaves(json.loads(data) if data.startswith("{") else data, ()):
            known = found.setdefault(" ".join(path), [])
            if (path[-1:] and path[-1] in _JOINED) or value not in known:
                known.append(value)
    joined = {path: "".join(map(str, values)) for path, values in found.items()}
    return json.dumps(joined, indent=1, sort_keys=True)


def leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, (*path, str(value.get("index", "")), key))
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, path)
    else:
        yield path, value


def ask(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    whole = {"model": "tiny", "max_tokens": 12, "seed": 7, **body}
    return client.post(path, json=whole, headers={"x-agentspec-speculation": "off", **headers})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", range(len(CHATS)))
def test_the_answer_is_the_single_process_s(both: Any, number: int, stream: bool) -> None:
    body = {"stream": stream, **CHATS[number]}
    if not stream:
        body.pop("stream_options", None)
    one, several = (ask(client, CHAT, body) for client in both)
    assert shape(several) == shape(one)
    assert ("content-length" in several.headers) == ("content-length" in one.headers)
    assert b"\0" not in several.content


@pytest.mark.parametrize("stream", [False, True])
def test_completions_and_headers(both: Any, stream: bool) -> None:
    for body, headers in (
        ({"prompt": "once"}, {}),
        ({"prompt": [104, 105], "echo": True, "logprobs": 1}, {"x-agentspec-store": "off"}),
        ({"prompt": "x"}, {"x-agentspec-session": "%FF"}),
        ({"prompt": "x"}, {"x-agentspec-store": "perhaps"}),
        ({"prompt": "x"}, {"content-type": "text/plain"}),
        ({"prompt": "x"}, {"x-agentspec-relayed-tenant": "other"}),
    ):
        one, several = (ask(client, COMPLETIONS, {"stream": stream, **body}, **headers) for client in both)
        assert shape(several) == shape(one)


def test_speculation_is_told_and_counted(both: Any, gateways: Any) -> None:
    keys = []
    for client in both:
        answer = client.post(CHAT, json={"model": "tiny", "messages": HI, "max_tokens": 12, "seed": 7}).json()
        keys.append((answer["usage"], list(answer["speculation"])))
    assert keys[0] == keys[1]
    totals = []
    for gateway in gateways:
        with gateway.client("operator-canary") as operator:
            text = operator.get("/metrics").text
        found = dict(re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE))
        assert float(found["agentspec_engine_forwards_total"]) > 0 and "agentspec_index_bytes" in found
        totals.append([found[f"agentspec_{name}_tokens_total"] for name in ("prompt", "completion")])
        assert re.search(r'agentspec_time_to_first_token_seconds_count\{model="tiny"\}', text)
    assert totals[0] == totals[1]  # streams without usage in their events are counted, too
    names = [set(gateway.said("request", outcome="ok", stream=True)[0]) - {"worker"} for gateway in gateways]
    assert names[0] == names[1] >= {"prompt_tokens", "completion_tokens", "first_token_seconds", "tenant"}


def test_stored_responses_are_those_of_every_worker(gateways: Any) -> None:
    with gateways[1].clients(4, "canary") as (one, other, *more):
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 8}
        first = one.post("/v1/responses", json=body).json()
        assert [client.get(f"/v1/responses/{first['id']}").json() for client in (one, other, *more)] == [first] * 4
        second = other.post("/v1/responses", json={**body, "previous_response_id": first["id"]}).json()
        assert second["previous_response_id"] == first["id"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert other.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        assert {client.get(f"/v1/responses/{first['id']}").status_code for client in (one, other)} == {404}
        events = one.post("/v1/responses", json={**body, "stream": True}).text
        assert "response.incomplete" in events and "\0" not in events


def test_messages_and_responses_are_the_single_process_s(both: Any) -> None:
    for path, body in (
        ("/v1/messages", {"max_tokens": 5, "messages": HI}),
        ("/v1/messages", {"max_tokens": -5, "messages": HI}),
        ("/v1/messages/count_tokens", {"messages": HI, "max_tokens": None}),
        ("/v1/responses", {"input": "hi", "max_tokens": None, "seed": None, "temperature": 7}),
        ("/v1/responses", {"input": "hi", "max_tokens": None, "seed": None, "previous_response_id": "none"}),
    ):
        given = {"model": "tiny", "seed": 7, **body}
        sent = {name: value for name, value in given.items() if value is not None and (name, path) != _NO_SEED}
        one, several = (client.post(path, json=sent, headers=OFF) for client in both)
        assert shape(several) == shape(one)
        assert one.status_code in (200, 400, 404)


def test_tokens_and_vectors_are_the_single_process_s(both: Any) -> None:
    for path, body in (
        ("/tokenize", {"model": "tiny", "prompt": "a\u00f1b", "return_token_strs": True}),
        ("/tokenize", {"model": "gpt-5", "messages": HI, "tools": [TOOL]}),
        ("/tokenize", {"model": "tiny", "prompt": "x" * 200_000}),
        ("/tokenize", {"model": "tiny", "prompt": 5}),
        ("/tokenize", {"model": "vectors", "prompt": "cat"}),
        ("/detokenize", {"model": "tiny", "tokens": [104, 105]}),
        ("/detokenize", {"model": "tiny", "tokens": [2**31 - 1]}),
        ("/detokenize", {"model": "none", "tokens": [1]}),
        ("/v1/embeddings", {"model": "vectors", "input": ["the cat", "a river"]}),
        ("/v1/embeddings", {"model": "vectors", "input": "the cat", "encoding_format": "base64"}),
        ("/v1/embeddings", {"model": "vectors", "input": "cat " * 100}),
        ("/v1/embeddings", {"model": "vectors", "input": "cat " * 100, "truncate_prompt_tokens": -1}),
        ("/v1/embeddings", {"model": "tiny", "input": "cat"}),
        (CHAT, {"model": "vectors", "messages": HI}),
        ("/v1/messages", {"model": "gpt-5", "max_tokens": 5, "messages": HI, "stream": True, "seed": 7}),
    ):
        one, several = (client.post(path, json=body, headers=OFF) for client in both)
        assert shape(several) == shape(one), (path, body)
        assert one.status_code in (200, 400, 404), one.text
        assert b"\0" not in several.content


def test_a_message_is_answered_by_every_worker_and_told_apart(gateways: Any) -> None:
    """Both workers are asked, each on its own connection, and what they were asked is in the log with their numbers."""
    asked = {
        "/v1/messages": {"model": "tiny", "max_tokens": 3, "messages": HI},
        "/tokenize": {"model": "tiny", "prompt": "hi"},
        "/detokenize": {"model": "tiny", "tokens": [104]},
        "/v1/embeddings": {"model": "vectors", "input": "cat"},
    }
    with gateways[1].clients(2, "canary") as clients:
        for path, body in asked.items():
            for number, client in enumerate(clients):
                name = f"both{path.replace('/', '-')}-{number}"
                answer = client.post(path, json=body, headers={"x-request-id": name})
                assert answer.status_code == 200, answer.text
            served = {gateways[1].said("request", request_id=f"{name[:-1]}{at}")[0]["worker"] for at in (0, 1)}
            assert served == {1, 2}, path


def test_the_socket_is_this_user_s_alone(gateways: Any) -> None:
    found = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith("/engine")}
    assert found
    for path in map(Path, found):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_client_that_leaves_frees_the_engine(gateways: Any, until: Any) -> None:
    gateway = gateways[1]
    with gateway.client("canary") as client, gateway.client("operator-canary") as operator:
        body = {"model": "tiny", "messages": HI, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client.stream("POST", CHAT, json=body) as response:
            next(response.iter_lines())
        until(lambda: 'agentspec_engine_active{backend="local"} 0.0' in operator.get("/metrics").text, 300)
    assert gateway.said("request", outcome="cancelled", model="tiny")


def test_the_engine_s_death_is_told_and_it_is_started_again(gateways: Any, until: Any) -> None:
    gateway = gateways[1]
    before = gateway.pid("engine")
    body = {"model": "tiny", "messages": HI, "max_tokens": 1900, "ignore_eos": True}
    lines: list[str] = []
    begun = threading.Event()

    def stream(client: httpx.Client) -> None:
        with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    with gateway.clients(3, "canary") as clients, ThreadPoolExecutor(2) as pool:
        os.kill(before, signal.SIGSTOP)  # so that both are under way
        streamed, whole = pool.submit(stream, clients[0]), pool.submit(clients[1].post, CHAT, json=body)
        with gateway.client("operator-canary") as operator:
            until(lambda: 'tenant_running{tenant="a \u00e9"} 2.0' in operator.get("/metrics").text, 300)
        os.kill(before, signal.SIGCONT)
        assert begun.wait(300)
        os.kill(before, signal.SIGKILL)
        streamed.result()
        refused = whole.result()
        assert refused.status_code in (200, 503)
        if refused.status_code == 503:
            assert refused.json()["error"]["code"] == "engine_restarting" and refused.headers["retry-after"] == "1"
        assert '"code":"engine_restarting"' in lines[-4] and lines[-2:] == ["data: [DONE]", ""]
        until(lambda: clients[2].get("/ready").status_code == 503, 300)
        assert clients[2].get("/health").status_code == 200
        assert clients[2].post(CHAT, json=body).json()["error"]["code"] == "not_ready"
        until(lambda: clients[2].get("/ready").status_code == 200, 300)
        assert ask(clients[2], CHAT, {"messages": HI}).status_code == 200
    assert gateway.pid("engine") != before
    with gateway.client("operator-canary") as operator:
        text = operator.get("/metrics").text
    assert float(re.findall(r"^agentspec_engine_forwards_total\S* (\S+)", text, re.MULTILINE)[0]) > 50


def test_the_end_flushes_and_is_clean(gateways: Any) -> None:
    assert gateways[1].end() == 0
    assert not [line for line in gateways[1].lines if line["event"] == "internal error"]
    assert "Traceback" not in gateways[1].log.read_text()
