"""Cases U1 to U9: what a client gets, and what the gateway does, when an upstream fails."""

from __future__ import annotations

import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.protocol.wire import EventSplitter
from agentspec.proxy.forwarding import StreamInspector
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings

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
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def told(content: bytes, whole: bytes) -> dict[str, Any]:
    """The error event that follows the events `whole`, which is the last one."""
    assert content.startswith(whole)
    rest = content[len(whole) :]
    assert rest.startswith(b'data: {"error":{') and rest.endswith(b"\n\n") and rest.count(b"\n\n") == 1
    error: dict[str, Any] = json.loads(rest.removeprefix(b"data: "))["error"]
    return error


def outcomes(running: Any, outcome: str) -> float:
    found: float = running.metric("agentspec_requests_total", route=CHAT, model=MODEL, outcome=outcome)
    return found


def test_u1_too_many_requests_passes_with_the_time_to_wait(gateway: Any, upstream: Any) -> None:
    body = b'{"error": {"message": "slow down", "type": "rate_limit", "code": 7}}'
    server = upstream(lambda request: request.answer(body, 429, retry_after="2", x_ratelimit_limit_requests="9"))
    response = post(gateway({}, settings(server.url)))
    assert (response.status_code, response.content) == (429, body)
    assert response.headers["retry-after"] == "2" and response.headers["x-ratelimit-limit-requests"] == "9"
    assert len([request for request in server.requests if request.method == "POST"]) == 1


@pytest.mark.parametrize("status", [500, 502, 503])
@pytest.mark.parametrize(
    "body",
    [b"", b"<html><h1>503</h1>nginx on node7.internal</html>", b"[1]", b'{"detail": "gone"}', b'{"error": "gone"}'],
)
def test_u2_errors_of_the_server_pass_as_error_objects(gateway: Any, upstream: Any, status: int, body: bytes) -> None:
    server = upstream(lambda request: request.answer(body, status, "text/html", retry_after="2"))
    response = post(gateway({}, settings(server.url)))
    error = error_of(response)
    assert response.status_code == status and response.headers["retry-after"] == "2"
    assert response.headers["content-type"] == "application/json" and error["code"] == "upstream_status"
    assert error["message"].startswith(f"upstream 'big' answered {status}") and "internal" not in response.text
    assert ("gone" in error["message"]) == (b"gone" in body)


def test_u2_an_error_object_passes_byte_for_byte(gateway: Any, upstream: Any) -> None:
    body = b'{ "error": {"message": "out of memory", "more": 1.10}}'
    response = post(gateway({}, settings(upstream(lambda request: request.answer(body, 500)).url)))
    assert (response.status_code, response.content) == (500, body)


@pytest.mark.parametrize("why", ["refused", "dns", "tls", "redirect", "600", "no http", "too long"])
def test_u3_a_server_that_cannot_be_reached(gateway: Any, upstream: Any, why: str) -> None:
    def script(request: Any) -> None:
        if why == "redirect":
            request.answer(b"", 307, location="http://169.254.169.254/")
        elif why == "600":
            request.answer(b"{}", 600)
        elif why == "too long":
            request.head(200, "application/json", content_length=str(80 << 20))
            request.send(bytes(80 << 20))
        else:
            request.send(b"SSH-2.0-OpenSSH\r\n")

    plain = upstream(script).url
    closing = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: closing.accept()[0].close()).start()
    url = {
        "refused": "http://127.0.0.1:9/v1",
        "dns": "http://no-such-host.invalid/v1",
        "tls": f"https://127.0.0.1:{closing.getsockname()[1]}/v1",
    }.get(why, plain)
    response = post(gateway({}, settings(url, server_kind="other")))
    socket.create_connection(closing.getsockname()).close()
    closing.close()
    error = error_of(response)
    assert response.status_code == 502 and error["code"] == "upstream_unreachable" and "'big'" in error["message"]
    for address in ("127.0.0.1", "invalid", "169.254", "http"):
        assert address not in response.text


@pytest.mark.parametrize("limit", [{"read_timeout": 0.3}, {"server": {"request_timeout": 0.3}}])
def test_u4_no_first_byte(gateway: Any, upstream: Any, limit: dict[str, Any]) -> None:
    left = threading.Event()

    def script(request: Any) -> None:
        if request.client_left(60):
            left.set()

    running = gateway({}, settings(upstream(script).url, **limit))
    response = post(running)
    assert response.status_code == 504 and error_of(response)["code"] in ("upstream_timeout", "request_timeout")
    assert left.wait(60) and outcomes(running, "server_error") == 1


@pytest.mark.long
def test_u3_and_u4_in_time(gateway: Any, upstream: Any) -> None:
    def seconds(running: Any, status: int) -> float:
        began = time.perf_counter()
        assert post(running).status_code == status
        return time.perf_counter() - began

    assert seconds(gateway({}, settings("http://127.0.0.1:9/v1", server_kind="other")), 502) <= 1.0
    server = upstream(lambda request: request.client_left(60) and None)
    limits: list[dict[str, Any]] = [{"read_timeout": 3.0}, {"server": {"request_timeout": 3.0}}]
    for limit in limits:
        assert 2.7 <= seconds(gateway({}, settings(server.url, server_kind="other", **limit)), 504) <= 3.3


@pytest.mark.parametrize("limit", [{"read_timeout": 0.3}, {"server": {"request_timeout": 0.5}}])
@pytest.mark.parametrize("begun", [b"", TOKENS[0], TOKENS[0] + TOKENS[1][:20]])
def test_u5_a_stream_that_stalls(gateway: Any, upstream: Any, limit: dict[str, Any], begun: bytes) -> None:
    left = threading.Event()

    def script(request: Any) -> None:
        request.head()
        request.send(begun)
        if request.client_left(60):
            left.set()

    running = gateway({}, settings(upstream(script).url, **limit))
    response = post(running)
    whole = TOKENS[0] if TOKENS[0] in begun else b""
    assert response.status_code == 200
    assert told(response.content, whole)["code"] in ("upstream_timeout", "request_timeout")
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
        assert told(post(running).content, b"".join(TOKENS[:cut]))["code"] == "upstream_unreachable"
    assert len(server.requests) == sent + len(range(0, 51, every)), "nothing was sent again"
    assert outcomes(running, "server_error") == failed + len(range(0, 51, every))


def test_u6_a_client_library_raises(cutting: Any) -> None:
    running, _, state = cutting
    state.update(pieces=TOKENS[:3], clean=True)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=[], stream=True)
        with pytest.raises(openai.APIError, match="before it was finished"):
            list(stream)


@pytest.mark.parametrize("cut", [0, 1, 20, 39])
def test_u6_an_answer_that_is_not_streamed_is_whole_or_an_error(gateway: Any, upstream: Any, cut: int) -> None:
    body = b'{"choices": [{"message": {"content": "hi"}}]}'[:40]

    def script(request: Any) -> None:
        request.head(200, "application/json", content_length="40")
        request.send(body[:cut])

    response = post(gateway({}, settings(upstream(script).url)))
    assert response.status_code == 502 and error_of(response)["code"] == "upstream_unreachable"


def test_u6_an_error_event_of_the_upstream_counts_as_an_error(cutting: Any) -> None:
    running, _, state = cutting
    failed, refused = outcomes(running, "server_error"), outcomes(running, "client_error")
    for code, end in ((500, b""), (500, DONE), (400, DONE)):
        event = b'data: {"error": {"message": "no", "code": %d}}\n\n' % code
        state.update(pieces=[chunk("a"), event, end] if end else [chunk("a"), event], clean=True)
        assert post(running).content == chunk("a") + event + end
    assert outcomes(running, "server_error") == failed + 2 and outcomes(running, "client_error") == refused + 1


@pytest.mark.parametrize("line", [b"data: " + b"x" * (10 << 20), b"data: x\n" * (5 << 18)])
def test_u7_an_event_of_ten_megabytes_is_not_held(line: bytes) -> None:
    splitter, inspector = EventSplitter(), StreamInspector(1)
    pieces = [line[at : at + 65536] for at in range(0, len(line), 65536)]
    tracemalloc.start()
    try:
        for piece in pieces:
            inspector.read(splitter.feed(piece)[splitter.whole_from :])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 << 20


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


def test_u8_allowed_fields_reach_the_upstream_as_they_are(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway({}, settings(server.url, allow_fields=("unheard_of",)))
    sent = {"unheard_of": {"a": [None, 2**70, -1e-300]}, "temperature": None, "top_p": "x"}
    assert post(running, **sent).status_code == 200
    assert server.requests[-1].json == {**BODY, **sent}


@contextmanager
def slow_streams(running: Any, count: int) -> Iterator[None]:
    """`count` clients that have asked and wait for an answer."""
    content = json.dumps({**BODY, "slow": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    host, port = running.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield


def drip(stop: threading.Event, pause: float, begun: threading.Semaphore) -> Callable[[Any], None]:
    """An upstream that sends slow answers a byte at a time, and others at once."""

    def script(request: Any) -> None:
        if b'"slow"' not in request.body:
            return request.answer(WHOLE, 200, "text/event-stream")
        request.head()
        begun.release()
        for position in range(len(TOKENS[0])):
            if stop.wait(pause):
                return
            request.send(TOKENS[0][position : position + 1])

    return script


def test_u9_slow_upstreams_keep_nobody_else_waiting(gateway: Any, upstream: Any) -> None:
    stop, begun = threading.Event(), threading.Semaphore(0)
    server = upstream(drip(stop, 1.0, begun))
    running = gateway({}, settings(server.url, server_kind="other", allow_fields=("slow",)))
    try:
        with slow_streams(running, 200):
            assert all(begun.acquire(timeout=60) for _ in range(200))
            for _ in range(50):
                assert post(running).content == WHOLE
            assert running.app.limiter.running == 200
    finally:
        stop.set()


KEY = "sk-operator-canary-0123456789"
ACCOUNT = {"openai_organization": "org-canary", "openai_project": "proj_canary", "openai_processing_ms": "5"}
TELLS = (
    b'{"error": {"message": "Incorrect API key: sk-oper****6789 of org-Canary0123456789", "code": "invalid_api_key"}}'
)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/models"])
def test_a_refusal_of_the_operators_key_stays_with_the_operator(
    gateway: Any, upstream: Any, status: int, path: str
) -> None:
    server = upstream(lambda request: request.answer(TELLS, status, **ACCOUNT))
    up = OpenAISettings(base_url=server.url, api_key=KEY)  # type: ignore[arg-type]
    running = gateway({}, Settings(backends={"big": up}))
    if path == "/v1/models":
        response = httpx.get(f"{running.url}{path}", headers={"authorization": "Bearer mine"})
    else:
        body = BODY if path == CHAT else {"model": MODEL, "input": "hi"}
        response = httpx.post(f"{running.url}{path}", json=body, headers={"openai-organization": "org-theirs"})
    assert response.status_code == 502 and error_of(response)["code"] == "upstream_authentication"
    assert "openai-organization" not in server.requests[-1].headers
    for secret in ("sk-", "canary", "Canary", "127.0.0.1"):
        assert secret not in response.text + str(response.headers)


def test_a_refusal_of_the_clients_key_is_the_clients(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(TELLS, 401, **ACCOUNT))
    running = gateway({}, settings(server.url))
    headers = {"authorization": "Bearer mine", "openai-organization": "org-mine"}
    response = httpx.post(f"{running.url}{CHAT}", json=BODY, headers=headers)
    assert (response.status_code, response.content) == (401, TELLS)
    assert response.headers["openai-organization"] == "org-canary"
    assert server.requests[-1].headers["openai-organization"] == "org-mine"


def test_without_a_key_of_either_side_a_refusal_is_the_operators(gateway: Any, upstream: Any, tmp_path: Any) -> None:
    """The client's key is for the gateway, so it cannot have been the one that was refused."""
    (tmp_path / "key").write_text("gateway-key")
    server = upstream(lambda request: request.answer(TELLS, 401))
    keys = {"api_keys": (ApiKey(tenant="a", key_file=tmp_path / "key"),)}
    running = gateway({}, settings(server.url, keys))
    response = httpx.post(f"{running.url}{CHAT}", json=BODY, headers={"authorization": "Bearer gateway-key"})
    assert response.status_code == 502 and error_of(response)["code"] == "upstream_authentication"
    assert "authorization" not in server.requests[-1].headers


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
    assert (
        response.content
        == TOKENS[0]
        + b"data: "
        + TELLS.replace(b"sk-oper****6789", b"***").replace(b"org-Canary0123456789", b"***")
        + end
    )


HALF = {
    "text that speaks of an end": ({}, [chunk("data: [DONE]"), chunk('"finish_reason": "stop"')]),
    "a comment that does": ({}, [b": data: [DONE]\n\n", chunk("a")]),
    "one of two": ({"n": 2}, [chunk("a", index=1), chunk("", "stop", 0), chunk("b", index=1)]),
    "two of three": ({"n": 3}, [chunk("", "stop", 0), chunk("", "stop", 0), chunk("", "length", 2)]),
}


@pytest.mark.parametrize(("fields", "pieces"), HALF.values(), ids=HALF)
def test_u6_what_looks_like_an_end_hides_no_cut(cutting: Any, fields: dict[str, Any], pieces: list[bytes]) -> None:
    running, _, state = cutting
    state.update(pieces=pieces, clean=True)
    assert told(post(running, **fields).content, b"".join(pieces))


NUMBERS = b'data: {"usage": [1], "choices": 5}\n\ndata: {"usage": {"prompt_tokens": 1' + b"0" * 5000 + b"}}\n\n"
AS_THEY_ARE: dict[str, tuple[dict[str, Any], bytes]] = {
    "no last word": ({}, chunk("a", "stop")),
    "no last blank line": ({}, chunk("a") + b"data: [DONE]"),
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
