"""C1: no body makes the gateway answer 5xx or stop. C9: nothing reaches other paths of an upstream. U8: odd answers."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import orjson
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.proxy.body import reading
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend

pytestmark = pytest.mark.reliability

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
JSON = {"content-type": "application/json"}
INLINE_BYTES = 1 << 16  # up to this size a body is read on the loop


def configured(url: str, **server: Any) -> tuple[dict[str, Any], Settings]:
    settings = Settings(
        server=ServerSettings(**server),
        backends={"up": OpenAISettings(base_url=url)},  # type: ignore[arg-type]
        models={"up": ModelSettings(backend="up")},
    )
    return {"local": FakeBackend("fine")}, settings


@pytest.fixture(scope="module")
def served(shared_gateway: Any, shared_upstream: Any) -> Any:
    """A gateway with a local backend and an upstream, and the upstream."""
    answer = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}'
    server = shared_upstream(lambda request: request.answer(answer))
    return shared_gateway(*configured(server.url)), server


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0].url, headers=JSON, timeout=60) as client:
        yield client


HOSTILE = {
    "brackets": b"[" * 1_000_000,
    "surrogate-in-a-tool": b'{"model": "local", "messages": [{"role": "user", "content": "x"}], "tools": '
    b'[{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]}',
    "many-lists": b'{"model": "up", "x": [' + b"[]," * 100_000 + b"0]}",
    "many-calls": b'{"model": "local", "messages": [{"role": "assistant", "tool_calls": [' + b"1," * 100_000 + b"1]}]}",
    "many-parts": b'{"model": "local", "messages": [{"role": "user", "content": [' + b"1," * 100_000 + b"1]}]}",
    "many-biases": b'{"model": "local", "messages": [], "logit_bias": {'
    + b",".join(b'"x%d":[]' % key for key in range(100_000))
    + b"}}",
    "unknown-fields": b'{"model":"local",' + b",".join(b'"k%d":1' % key for key in range(100_000)) + b"}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_c1_hostile_bodies_are_refused_cheaply(client: httpx.Client, body: bytes) -> None:
    before = time.process_time()
    response = client.post(CHAT, content=body)
    assert 400 <= response.status_code < 500 or (b'"x": [' in body and response.status_code == 200)
    assert len(response.content) < 2048
    assert time.process_time() - before < 30  # of client and server; quadratic work takes minutes


def test_c1_a_body_of_100_megabytes_is_refused_unread(served: Any) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    with _connected(served[0]) as connection:
        connection.sendall(head + b"content-length: 100000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    with _connected(served[0]) as connection:  # a length that is not told in advance
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        sent = _send_until_refused(connection, b"10000\r\n" + b" " * 0x10000 + b"\r\n", 100_000_000)
        assert sent < 60_000_000  # the limit, and what the two sockets hold


@pytest.mark.parametrize("mebibytes", [9, 20])
def test_c1_a_client_that_sends_too_much_reads_why(served: Any, mebibytes: int) -> None:
    """Not a reset: most clients send all of a body before they look for an answer."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with _connected(served[0]) as connection:
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % (mebibytes << 20))
        connection.sendall(bytes(mebibytes << 20))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("path", "line"),
    [(CHAT, "content-encoding: gzip"), (CHAT, "content-type: text/plain"), ("/nowhere", "x: y"), ("/health", "x: y")],
)
def test_c1_a_body_that_nobody_wants_is_not_read_for_ever(served: Any, path: str, line: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{line}\r\ntransfer-encoding: chunked\r\n\r\n"
    with _connected(served[0]) as connection:
        connection.sendall(head.encode())
        assert _send_until_refused(connection, b"10000\r\n" + b" " * 0x10000 + b"\r\n", 100_000_000) < 60_000_000


@pytest.mark.parametrize("layers", [1, 2])
def test_c1_compressed_bodies_are_not_unpacked(client: httpx.Client, layers: int) -> None:
    bomb = b'{"model": "local", "x": "' + b"0" * 50_000_000 + b'"}'
    for _ in range(layers):
        bomb = gzip.compress(bomb, 1)
    for encoding in ("gzip", "GZIP", "deflate", "br", "identity, gzip", "gzip, gzip", "x-gzip"):
        response = client.post(CHAT, content=bomb, headers={"content-encoding": encoding})
        assert response.status_code == 400 and "Content-Encoding" in response.json()["error"]["message"]
    assert client.post(CHAT, content=bomb).status_code == 400


def test_c1_large_bodies_at_once_are_bounded_in_memory(gateway: Any, upstream: Any) -> None:
    """The fifth of five bodies of a mebibyte gets 429 while the four others wait for their answers."""
    come, go = threading.Semaphore(0), threading.Event()

    def script(request: Any) -> None:
        come.release()
        go.wait(60)
        request.answer(b"{}")

    running = gateway(*configured(upstream(script).url, max_body_memory=(4 << 20) + 400))
    body = b'{"model": "up", "messages": [], "user": "' + b"x" * (1 << 20) + b'"}'

    def post() -> int:
        return httpx.post(running.url + CHAT, content=body, headers=JSON, timeout=60).status_code

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(post) for _ in range(4)]
        for _ in waiting:
            assert come.acquire(timeout=60)
        assert post() == 429
        go.set()
        assert [one.result() for one in waiting] == [200] * 4
    assert post() == 200


def test_c1_large_bodies_leave_the_loop_free(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reading of one takes, other requests are answered meanwhile."""
    begun, go = threading.Event(), threading.Event()

    def slow(body: bytes) -> Any:
        if len(body) > INLINE_BYTES:
            begun.set()
            assert go.wait(60)
        return reading.parse_object(body)

    monkeypatch.setattr("agentspec.proxy.endpoint.parse_object", slow)
    url = gateway({"local": FakeBackend("fine")}).url
    small = {"model": "local", "messages": [{"role": "user", "content": "hi"}]}
    large = {"model": "local", "messages": [{"role": "user", "content": "x" * INLINE_BYTES}]}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, url + CHAT, json=large, timeout=60)
        assert begun.wait(60)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(url + CHAT, json=small).status_code == 200
        go.set()
        assert waiting.result().status_code == 200


ASKED_BY = {COMPLETIONS: "prompt", "/v1/responses": "input"}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", *ASKED_BY])
def test_c1_large_answers_leave_the_loop_free(gateway: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Whatever the encoding of one takes, other requests are answered meanwhile."""
    begun, go, dumps = threading.Event(), threading.Event(), orjson.dumps

    def slow(value: Any) -> bytes:
        encoded = dumps(value)
        if len(encoded) > INLINE_BYTES:
            begun.set()
            assert go.wait(60)
        return encoded

    monkeypatch.setattr(orjson, "dumps", slow)
    url = gateway({"local": FakeBackend(9 * ("x" * 20_000 + " "))}).url
    asked: dict[str, Any] = {"model": "local", ASKED_BY.get(path, "messages"): "hi"}
    if "messages" in asked:
        asked |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, url + path, json=asked, timeout=60)
        assert begun.wait(60)
        assert httpx.get(f"{url}/health").status_code == 200
        go.set()
        assert waiting.result().status_code == 200


def _connected(running: Any) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def _send_until_refused(connection: socket.socket, piece: bytes, most: int) -> int:
    sent = 0
    with suppress(OSError):
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    return sent


# The open routes of vLLM and SGLang, and other spellings of our own.
ELSEWHERE = """
    /invocations /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /pause /resume
    /is_paused /update_weights /update_weights_from_disk /init_weight_transfer_engine /load /ping /server_info /sleep
    /wake_up /is_sleeping /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /scale_elastic_ep
    /is_scaling_elastic_ep /start_profile /stop_profile /v1/audio/speech
    /v1/audio/transcriptions /v1/audio/translations /v1/realtime /v1/load_lora_adapter /v1/unload_lora_adapter /v1/files
    /v1/batches /v1/fine_tuning/jobs /inference/v1/generate /generate /encode /flush_cache /set_internal_state
    /get_server_info /get_model_info /open_session /close_session /abort_request /release_memory_occupation /docs /redoc
    /openapi.json / //v1/chat/completions /v1//chat/completions /v1/chat/completions/ /v1/chat/../completions
    /v1/./chat/completions /v1/chat/completions/.. /v1/%2e%2e/invocations /%2e%2e/v1/chat/completions
    /v1/chat/%2e%2e/completions /v1/chat%2Fcompletions/x /v1/chat%252Fcompletions /V1/chat/completions
    /v1/chat/completions%00 /v1/chat/completions%20 /v1/chat/completions;x /v1/chat\\completions
    /v1/chat/completions/../../pause /v1/models/../../pause /v1/models/%2e%2e/%2e%2e/pause
    /v1/models/x%2f..%2f..%2fpause /./v1/chat/completions /v1/..%2fchat/completions /%76%31/chat%2fcompletions/..
""".split()  # fmt: skip


def test_c9_no_other_path_reaches_an_upstream(served: Any) -> None:
    running, server = served
    server.requests.clear()
    body = json.dumps({"model": "up", "messages": []}).encode()
    for path in ELSEWHERE:
        status, content = _raw(running, "POST", path, body)
        assert status in (400, 404, 405) and b'"error"' in content, path
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POSTX"):
        assert _raw(running, method, CHAT, body)[0] in (400, 405), method
    assert server.requests == []


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (("user-agent", "caf\u00e9".encode("latin-1")), 200),
        (("openai-organization", b"\xff\xfe\x80"), 200),
        (("x-stainless-lang", "\u65e5\u672c".encode()), 200),
        (("x-request-id", b"\xe9"), 200),
        (("x-agentspec-session", b"caf\xe9"), 400),
        (("x-agentspec-step", "caf\u00e9".encode()), 400),
        (("x-agentspec-session", b"caf%C3%A9"), 200),
        (("x-agentspec-session", b"%ff"), 400),
        (("x-agentspec-session", b"%ed%a0%80"), 400),
    ],
)
@pytest.mark.parametrize("model", ["up", "local"])
def test_c9_bytes_above_ascii_in_headers(
    client: httpx.Client, served: Any, header: tuple[str, bytes], status: int, model: str
) -> None:
    """Passed on as they came, and refused in labels, whose encoding is agreed."""
    server = served[1]
    server.requests.clear()
    name, value = header
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    response = client.post(
        CHAT, json=body, headers=[(name.encode(), value), *((b"content-type", b"application/json"),)]
    )
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == name
    elif model == "up" and name != "x-request-id":
        [sent] = (request for request in server.requests if request.method == "POST")
        assert sent.headers[name].encode("latin-1") == value


@pytest.mark.parametrize("query", ["x=\xe9", "x=" + "y" * 9000, "api_base=http://evil", "u=http%3A//evil", "api_key=k"])
def test_c9_queries_an_upstream_may_not_get(served: Any, query: str) -> None:
    running, server = served
    server.requests.clear()
    status, content = _raw(running, "POST", f"{CHAT}?{query}", json.dumps({"model": "up", "messages": []}).encode())
    assert status == 400 and not server.requests, content


def _raw(running: Any, method: str, target: str, body: bytes, line: str = "") -> tuple[int, bytes]:
    """Status and body of the answer to a request whose head is written as it stands."""
    host = "" if line.startswith("host:") else "host: localhost\r\n"
    head = f"{method} {target} HTTP/1.1\r\n{host}content-type: application/json\r\n"
    head += "" if line.startswith("connection:") else "connection: close\r\n"
    head += f"{line}\r\n" if line else ""
    with _connected(running) as connection:
        connection.settimeout(60)
        connection.sendall(head.encode("latin-1") + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        with suppress(TimeoutError):
            while not _whole(received) and (more := connection.recv(65536)):
                received += more
    status, _, content = received.partition(b"\r\n\r\n")
    return int(status.split(b" ")[1]), content if method != "HEAD" else b'"error"'


def _whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and bool(lengths) and len(body) >= int(lengths[0])
