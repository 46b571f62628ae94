"""Cases U1 to U9: what a client gets, and what the gateway does, when an upstream fails."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings
from tests.proxy.conftest import key_files

pytestmark = pytest.mark.reliability
MODEL = "m"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
DONE = b"data: [DONE]\n\n"


def chunk(text: str = "", finish: str | None = None, index: int = 0, **fields: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None, **fields}).encode() + b"\n\n"


TOKENS = [chunk(f"token {number}") for number in range(50)]
WHOLE = b"".join([*TOKENS, chunk("", "stop"), DONE])


def settings(url: str, server: dict[str, Any] | None = None, **backend: Any) -> Settings:
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    models = {MODEL: ModelSettings(backend="big")}
    return Settings(server=ServerSettings(**server or {}), backends={"big": up}, models=models)


def post(running: Any, path: str = CHAT, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json={**BODY, **fields}, timeout=60)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() - {"doc_url"} == {"message", "type", "param", "code"}
    return error


def error_after(content: bytes, whole: bytes) -> dict[str, Any]:
    """The error event that follows the events `whole`, which is the last one."""
    assert content.startswith(whole)
    rest = content[len(whole) :]
    assert rest.startswith(b'data: {"error":{') and rest.endswith(b"\n\n") and rest.count(b"\n\n") == 1
    error: dict[str, Any] = json.loads(rest.removeprefix(b"data: "))["error"]
    return error


def outcomes(running: Any, outcome: str) -> float:
    found: float = running.metric("agentspec_requests_total", route=CHAT, model=MODEL, outcome=outcome)
    return found


OBJECT = b'{ "error": {"message": "slow down", "type": "rate_limit", "code": 7, "more": 1.10}}'


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, OBJECT) for status in (400, 404, 422, 429, 500, 502, 503)),
        *((status, b"") for status in (404, 503)),
        *((500, body) for body in (b"<html>nginx on node7.internal</html>", b'{"detail": "gone"}')),
    ],
)
def test_u1_u2_errors_pass_as_error_objects_with_the_time_to_wait(
    gateway: Any, upstream: Any, status: int, body: bytes
) -> None:
    headers = {"retry_after": "2", "retry_after_ms": "1500", "x_ratelimit_limit_requests": "9", "server": "x"}
    server = upstream(lambda request: request.answer(body, status, "text/html", **headers))
    response = post(gateway({}, settings(server.url, server_kind="other")))
    assert response.status_code == status and len(server.requests) == 1
    assert response.headers["retry-after"] == "2" and response.headers["retry-after-ms"] == "1500"
    assert response.headers["x-ratelimit-limit-requests"] == "9" and "server" not in response.headers
    if body == OBJECT:
        assert response.content == body
        return
    error = error_of(response)
    assert response.headers["content-type"] == "application/json" and error["code"] == "upstream_status"
    assert error["message"].startswith(f"upstream 'big' answered {status}") and "internal" not in response.text
    assert ("gone" in error["message"]) == (b"gone" in body)


def closed_at_once() -> str:
    listening = socket.create_server(("127.0.0.1", 0))

    def close() -> None:
        with listening:
            listening.accept()[0].close()

    threading.Thread(target=close, daemon=True).start()
    return f"https://127.0.0.1:{listening.getsockname()[1]}/v1"


UNREACHABLE: dict[str, Callable[[Any], Any] | str] = {
    "refused": "http://127.0.0.1:9/v1",
    "dns": "http://no-such-host.invalid/v1",
    "tls": "",
    "redirect": lambda request: request.answer(b"", 307, location="http://169.254.169.254/"),
    "600": lambda request: request.answer(b"{}", 600),
    "no http": lambda request: request.send(b"SSH-2.0-OpenSSH\r\n"),
    "too long": lambda request: request.answer(bytes(80 << 20)),
}


@pytest.mark.parametrize("way", UNREACHABLE.values(), ids=UNREACHABLE)
def test_u3_a_server_that_cannot_be_reached(gateway: Any, upstream: Any, way: Any) -> None:
    url = upstream(way).url if callable(way) else way or closed_at_once()
    response = post(gateway({}, settings(url, server_kind="other")))
    error = error_of(response)
    assert response.status_code == 502 and error["code"] == "upstream_unreachable" and "'big'" in error["message"]
    for address in ("127.0.0.1", "invalid", "169.254", "http"):
        assert address not in response.text


@pytest.mark.parametrize("limit", [{"read_timeout": 0.2}, {"server": {"request_timeout": 0.4}}])
@pytest.mark.parametrize("begun", [None, b"", TOKENS[0], TOKENS[0] + TOKENS[1][:20]])
def test_u4_u5_an_answer_that_stalls(gateway: Any, upstream: Any, limit: dict[str, Any], begun: bytes | None) -> None:
    """Before its head (`None`), or within its stream."""
    left = threading.Event()

    def script(request: Any) -> None:
        if begun is not None:
            request.head()
            request.send(begun)
        if request.client_left(60):
            left.set()

    running = gateway({}, settings(upstream(script).url, server_kind="other", **limit))
    response = post(running)
    assert response.status_code == (504 if begun is None else 200)
    whole = TOKENS[0] if TOKENS[0] in (begun or b"") else b""
    error = error_of(response) if begun is None else error_after(response.content, whole)
    assert error["code"] in ("upstream_timeout", "request_timeout")
    assert left.wait(60) and outcomes(running, "server_error") == 1


@pytest.fixture(scope="module")
def cutting(shared_gateway: Any, shared_upstream: Any) -> Any:
    """A gateway whose upstream sends `pieces` and then ends the answer, or, if not `clean`, breaks it off."""
    state: dict[str, Any] = {}

    def script(request: Any) -> None:
        if request.method == "GET":
            return request.answer(b'{"data": []}')
        request.head(200, transfer_encoding="chunked")
        for piece in state["pieces"]:
            request.chunk(piece)
        if state["clean"]:
            request.chunk(b"")

    server = shared_upstream(script)
    return shared_gateway({}, settings(server.url)), server, state


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_u6_a_stream_that_is_cut_at_each_chunk(cutting: Any, clean: bool, every: int) -> None:
    running, server, state = cutting
    state["clean"] = clean
    sent, failed = len(server.requests), outcomes(running, "server_error")
    for cut in range(0, 51, every):
        half = TOKENS[cut][:30] if cut < 50 else b""
        state["pieces"] = [*TOKENS[:cut], *([half] if half else [])]
        assert error_after(post(running).content, b"".join(TOKENS[:cut]))["code"] == "upstream_unreachable"
    assert len(server.requests) == sent + len(range(0, 51, every)), "nothing was sent again"
    assert outcomes(running, "server_error") == failed + len(range(0, 51, every))


def test_u6_an_error_event_of_the_upstream_counts_as_an_error(cutting: Any) -> None:
    running, _, state = cutting
    failed, refused = outcomes(running, "server_error"), outcomes(running, "client_error")
    for code, end in ((500, b""), (500, DONE), (400, DONE)):
        event = b'data: {"error": {"message": "no", "code": %d}}\n\n' % code
        state.update(pieces=[chunk("a"), event, end] if end else [chunk("a"), event], clean=True)
        assert post(running).content == chunk("a") + event + end
    assert outcomes(running, "server_error") == failed + 2 and outcomes(running, "client_error") == refused + 1


@pytest.mark.parametrize("piece", [b"x" * 65536, b"data: x\n" * 8192])
def test_u7_an_event_of_many_megabytes_is_not_held(cutting: Any, piece: bytes) -> None:
    running, _, state = cutting
    state.update(pieces=[b"data: ", *[piece] * 320], clean=True)
    tracemalloc.start()
    try:
        with httpx.stream("POST", f"{running.url}{CHAT}", json=BODY, timeout=60) as response:
            assert sum(len(part) for part in response.iter_raw(65536)) > 20 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 8 << 20


def test_u7_a_compressed_answer_says_that_it_is_and_a_stream_is_refused(gateway: Any, upstream: Any) -> None:
    import gzip

    packed = gzip.compress(WHOLE)
    for kind, status in (("application/json", 200), ("text/event-stream", 502)):
        server = upstream(lambda request, kind=kind: request.answer(packed, 200, kind, content_encoding="gzip"))
        response = post(gateway({}, settings(server.url)))
        assert response.status_code == status and ("content-encoding" in response.headers) == (status == 200)
        assert response.content == WHOLE if status == 200 else "compressed stream" in response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"<html>",
        b"\xff\xfe",
        b'{"choices": null, "usage": null}',
        b'{"choices": [{}], "usage": {"prompt_tokens": null, "completion_tokens": "x"}}',
        b'{"usage": {"prompt_tokens": 1' + b"0" * 5000 + b'}, "unheard of": {"a": [1e400, 1.10]}}',
        b'{"a": ' * 2000 + b"1" + b"}" * 2000,
        b'{"usage": ' + b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_u8_odd_answers_pass_untouched(cutting: Any, gateway: Any, upstream: Any, body: bytes, stream: bool) -> None:
    if stream:
        running, _, state = cutting
        wire = b"data: " + body + b"\n\n" + DONE
        state.update(pieces=[wire], clean=True)
    else:
        wire, running = body, gateway({}, settings(upstream(lambda request: request.answer(body)).url))
    response = post(running)
    assert (response.status_code, response.content) == (200, wire)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_u9_answers_that_trickle_hold_up_no_other_tenant(
    gateway: Any, upstream: Any, tmp_path: Path, count: int
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def script(request: Any) -> None:
        if not request.json["stream"]:
            return request.answer(b"{}")
        request.head()
        begun.release()
        for at in range(len(WHOLE)):
            request.send(WHOLE[at : at + 1])
            go.wait(1)

    server = {"api_keys": key_files(tmp_path, "slow", "other"), "max_concurrent": 2 * count}
    running = gateway({}, settings(upstream(script).url, server, server_kind="other", shared_upstream=True))

    def ask(tenant: str, stream: bool) -> httpx.Response:
        headers = {"authorization": f"Bearer key-of-{tenant}"}
        return httpx.post(f"{running.url}{CHAT}", json={**BODY, "stream": stream}, headers=headers, timeout=120)

    with ThreadPoolExecutor(count) as threads:
        slow = [threads.submit(ask, "slow", True) for _ in range(count)]
        try:
            for _ in slow:
                assert begun.acquire(timeout=60)
            assert [ask("other", False).status_code for _ in range(count)] == [200] * count
            assert not any(one.done() for one in slow)
        finally:
            go.set()
        assert {one.result().content for one in slow} == {WHOLE}


KEY = "sk-operator-canary-0123456789"
ACCOUNT = {"openai_organization": "org-canary", "openai_project": "proj_canary", "openai_processing_ms": "5"}
TELLS = (
    b'{"error": {"message": "Incorrect API key: sk-oper****6789 of org-Canary0123456789", "code": "invalid_api_key"}}'
)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/v1/models"])
def test_a_refusal_of_the_operators_key_stays_with_the_operator(
    gateway: Any, upstream: Any, status: int, path: str
) -> None:
    server = upstream(
        lambda request: request.answer(TELLS, 404 if request.target == "/v1/messages" else status, **ACCOUNT)
    )
    up = OpenAISettings(base_url=server.url, api_key=KEY)  # type: ignore[arg-type]
    running = gateway({}, Settings(backends={"big": up}))
    if path == "/v1/models":
        response = httpx.get(f"{running.url}{path}", headers={"authorization": "Bearer mine"})
    else:
        body = {"model": MODEL, "input": "hi"} if path == "/v1/embeddings" else {**BODY, "max_tokens": 5}
        response = httpx.post(f"{running.url}{path}", json=body, headers={"openai-organization": "org-theirs"})
    assert response.status_code == 502 and response.json()["error"]["code"] == "upstream_authentication"
    assert "openai-organization" not in server.requests[-1].headers
    for secret in ("sk-", "canary", "Canary", "127.0.0.1"):
        assert secret not in response.text + str(response.headers)


@pytest.mark.parametrize("keyed", [False, True])
def test_without_the_operators_key_a_refusal_is_the_clients(
    gateway: Any, upstream: Any, tmp_path: Any, keyed: bool
) -> None:
    """Unless the client's key is for the gateway: it cannot have been the one that was refused."""
    (tmp_path / "key").write_text("mine")
    server = upstream(lambda request: request.answer(TELLS, 401, **ACCOUNT))
    keys = {"api_keys": (ApiKey(tenant="a", key_file=tmp_path / "key"),)} if keyed else {}
    headers = {"authorization": "Bearer mine", "openai-organization": "org-mine"}
    running = gateway({}, settings(server.url, keys, server_kind="other"))
    response = httpx.post(f"{running.url}{CHAT}", json=BODY, headers=headers)
    assert ("authorization" in server.requests[-1].headers) is not keyed
    assert server.requests[-1].headers["openai-organization"] == "org-mine"
    if keyed:
        assert response.status_code == 502 and error_of(response)["code"] == "upstream_authentication"
    else:
        assert (response.status_code, response.content) == (401, TELLS)
        assert response.headers["openai-organization"] == "org-canary"


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_other_answers_to_the_operators_key_name_no_account(gateway: Any, upstream: Any, status: int) -> None:
    server = upstream(lambda request: request.answer(TELLS, status, **ACCOUNT))
    response = post(gateway({}, settings(server.url, api_key=KEY)))
    assert response.status_code == status and response.headers["openai-processing-ms"] == "5"
    assert not {"openai-organization", "openai-project"} & set(response.headers)
    assert "sk-oper" not in response.text and "Canary" not in response.text


@pytest.mark.parametrize("fields", [{"max_tokens": 9, "messages": BODY["messages"]}, {"input": "hi"}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_a_translated_answer_names_no_account(
    gateway: Any, upstream: Any, fields: dict[str, Any], stream: bool
) -> None:
    """Of status 200, as some servers answer."""

    def script(request: Any) -> None:
        if not request.target.endswith(CHAT):
            request.answer(b"{}", 404)
        elif stream:
            request.head()
            request.send(b"data: " + TELLS + b"\n\n")
        else:
            request.answer(TELLS)

    running = gateway({}, settings(upstream(script).url, api_key=KEY, server_kind="other"))
    body = {"model": MODEL, "stream": stream, **fields}
    route = "/v1/messages" if "messages" in fields else "/v1/responses"
    response = httpx.post(f"{running.url}{route}", json=body, timeout=60)
    assert response.status_code == 502 and "Incorrect API key" in response.text
    assert "sk-oper" not in response.text and "Canary" not in response.text


@pytest.mark.parametrize("end", [b"\n\n", b"\n", b""])
def test_an_error_event_for_the_operators_key_names_no_account(gateway: Any, upstream: Any, end: bytes) -> None:
    def script(request: Any) -> None:
        request.head()
        request.send(TOKENS[0] + b"data: " + TELLS + end)

    response = post(gateway({}, settings(upstream(script).url, api_key=KEY, server_kind="other")))
    told = TELLS.replace(b"sk-oper****6789", b"***").replace(b"org-Canary0123456789", b"***")
    assert response.content == TOKENS[0] + b"data: " + told + end


SPOKEN = json.dumps({"finish_reason": "stop", "error": "[DONE]"})
CALLS = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": SPOKEN}}]}, "finish_reason": None}
HALF = {
    "text that speaks of an end": ({}, [chunk("data: [DONE]"), chunk('"finish_reason": "stop"')]),
    "a comment that does": ({}, [b": data: [DONE]\n\n", chunk("a")]),
    "one of two": ({"n": 2}, [chunk("a", index=1), chunk("", "stop", 0), chunk("b", index=1)]),
    "no reason": ({}, [chunk("a", "")]),
    "arguments that speak of an end": ({}, [b"data: " + json.dumps({"choices": [CALLS]}).encode() + b"\n\n"]),
    "text behind the last word": ({}, [b"data: [DONE] is what a model said\n\n"]),
    "two of three": ({"n": 3}, [chunk("", "stop", 0), chunk("", "stop", 0), chunk("", "length", 2)]),
}


@pytest.mark.parametrize(("fields", "pieces"), HALF.values(), ids=HALF)
def test_u6_what_looks_like_an_end_hides_no_cut(cutting: Any, fields: dict[str, Any], pieces: list[bytes]) -> None:
    running, _, state = cutting
    state.update(pieces=pieces, clean=True)
    assert error_after(post(running, **fields).content, b"".join(pieces))


NUMBERS = b'data: {"usage": [1], "choices": 5}\n\ndata: {"usage": {"prompt_tokens": 1' + b"0" * 5000 + b"}}\n\n"
AS_THEY_ARE: dict[str, tuple[dict[str, Any], bytes]] = {
    "no last word": ({}, chunk("a", "stop")),
    "no last blank line": ({}, chunk("a") + b"data: [DONE]"),
    "no blank": ({}, chunk("a") + b"data:[DONE]\r\n\r\n"),
    "a reason in two lines": ({}, b'data: {"choices": [{"finish_reason":\ndata: "stop"}]}\n\n'),
    "both choices": ({"n": 2}, chunk("", "stop", 1) + chunk("", "stop", 0)),
    "one choice and the last word": ({"n": 2}, chunk("", "stop", 0) + DONE),
    "json": ({}, b"data: {half\n\n" + WHOLE),
    "utf8": ({}, b"data: \xc3\n\n\xe2\x82" + WHOLE),
    "crlf": ({}, (b": ping\n\n" + WHOLE + b": bye\n\n").replace(b"\n", b"\r\n")),
    "cr": ({}, WHOLE.replace(b"\n", b"\r")),
    "mark": ({}, b"\xef\xbb\xbf" + WHOLE),
    "fields": ({}, b"event: x\nid: 7\nretry: 5\n: comment\n" + WHOLE),
    "event": ({}, b"data: " + b"y" * (10 << 20) + b"\n\n" + WHOLE),
    "line": ({}, b"y" * (10 << 20) + b"\n" + WHOLE),
    "numbers": ({}, NUMBERS + WHOLE),
    "blank": ({}, b"\n\n\n\r\n\r\n" + WHOLE),
    "accents": ({}, TOKENS[0] + b": caf\xc3\xa9\r\n\r\n" + chunk("\u00e9\u20ac", "stop") + DONE),
}


@pytest.mark.parametrize(("fields", "wire"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_u7_whole_streams_pass_unchanged(cutting: Any, fields: dict[str, Any], wire: bytes) -> None:
    """Malformed or not, in chunks of any size, and where the connection breaks behind the last word."""
    running, _, state = cutting
    size = 1 if len(wire) < 1000 else 65536
    for clean in (True, False) if b"[DONE]" in wire[:-1] else (True,):
        state.update(pieces=[wire[at : at + size] for at in range(0, len(wire), size)], clean=clean)
        assert post(running, **fields).content == wire
