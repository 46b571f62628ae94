"""C1: mutated bodies on every route, and fields of wrong types: an answer or the client's own error."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import agentspec.protocol
import agentspec.proxy
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend
from tests.proxy.encoder import CountingEncoder

pytestmark = pytest.mark.reliability

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
JSON = {"content-type": "application/json"}
GOLDEN = Path(__file__).parents[1] / "protocol" / "golden"
SAID = [{"role": "user", "content": "hi"}]
SMALL: dict[str, Any] = {
    CHAT: {"messages": SAID, "max_tokens": 3},
    COMPLETIONS: {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    EMBEDDINGS: {"input": "x"},
}


def accepted(name: str, path: str) -> list[dict[str, Any]]:
    """The bodies of an API that the golden transcripts accept, each with what a request of the route needs."""
    cases = map(json.loads, (GOLDEN / f"{name}.jsonl").read_text().splitlines())
    return [{**SMALL[path], **body} for body, outcome in cases if "reads" in outcome]


BODIES: dict[str, list[dict[str, Any]]] = {
    CHAT: accepted("chat", CHAT),
    COMPLETIONS: accepted("completion", COMPLETIONS),
    EMBEDDINGS: [{"input": "hi"}, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 3, "user": "u"}],
    "/v1/messages": accepted("messages", "/v1/messages"),
    "/v1/messages/count_tokens": accepted("messages", "/v1/messages"),
    "/v1/responses": accepted("responses", "/v1/responses"),
    "/tokenize": [{"messages": SAID, "tools": [], "add_special_tokens": False}],
    "/detokenize": [{"tokens": [0, 1, 2]}],
}


def fields() -> set[str]:
    """The names of all fields of all bodies and their parts, as they are sent."""
    names = set[str]()
    for package in (agentspec.protocol, agentspec.proxy):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            for one in vars(importlib.import_module(found.name)).values():
                if isinstance(one, type) and issubclass(one, BaseModel):
                    names |= {field.alias or name for name, field in one.model_fields.items()}
    assert names > {"logit_bias", "chat_template_kwargs", "previous_response_id", "tool_choice", "guided_json"}
    return names - {"model"}


WORDS = json.dumps(BODIES).replace('"', " ").split()
NAMES = sorted({key for key in WORDS if key.isidentifier()} | fields())
# Written as they stand into a body where a value was: JSON, and what is not.
ODD = [
    *"""
    null true false 0 -0 -1 1.5 0.0 2 1e-320 5e-324 1e308 1e-400 -1e308 127 128 129 4294967296 2147483647 2147483648
    65535 9223372036854775807 9223372036854775808 18446744073709551615 9999999999999999999999 "" "x" [] {} [[]] [null]
    {"":null} "\\u0000" "http://169.254.169.254/" {"url":"file:///etc/passwd"} {"a":1} {"api_base":"x"} "1" "NaN" [1,2]
    ["a","b"] [[[[[[[[[[]]]]]]]]]] {"type":"text","text":"x"} {"type":"object"} "\\ud83d\\ude00" "assistant" "tool"
    "text" "auto" [""] {"type":"json_object"} {"role":"user","content":"x"} "(a|aa)*b" "[" "{{7*7}}" "%s" "\\u202e"
    """.split(),
    json.dumps("x" * 70_000),
    json.dumps(["x"] * 3000),
    json.dumps([{}] * 3000),
    json.dumps({str(number): number for number in range(3000)}),
    "[" * 100 + "]" * 100,
    *"""
    {"type":"image","source":{"type":"url","url":"x"}} {"type":"tool_use","id":"","name":"","input":{}} "item_reference"
    {"type":"text","text":1} {"type":"input_text","text":1} {"type":"function_call_output","call_id":"c1"} {"effort":[]}
    {"type":"function_call","call_id":"c2","name":"","arguments":""} {"type":"tool_search","execution":"client"}
    {"type":"custom","name":"edit","format":{"type":"grammar","syntax":"regex","definition":"("}}
    {"type":"namespace","name":"look","tools":[{"type":"function","name":"look"}]} {"type":"tool","name":"look"}
    {"type":"additional_tools","role":"developer","tools":[]} {"type":"web_search_20250305","name":"web_search"}
    """.split(),
]
BROKEN = [
    *"""
    1e999 -1e400 NaN -Infinity 01 +1 1. ' ' "\\ud800" "\\udfff\\ud800" {"\\ud83d":1} {"a":1,"a":2} "\\x" /**/1 [1,]
    {"a":} nil
    """.split(),
    "9" * 5000,
    "[" * 1000 + "]" * 1000,
    '{"a":' * 1000 + "1" + "}" * 1000,
    "[" * 1000,
]


def mutated(seed: int, path: str) -> bytes:
    """A body of the route with up to three changes: other values, keys twice or gone, bytes flipped, cut or doubled."""
    chance = random.Random(f"{path} {seed}")
    body = {**chance.choice(BODIES[path]), "model": "local"}
    if chance.random() < 0.2:
        body[chance.choice([*NAMES, "unheard_of", "api_base", "n", "max_tokens", "x" * 300])] = "MARK"
    body = json.loads(json.dumps(body))
    for _ in range(chance.randint(1, 2)):
        place = chance.choice(list(_places(body)))
        if isinstance(place[0], dict) and chance.random() < 0.2:
            del place[0][place[1]]
        elif isinstance(place[0], dict) and chance.random() < 0.2:
            place[0][chance.choice(NAMES)] = "MARK"
        else:
            place[0][place[1]] = "MARK"
    text = json.dumps(body, ensure_ascii=chance.random() < 0.5)
    while '"MARK"' in text:
        text = text.replace('"MARK"', chance.choice(ODD if chance.random() < 0.85 else BROKEN), 1)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        data = data.replace(b"{", b'{"model": "local",' if chance.random() < 0.5 else b'{"a":1,"a":1,', 1)
    if chance.random() < 0.1:
        data = _broken(bytearray(data), chance)
    return data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    for one in waiting:
        for key, item in one.items() if isinstance(one, dict) else enumerate(one):
            yield one, key
            if isinstance(item, (dict, list)):
                waiting.append(item)


def _broken(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    match chance.randrange(5):
        case 0:
            data[at] = chance.randrange(256)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = chance.choice(
                [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b'"', b"\\", b"}"]
            )
        case 3:
            data += data[:at]
        case _:
            data[:0] = chance.choice([b"\xef\xbb\xbf", b" ", b"\x1f\x8b", b"//", b"[", b"\xfe\xff"])
    return bytes(data)


@pytest.fixture(scope="module")
def client(shared_gateway: Any, shared_upstream: Any) -> Iterator[httpx.Client]:
    """Of a gateway with models of its own, an upstream that answers chats, and one that knows Responses."""

    def native(request: Any) -> None:
        if request.method == "GET":
            request.answer(b'{"data": []}')
        elif request.body == b"{}":
            request.answer(b"{}", 400)
        elif b'"stream": true' in request.body or b'"stream":true' in request.body:
            ended = b'{"type":"response.completed","response":{"id":"resp_1"}}'
            request.answer(b"event: response.completed\ndata: " + ended + b"\n\n", content_type="text/event-stream")
        else:
            request.answer(b'{"id": "resp_1", "object": "response", "output": []}')

    urls = {"up": shared_upstream(as_vllm).url, "native": shared_upstream(native).url}
    settings = Settings(
        backends={name: OpenAISettings(base_url=url) for name, url in urls.items()},
        models={name: ModelSettings(backend=name) for name in urls},
    )
    own = {"local": FakeBackend(lambda request: "fine"), "e": CountingEncoder()}
    with httpx.Client(base_url=shared_gateway(own, settings).url, headers=JSON, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def engine(shared_gateway: Any, tiny_model: Path) -> Iterator[httpx.Client]:
    """A client of a gateway with the local engine, which compiles forms, renders templates and tokenizes."""
    pytest.importorskip("torch")
    settings = Settings(
        server=ServerSettings(request_timeout=600),
        backends={"tiny": TorchSettings(model=str(tiny_model), device="cpu")},
        models={"local": ModelSettings(backend="tiny")},
    )
    with httpx.Client(base_url=shared_gateway({}, settings).url, headers=JSON, timeout=600) as client:
        yield client


COUNTS = [
    pytest.param(25, id="25"),
    pytest.param(500, id="500", marks=pytest.mark.slow),
    pytest.param(20_000, id="20000", marks=pytest.mark.long),
]
ROADS = [
    *((model, path) for model in ("local", "up") for path in (CHAT, COMPLETIONS, EMBEDDINGS)),
    *(("local", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize")),
    ("local", "/detokenize"),
    *(("up", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")),
    ("native", "/v1/responses"),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("model", "path"), ROADS)
def test_c1_mutated_bodies_get_2xx_or_4xx(client: httpx.Client, count: int, model: str, path: str) -> None:
    own = model == "local" and path == EMBEDDINGS
    check(client, count, "e" if own else model, path)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c1_mutated_bodies_to_the_local_engine(engine: httpx.Client, count: int, path: str) -> None:
    check(engine, count, "local", path)


def check(client: httpx.Client, count: int, model: str, path: str) -> None:
    for seed in range(count):
        body = mutated(seed, path).replace(b'"model": "local"', b'"model": "%s"' % model.encode())
        response = client.post(path, content=body)
        assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, (seed, body[:500], response.text)
        if response.status_code >= 400:
            told = response.json()
            error = told["error"]
            assert {"message", "type"} <= {*error} and error["message"], (seed, error)
            assert {"param", "code"} <= {*error} or "/messages" in path, (seed, error)
            assert told.get("type") == ("error" if "/messages" in path else None) and len(response.content) < 4096
        elif path == "/v1/responses" and response.headers["content-type"].startswith("text/event-stream"):
            assert "event: response.completed\n" in response.text, (seed, body[:500])
    assert client.post(path, json={"model": model, **SMALL[path]}).status_code == 200


def as_vllm(request: Any) -> None:
    """An upstream as vLLM: chats, and the tokenizer's routes; it takes whatever comes."""
    answers = {
        "/v1/chat": b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}',
        "/v1/completions": b'{"choices":[{"text":"Hi","finish_reason":"stop"}]}',
        "/v1/embeddings": b'{"data":[{"embedding":[1.0],"index":0}],"usage":{"prompt_tokens":1,"total_tokens":1}}',
        "/tokenize": b'{"tokens":[1,2,3],"count":3,"max_model_len":100}',
        "/detokenize": b'{"prompt":"x"}',
    }
    found = next((body for path, body in answers.items() if request.target.startswith(path)), None)
    request.answer(found or b"{}", 200 if found else 404)


WRONG: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, 2**63, "", "x", "\0", "\ud800", "NaN", [], [[]], [None], [["a", "b"]],
    ["a", 1, {}], {}, {"": None}, {"a": {"a": []}}, {"\ud800": 1}, [[[[[[]]]]]], {"type": 5}, {"type": "x"},
    {"type": []}, [{"type": "text"}], [{"type": "function", "function": None}], [{"role": None}], [{"role": "tool"}],
]  # fmt: skip


@pytest.mark.parametrize(
    "share", [pytest.param(0.002, id="some"), pytest.param(0.02, id="many", marks=pytest.mark.slow),
              pytest.param(1.0, id="all", marks=pytest.mark.long)],
)  # fmt: skip
@pytest.mark.parametrize("model", ["local", "up"])
def test_c1_no_wrong_type_of_any_field_is_an_error_of_ours(client: httpx.Client, model: str, share: float) -> None:
    chosen, statuses = random.Random(5), set[int]()
    for path, base in SMALL.items():
        named = "e" if model == "local" and path == EMBEDDINGS else model
        for name, value in product(sorted(fields()), WRONG):
            if chosen.random() < share:
                response = client.post(path, content=json.dumps({"model": named, **base, name: value}))
                statuses.add(response.status_code)
                assert response.status_code < 500, (path, name, value, response.text)
                assert response.status_code < 400 or response.json()["error"]["message"], (path, name, value)
    assert {200, 400} <= statuses
