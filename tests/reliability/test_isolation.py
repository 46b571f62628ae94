"""I1-I4, I8, I10: what a client without a key, or another tenant, can learn or do: nothing."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from starlette.datastructures import Headers
from starlette.routing import Route

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.cache import SuffixCache
from agentspec.cache.settings import CacheSettings
from agentspec.cache.tokens import Tokens
from agentspec.errors import AuthenticationError, EngineError
from agentspec.proxy.app import create_app
from agentspec.proxy.auth import Authenticator
from agentspec.reasoning.settings import (
    STRATEGIES,
    SpecReasonSettings,
    StrategySettings,
)
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.speculation.cost import CostModel
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest
from tests.thinking_model import ThinkingModel

pytestmark = pytest.mark.reliability

CANARIES = 1000
LENGTH = 40
SEEN = 12  # leading tokens of a canary that the other tenant prompts with
SMALL_EFFECT = 0.05  # a share of the median time
KS_LIMIT = 2.69  # two-sample Kolmogorov-Smirnov, p = 1e-6: sqrt(-ln(p / 2) / 2)


def canary(number: int) -> Tokens:
    return np.arange(LENGTH, dtype=np.int32) + 1_000_000 + LENGTH * number


def fill(cache: SuffixCache, tenant: str, outputs: Iterator[Tokens]) -> None:
    for output in outputs:
        with cache.request([1, 2, 3], namespace=tenant) as request:
            request.extend(output)


def own_texts() -> Iterator[Tokens]:
    rng = np.random.default_rng(4)
    return (rng.integers(0, 300, 60).astype(np.int32) for _ in range(200))


def filled(canaries: range) -> SuffixCache:
    """Tenant b's texts beside those canaries of tenant a."""
    cache = SuffixCache.open()
    fill(cache, "a", map(canary, canaries))
    fill(cache, "b", own_texts())
    return cache


def drafted(cache: SuffixCache, prompt: Tokens) -> tuple[list[int], float]:
    """What tenant b is offered after `prompt`, and the seconds that took."""
    request = cache.request(prompt, namespace="b", session="probe", store=False)
    try:
        start = perf_counter()
        draft = request.draft(max_tokens=32)
        return draft.tokens.tolist(), perf_counter() - start
    finally:
        request.abandon()


def distance(one: list[float], other: list[float]) -> float:
    """The largest gap between two samples' distribution functions."""
    at = np.sort(np.concatenate((one, other)))
    shares = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def test_i2_canaries_are_never_drafted_for_another_tenant() -> None:
    shared, alone, mixed = filled(range(CANARIES)), filled(range(0)), next(own_texts())[:30]
    for number in range(0, CANARIES, 5):
        for prompt in (
            canary(number)[:SEEN],
            np.concatenate((mixed, canary(number)[:SEEN])),
            mixed[: 1 + number // 5 % 30],
        ):
            seen, _ = drafted(shared, prompt)
            assert not set(seen) & set(canary(number).tolist())
            assert seen == drafted(alone, prompt)[0]


@pytest.mark.long
def test_i2_how_long_drafting_takes_tells_nothing_of_what_another_tenant_stored() -> None:
    """As many texts of tenant a both times, so that memory is used alike: once what b asks for, once anything else.
    Times differ when that is beyond chance and more than a few percent of a draft's."""
    caches = filled(range(CANARIES)), filled(range(CANARIES, 2 * CANARIES))
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * CANARIES):
        prompt = canary(number % CANARIES)[:SEEN]
        first = number % 2  # neither always goes first
        for side in (first, 1 - first):
            took[side].append(drafted(caches[side], prompt)[1])
    one, other = map(np.median, took)
    alike = abs(one - other) <= SMALL_EFFECT * max(one, other)
    assert alike or distance(*took) <= KS_LIMIT * np.sqrt(2 / len(took[0]))


def test_the_distance_tells_different_times_apart() -> None:
    rng = np.random.default_rng(1)
    slow, fast, also_fast = (rng.exponential(mean, 2000).tolist() for mean in (1.3, 1.0, 1.0))
    assert distance(fast, also_fast) < KS_LIMIT * np.sqrt(2 / 2000) < distance(slow, fast)


# I1: who has no key, or the wrong one.

ASGI = dict[str, Any]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
UNKNOWN = ("/", "/docs", "/openapi.json", "/admin", "/metrics/", "//metrics", "/v1", "/v1/", "/v1/chat/completions/x")
KEYS = {"alice": "sk-alice-0123456789abcdef", "bob": "sk-bob-0123456789abcdef"}
OPERATOR_KEY = "sk-operator-0123456789abcdef"
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


def wrong_keys() -> Iterator[list[bytes]]:
    """What a client without the right key may send as `Authorization`."""
    right = KEYS["alice"]
    yield []
    for value in ("", "Bearer", "Bearer ", right, f"Basic {right}", f"Bearer {right[:-1]}", f"Bearer {right}x"):
        yield [value.encode()]
    for value in (f"Bearer {right.upper()}", f"Bearer {right[1:]}", "Bearer " + "x" * 10_000, "Bearer \xff\x00"):
        yield [value.encode("latin-1")]
    yield [b"Bearer " + right.encode(), b"Bearer " + KEYS["bob"].encode()]
    yield [f"Bearer {right} {KEYS['bob']}".encode()]


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    read: int  # messages of the request's body that were asked for


def keyed_app(folder: Path, *, backends: dict[str, Any] | None = None, **server: Any) -> Any:
    for name, key in {**KEYS, "operator": OPERATOR_KEY}.items():
        (folder / name).write_text(key)
    keys = [ApiKey(tenant=tenant, key_file=folder / tenant) for tenant in KEYS]
    keys.append(ApiKey(role="operator", key_file=folder / "operator"))
    settings = Settings(server=ServerSettings(api_keys=tuple(keys), **server), backends={})
    runtime = Runtime(settings, backends=backends or {"m": FakeBackend("fine")})
    runtime.start()
    return create_app(runtime, settings)


async def ask(app: Any, method: str, path: str, keys: Sequence[bytes], body: bytes = b"{") -> Answered:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1
        return next(messages, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"authorization", key) for key in keys]
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": b"key=x"}
    scope["headers"] = headers
    await app(scope, receive, send)
    named = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answered(sent[0]["status"], named, b"".join(one.get("body", b"") for one in sent[1:]), read)


def paths(app: Any) -> list[str]:
    known = [str(route.path).replace("{model:path}", "m") for route in app.routes.routes if isinstance(route, Route)]
    assert {"/metrics", "/v1/models", "/ready", *GENERATION} <= set(known)
    return [*known, *UNKNOWN]


@pytest.mark.anyio
async def test_i1_no_route_answers_without_the_right_key(tmp_path: Path) -> None:
    """401 with one and the same body whatever the route is, before a byte of the request's body is read."""
    app = keyed_app(tmp_path)
    bodies: dict[bool, set[bytes]] = {False: set(), True: set()}  # by whether Anthropic's shape is spoken there
    for path in paths(app):
        if path in ("/health", "/ready") or (path.startswith("/ui") and not path.startswith("/ui/data")):
            continue  # probes of orchestrators have no key, and the files of the page hold no data
        for method in METHODS:
            for keys in wrong_keys():
                answered = await ask(app, method, path, keys)
                assert (answered.status, answered.read) == (401, 0), (method, path, keys)
                assert answered.headers["www-authenticate"] == "Bearer"
                bodies[path.startswith("/v1/messages")].add(without_ids(answered)[1])
    [body], [other] = bodies.values()
    assert not any(key.encode() in body + other for key in KEYS.values())


@pytest.mark.anyio
async def test_i1_tenants_do_not_read_metrics_and_operators_use_no_models(tmp_path: Path) -> None:
    app = keyed_app(tmp_path)
    operator = [b"Bearer " + OPERATOR_KEY.encode()]
    for key in KEYS.values():
        answered = await ask(app, "GET", "/metrics", [b"Bearer " + key.encode()])
        assert (answered.status, answered.read) == (403, 0) and b"agentspec_" not in answered.body
    assert (await ask(app, "GET", "/metrics", operator)).status == 200
    for path in GENERATION:
        answered = await ask(app, "POST", path, operator)
        assert (answered.status, answered.read) == (403, 0), path
    assert (await ask(app, "GET", "/v1/responses/resp_1", operator)).status == 403
    for path in ("/ready", "/version", "/v1/models", "/v1/models/m"):
        for key in (*KEYS.values(), OPERATOR_KEY):
            assert (await ask(app, "GET", path, [b"Bearer " + key.encode()])).status == 200, path


@pytest.mark.anyio
async def test_i1_a_websocket_is_closed(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await keyed_app(tmp_path)({"type": "websocket", "path": "/v1/models", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.long
def test_i1_how_long_a_wrong_key_takes_tells_nothing_of_the_right_one(tmp_path: Path) -> None:
    """Keys that share none of the right one's characters, and keys that share all but the last."""
    (tmp_path / "key").write_text(right := "k" * 48)
    authenticator = Authenticator([ApiKey(key_file=tmp_path / "key")])
    wrong = ["x" * 48, right[:-1] + "x"]
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(20_000):
        for side in (number % 2, 1 - number % 2):
            headers = Headers(raw=[(b"authorization", b"Bearer " + wrong[side].encode())])
            start = perf_counter()
            with suppress(AuthenticationError):
                authenticator.identify(headers)
            took[side].append(perf_counter() - start)
    one, other = map(np.median, took)
    alike = abs(one - other) <= SMALL_EFFECT * max(one, other)
    assert alike or distance(*took) <= KS_LIMIT * np.sqrt(2 / len(took[0]))


# I2, I3: two tenants of one gateway and one engine.

CANARY = "zebra-quantum-7731"


@asynccontextmanager
async def tiny_app(folder: Path, model: Path) -> AsyncIterator[Any]:
    with SuffixCache.open() as cache:
        backend = TorchBackend.load(TorchSettings(model=str(model), device="cpu"), cache=cache)
        try:
            yield keyed_app(folder, backends={"m": backend})
        finally:
            await backend.aclose()


async def chat(app: Any, tenant: str, content: str, **fields: Any) -> Answered:
    sampling = {"temperature": 0, "max_tokens": 16}
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **sampling, **fields}
    return await ask(app, "POST", GENERATION[0], [b"Bearer " + KEYS[tenant].encode()], json.dumps(body).encode())


@pytest.fixture
def steady_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is drafted depends on measured times too; here every forward costs the same wherever it runs."""
    monkeypatch.setattr("agentspec.backends.torch.engine.speculator.FREE", 1e9)
    monkeypatch.setattr("agentspec.backends.torch.engine.cache_session.STALL_SECONDS", 3600.0)
    monkeypatch.setattr("agentspec.backends.torch.engine.cache_session.DRAFT_SECONDS", 3600.0)
    monkeypatch.setattr(CostModel, "seconds", lambda self, tokens, *_: 1.0 + 0.01 * tokens)
    monkeypatch.setattr(CostModel, "many", lambda self, tokens, *_: 1.0 + 0.01 * np.asarray(tokens))
    monkeypatch.setattr(CostModel, "observe", lambda self, *_: None)


async def seen_by_bob(app: Any) -> list[Answered]:
    """Everything that bob can ask for: answers to what alice asked before, streams, errors, lists, headers."""
    asked = [f"tell me of {CANARY[:12]}", "tell me of", f"again {CANARY[:12]}", "something else"]
    answers = [await chat(app, "bob", content, stream=stream) for content in asked for stream in (False, True)]
    refused = [{"unknown": 1}, {"temperature": 9}, {"model": "alice"}, {"max_tokens": 10**6}]
    answers += [await chat(app, "bob", "x", **fields) for fields in refused]
    key = [b"Bearer " + KEYS["bob"].encode()]
    for path in paths(app):
        answers.append(await ask(app, "GET", path, key))
    return answers


def without_ids(answered: Answered) -> tuple[int, bytes]:
    """What stays the same from call to call: no ids, no times, and not where a stream's text is cut into events."""
    changing = rb'"(?:request_)?id":"[^"]*"|"created":\d+|"(?:model_seconds|estimated_seconds_saved)":[-0-9.e]+'
    text = rb'"content":"((?:[^"\\]|\\.)*)"\},"logprobs":null,"finish_reason":null\}\]\}\n\ndata: .*?"content":"'
    body = re.sub(changing, b"", answered.body)
    while body != (body := re.sub(text, rb'"content":"\1', body)):
        pass
    return answered.status, body


@pytest.mark.anyio
@pytest.mark.usefixtures("steady_cost")
async def test_i3_a_tenant_sees_nothing_of_another(tmp_path: Path, tiny_model: Path) -> None:
    """Bob gets byte for byte the answers, counts of drafts and errors that he gets where alice never was."""
    async with tiny_app(tmp_path, tiny_model) as together, tiny_app(tmp_path, tiny_model) as alone:
        for number in range(6):
            said = await chat(together, "alice", f"tell me of {CANARY} {number % 2}", stream=bool(number % 2))
            assert said.status == 200
        seen, want = await seen_by_bob(together), await seen_by_bob(alone)
    for one, other in zip(seen, want, strict=True):
        assert without_ids(one) == without_ids(other)
    assert b'"drafted":' in seen[0].body
    for answered in seen:
        shown = answered.body + repr(answered.headers).encode()
        assert CANARY.encode() not in shown and b"alice" not in shown.replace(b"'alice'", b"")


@pytest.mark.anyio
async def test_i2_the_engine_drafts_for_a_tenant_from_its_own_text_only(tmp_path: Path, tiny_model: Path) -> None:
    """Alice's second answer is drafted from her first; bob's first is not."""
    async with tiny_app(tmp_path, tiny_model) as app:
        answers = [await chat(app, tenant, f"tell me of {CANARY}") for tenant in ("alice", "alice", "bob")]
    first, second, others = [json.loads(answered.body)["speculation"]["accepted"] for answered in answers]
    assert second > first == others


# I4: keys and prompts in what is written down.

SECRET, TEXT = "sk-planted-", "planted-text-"


def broken(request: GenerateRequest) -> Any:
    asked = str((request.messages or [{}])[-1]["content"])
    errors = {
        "engine": EngineError(f"{TEXT}message"),
        "value": ValueError(f"{TEXT}{SECRET}message"),
        "nested": _caused(KeyError(f"{TEXT}{SECRET}cause")),
    }
    kind = asked.rpartition(" ")[2]
    return Answer(f"{TEXT}answer", error=errors[kind], error_after=1) if kind in errors else f"{TEXT}answer"


def _caused(cause: Exception) -> Exception:
    error = EngineError("the engine failed")
    error.__cause__ = cause
    return error


WORDS = ("engine", "value", "nested", "fine", "refused", "fails", "moved", "cut", "gone")
ANSWERS: dict[bytes, Callable[[Any], object]] = {
    b"fine": lambda request: request.answer(b'{"choices": [{"message": {"content": "x"}}]}'),
    b"refused": lambda request: request.answer(b'{"error": {"message": "no"}}', 400),
    b"fails": lambda request: request.answer(b"oops", 500),
    b"moved": lambda request: request.answer(b"{}", 307, location=f"http://{TEXT}/"),
    b"cut": lambda request: (request.head(), request.send(b"data: {")),
    b"gone": lambda request: None,
}
"""What the upstream does with a request that holds the word."""


def secretive(url: str, folder: Path) -> Settings:
    """Keys from the environment and from files, of clients and of upstreams; a strategy; runs kept."""
    (folder / "operator").write_text(f"{SECRET}operator")
    (folder / "upstream").write_text(f"{SECRET}upstream")
    up = OpenAISettings(base_url=url, api_key_file=str(folder / "upstream"), server_kind="other")  # type: ignore[arg-type]
    operator = ApiKey(tenant="t", role="operator", key_file=folder / "operator")
    return Settings(
        server=ServerSettings(api_keys=(ApiKey(tenant="t", key_env="PLANTED_CLIENT_KEY"), operator)),
        backends={"up": up, "local": up, "large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")},
        models={
            "up": ModelSettings(backend="up", upstream_model="up"),
            "m": ModelSettings(backend="local"),
            "fast": SpecReasonSettings(base="large", small="tiny"),
        },
        cache=CacheSettings(path=folder / "cache", runs_bytes=1 << 20),
    )


def provoked(url: str) -> list[httpx.Response]:
    """The answers of a gateway at `url` to every kind of request, right and wrong, all with secrets in them."""
    chat, shown = f"{url}/v1/chat/completions", []
    headers = {
        "authorization": f"Bearer {SECRET}client",
        "x-agentspec-session": f"{TEXT}session",
        "cookie": f"{SECRET}c",
    }
    for model, stream, word in product(("m", "up", "fast", f"{TEXT}model"), (False, True), WORDS):
        if model != "up" or word.encode() in ANSWERS:
            messages = [{"role": "user", "content": f"{TEXT}prompt {word}"}]
            body = {"model": model, "messages": messages, "stream": stream}
            shown.append(httpx.post(chat, json=body, headers=headers))
    for wrong in (f"Bearer {SECRET}wrong", f"{SECRET}raw", f"Basic {SECRET}basic"):
        shown.append(httpx.post(chat, json={"x": TEXT}, headers={"authorization": wrong}))
    shown.append(httpx.post(chat, content=f'{{"{TEXT}', headers={**headers, "content-type": "application/json"}))
    odd = {**headers, "x-request-id": f"{SECRET} id"}
    shown.append(httpx.get(f"{url}/{TEXT}path?{SECRET}query", headers=odd))
    shown.append(httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {SECRET}operator"}))
    return shown


def test_i4_no_key_and_no_text_is_written_down(
    gateway: Any, upstream: Any, log: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_CLIENT_KEY", f"{SECRET}client")

    def script(request: Any) -> None:
        if request.method == "GET":  # what it is
            return request.answer(b'{"object": "list", "data": []}')
        next(act for word, act in ANSWERS.items() if word in request.body)(request)

    server = upstream(script)
    large, tiny = (ThinkingModel(lambda thinking: "step. Answer: 4\n\n") for _ in range(2))
    backends = {"local": FakeBackend(broken), "large": large, "tiny": tiny}
    running = gateway(backends, secretive(server.url, tmp_path))
    shown = provoked(running.url)
    running.metric("agentspec_requests_in_flight")
    written = log.getvalue()
    assert '"event": "internal error"' in written and len(shown) > 40
    assert [line for line in written.splitlines() if SECRET in line or TEXT in line] == []
    assert [one.text for one in shown if SECRET in one.text or SECRET in str(one.headers)] == []
    kept = httpx.get(f"{running.url}/ui/data/runs", headers={"authorization": f"Bearer {SECRET}client"}).text
    assert TEXT in kept  # runs were asked for, and prompts are what they hold
    files = [path.read_bytes() for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert files and not any(SECRET.encode() in data for data in files)
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {SECRET}upstream"}
    assert not any(f"{SECRET}client".encode() in request.body for request in server.requests)


def test_i4_without_runs_nothing_is_written(gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    running = gateway({"m": FakeBackend(f"{TEXT}answer")})
    body = {"model": "m", "messages": [{"role": "user", "content": f"{TEXT}prompt"}]}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
    assert list(tmp_path.iterdir()) == []


# I8: what a tenant stores.


def hit_rate(cache: SuffixCache, tenant: str) -> float:
    """The share of the tokens of `own_texts` that are drafted rightly for `tenant`, one at a time."""
    hits = total = 0
    for output in list(own_texts())[:40]:
        with cache.request(output[:4], namespace=tenant, store=False) as request:
            for token in output[4:]:
                hits += request.draft(max_tokens=1).tokens.tolist() == [token]
                total += 1
                request.extend([token])
    return hits / total


@pytest.mark.parametrize("tokens", [500_000, pytest.param(10_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [None, pytest.param(2 << 20, marks=pytest.mark.slow)])
def test_i8_a_flood_evicts_its_own_entries_only(tokens: int, share: int | None) -> None:
    with SuffixCache.open(memory_bytes=4 << 20, tenant_memory_bytes=share) as cache:
        fill(cache, "b", own_texts())
        before = hit_rate(cache, "b")
        assert before > 0.9
        rng = np.random.default_rng(1)
        for _ in range(tokens // 10_000):
            fill(cache, "a", iter([rng.integers(0, 50_000, 10_000).astype(np.int32)]))
        assert cache.stats().evicted > 0 and cache.tenant_bytes()["a"] <= (share or 4 << 20)
        assert abs(hit_rate(cache, "b") - before) < 0.01


# I10: lossy modes.

LOSSY = {name: kind for name, kind in STRATEGIES.items() if kind.lossy}


@pytest.mark.parametrize("name", LOSSY)
def test_i10_a_lossy_answer_says_so(gateway: Any, name: str) -> None:
    model = ThinkingModel(lambda thinking: "step. Answer: 4\n</think>")
    strategy = LOSSY[name](base="large", small="tiny")  # type: ignore[call-arg]
    backends: dict[str, Any] = {each: TorchSettings(model=each) for each in ("large", "tiny")}
    settings = Settings(backends=backends, models={"fast": strategy, "plain": ModelSettings(backend="large")})
    url = f"{gateway({'large': model, 'tiny': model}, settings).url}{GENERATION[0]}"
    body = {"messages": [{"role": "user", "content": "Two plus two?"}]}
    for stream in (False, True):
        fast = httpx.post(url, json={**body, "model": "fast", "stream": stream})
        assert fast.headers["x-agentspec-lossy"].startswith(name) and '"lossy":true' in fast.text
        off = httpx.post(url, json={**body, "model": "fast"}, headers={"x-agentspec-speculation": "off"})
        plain = httpx.post(url, json={**body, "model": "plain", "stream": stream})
        for lossless in (off, plain):
            assert "x-agentspec-lossy" not in lossless.headers and '"lossy":true' not in lossless.text


@pytest.mark.anyio
async def test_i10_no_request_can_make_an_answer_lossy(tmp_path: Path, tiny_model: Path) -> None:
    """Only the configuration can: without a strategy there, fields that name one are refused, and answers are exact."""
    assert LOSSY and not any(isinstance(model, StrategySettings) for model in Settings().models.values())
    wishes: list[dict[str, Any]] = [{"strategy": "specreason"}, {"lossy": True}, {"threshold": 0}, {"small": "m"}]
    async with tiny_app(tmp_path, tiny_model) as app:
        for wish in wishes:
            refused = await chat(app, "alice", "hello", **wish)
            assert refused.status == 400 and next(iter(wish)).encode() in refused.body
        for number in range(4):
            texts = set()
            for tenant in ("alice", "alice", "bob"):
                answered = await chat(app, tenant, f"exactly {number % 3}", seed=number, temperature=number % 2)
                assert answered.status == 200 and "x-agentspec-lossy" not in answered.headers
                texts.add(json.loads(answered.body)["choices"][0]["message"]["content"])
            assert len(texts) == 1
