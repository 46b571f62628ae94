"""What a connection waits for, as both of uvicorn's protocols tell it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.proxy.serving.protocol import Phase
from agentspec.testing import Answer, FakeBackend

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture
def running(gateway: Any) -> Any:
    return gateway({"fake": FakeBackend(Answer("fine", latency=0.5))})


def test_the_phases_of_a_connection(running: Any, until: Callable[..., None]) -> None:
    def phase() -> Phase | None:
        return next((one.phase for one in tuple(running.server.server_state.connections)), None)

    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        until(lambda: phase() is Phase.HEAD)
        for _ in range(2):
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:5])
            until(lambda: phase() is Phase.BODY)
            connection.sendall(BODY[5:])
            until(lambda: phase() is Phase.ANSWER)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 200 and response.read()
            until(lambda: phase() is Phase.IDLE)
        connection.sendall(b"GET /health")
        until(lambda: phase() is Phase.HEAD)
    until(lambda: phase() is None)


def test_who_waits_for_us_does_not_send_too_slowly(running: Any, until: Callable[..., None]) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_gets_an_error_of_the_usual_shape(running: Any) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        received = b""
        while more := connection.recv(1000):
            received += more
    assert received.startswith(b"HTTP/1.1 400 ") and b"connection: close" in received
    assert received.endswith(b'"type":"invalid_request_error","param":null,"code":null}}')


@pytest.mark.parametrize(
    "head", [HEAD.replace(b"/chat", b"/nothing"), HEAD.replace(b"POST /v1/chat/completions", b"GET /health")]
)
@pytest.mark.parametrize(
    "framing", [b"content-length: 99999\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n%x\r\n" % 99_999]
)
def test_c5_a_body_that_nobody_read_is_not_kept(
    running: Any, until: Callable[..., None], head: bytes, framing: bytes
) -> None:
    """Neither what came before the answer nor what comes after it; one of unknown length ends the connection."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + framing + b"x" * 50_000)
        assert connection.recv(100_000).startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 200 "))
        connection.sendall(b"x" * 40_000)
        if b"chunked" in framing:
            until(lambda: not running.server.server_state.connections)
            return
        [served] = running.server.server_state.connections
        before = served.received
        assert not served.cycle.body
        connection.sendall(b"x" * 9_999 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(100_000).startswith(b"HTTP/1.1 200 ")
        until(lambda: served.received >= before + 9_999 and not served.cycle.body)
