"""Connections to an upstream: reuse, repeated requests, time limits, TLS, proxies, headers and keys."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamTimeoutError
from tests.backends.http.conftest import ANSWER, Client, Script, Server, ask, serving, until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
SECRET = "sk-planted-canary"


async def answer_all(client: Client) -> None:
    while True:
        await client.request()
        await client.send(ANSWER)


async def one_at_a_time(backend: OpenAIBackend, count: int) -> None:
    for _ in range(count):
        assert await ask(backend) == b"{}"


async def test_the_connection_used_last_is_reused_until_it_expires() -> None:
    async with serving(answer_all) as (server, backend):
        await one_at_a_time(backend, 5)
        assert len(server.clients) == 1
        await asyncio.gather(*(ask(backend) for _ in range(3)))
        used = len(server.clients)
        await one_at_a_time(backend, 5)
        assert len(server.clients) == used <= 3 and server.requests == 13
        await asyncio.sleep(5)
        await one_at_a_time(backend, 1)
        assert len(server.clients) == used + 1
        await until(lambda: server.open == 1)


async def test_an_answer_not_read_to_its_end_closes_its_connection() -> None:
    async def stream(client: Client) -> None:
        await client.request()
        await client.send(CHUNKED)
        await client.left()

    async with serving(stream) as (server, backend):
        async with backend.forward("POST", "/x", headers={}, body=b"{}"):
            assert server.open == 1
        await until(lambda: server.open == 0)


async def test_an_answer_without_request_is_discarded() -> None:
    """Some servers send 408 before they close an idle connection."""

    async def script(client: Client) -> None:
        while True:
            await client.request()
            await client.send(ANSWER)
            if client.number == 0:
                await asyncio.sleep(1)
                await client.send(EMPTY % b"408 Request Timeout")

    async with serving(script) as (server, backend):
        await one_at_a_time(backend, 1)
        await asyncio.sleep(2)
        await one_at_a_time(backend, 1)
        assert len(server.clients) == 2


@pytest.mark.parametrize("by_reset", [False, True])
async def test_closed_idle_connections_fail_no_call(by_reset: bool) -> None:
    """A server that closes when a request is under way has not read it: it is sent on a new connection."""
    chance = random.Random(5)

    async def script(client: Client) -> None:
        while True:
            await client.request()
            if client.requests > 1 and chance.random() < 0.4:
                if by_reset:
                    client.reset()
                return
            await client.send(ANSWER)

    async with serving(script) as (server, backend):
        await one_at_a_time(backend, 200)
        lost = server.requests - 200
        assert lost > 25 and len(server.clients) == lost + 1


def answering_once(*begun: bytes) -> Script:
    """Answers the first request of the first connection, and others with `begun`, before it closes."""

    async def script(client: Client) -> None:
        await client.request()
        if client.number == 0:
            await client.send(ANSWER)
            await client.request()
        for piece in begun:
            await client.send(piece)

    return script


@pytest.mark.parametrize(
    ("begun", "requests"),
    [([], 3), ([b"H"], 2), ([ANSWER[:20]], 2), ([ANSWER[:-1]], 2)],
    ids=["nothing", "a byte", "half a head", "half a body"],
)
async def test_a_request_is_repeated_once_and_only_without_a_byte_of_the_answer(
    begun: list[bytes], requests: int
) -> None:
    async with serving(answering_once(*begun)) as (server, backend):
        await one_at_a_time(backend, 1)
        with pytest.raises(UpstreamError) as raised:
            await ask(backend)
        assert server.requests == requests and raised.value.retryable is (not begun)


async def test_a_new_connection_that_breaks_is_not_repeated() -> None:
    async def script(client: Client) -> None:
        await client.request()

    async with serving(script) as (server, backend):
        with pytest.raises(UpstreamError) as raised:
            await ask(backend)
        assert server.requests == 1 and raised.value.retryable


async def silent_after_one(client: Client) -> None:
    await client.request()
    await client.send(ANSWER)
    await client.request()
    await client.left()


async def test_a_late_call_is_not_repeated_and_has_its_own_time_limit() -> None:
    async with serving(silent_after_one, read_timeout=600) as (server, backend):
        await one_at_a_time(backend, 1)
        report = await backend.probe(timeout=1.0)
        assert asyncio.get_running_loop().time() < 60
        assert "in time" in str(report.error) and server.requests == 2 and len(server.clients) == 1
    async with serving(silent_after_one, read_timeout=30) as (server, backend):
        await one_at_a_time(backend, 1)
        with pytest.raises(UpstreamTimeoutError):
            await ask(backend)
        assert server.requests == 2


async def test_the_time_limit_bounds_each_wait_and_not_the_whole_answer() -> None:
    async def script(client: Client) -> None:
        await client.request()
        for piece in (CHUNKED, *[b"1\r\nx\r\n"] * 8):
            await client.send(piece)
            await asyncio.sleep(10)
        await client.send(b"0\r\n\r\n")

    async with serving(script, read_timeout=30) as (_, backend):
        assert await ask(backend) == b"x" * 8


async def test_a_server_that_reads_a_long_request_slowly_is_not_late() -> None:
    async def script(client: Client) -> None:
        left = 8 << 20
        while left > 0:
            left -= len(await client.reader.read(1 << 18))
            await asyncio.sleep(1)
        await client.send(ANSWER)
        await client.left()

    async with serving(script, read_timeout=20) as (_, backend):
        assert await ask(backend, body=bytes(8 << 20)) == b"{}"


async def test_an_answer_before_the_request_was_read_is_used() -> None:
    async def script(client: Client) -> None:
        await client.send(EMPTY % b"413 Too Large")
        await asyncio.sleep(1)

    async with (
        serving(script) as (_, backend),
        backend.forward("POST", "/x", headers={}, body=b"x" * (8 << 20)) as response,
    ):
        assert response.status == 413


async def test_an_upstream_waits_while_its_answer_is_not_read() -> None:
    sent = 0

    async def script(client: Client) -> None:
        nonlocal sent
        await client.request()
        await client.send(CHUNKED)
        for _ in range(4096):
            await client.send(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            sent += 1

    async with serving(script) as (_, backend), backend.forward("POST", "/x", headers={}, body=b"{}") as response:
        assert response.status == 200
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(1)
        assert sent < 512, "32 MiB: what the kernel and the client hold"


ODD = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello",
    CHUNKED + b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-a: trailer\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\nx-b: 2\r\n\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
]


@pytest.mark.parametrize("answer", ODD)
async def test_an_answer_cut_at_any_byte_is_read_and_its_connection_used_again(answer: bytes) -> None:
    async def script(client: Client) -> None:
        while True:
            await client.request()
            cut = client.requests
            await client.send(answer[:cut])
            await asyncio.sleep(0)
            await client.send(answer[cut:])

    async with serving(script) as (server, backend):
        for _ in answer:
            assert await ask(backend) == b"hello"
        assert len(server.clients) == 1


async def test_a_header_that_holds_a_line_end_is_not_sent() -> None:
    async with serving(answer_all) as (server, backend):
        for value in ("a\r\nx-evil: 1", "a\nb", "a\rb", "a\0b"):
            with pytest.raises(UpstreamError, match="LocalProtocolError"):
                await ask(backend, headers={"x-request-id": value})
        assert not server.requests


async def test_headers_are_allow_listed_and_the_own_key_wins() -> None:
    heads: list[bytes] = []

    async def script(client: Client) -> None:
        heads.append(await client.request())
        named = b"set-cookie: a=b\r\nRetry-After: 2\r\nx-ratelimit-a: 1\r\n"
        await client.send(ANSWER.replace(b"content-length", named + b"content-length"))

    given = {"Authorization": "Bearer client", "Cookie": "c", "Host": "evil", "Connection": "x-agentspec-step"}
    given |= {"Transfer-Encoding": "chunked", "X-Forwarded-For": "1.2.3.4", "X-AgentSpec-Step": "plan"}
    async with (
        serving(script, api_key=SECRET) as (_, backend),
        backend.forward("POST", "/x", headers=given, body=b"{}", query="api-version=1") as response,
    ):
        assert response.headers == {"retry-after": "2"}  # rate limits are those of the operator's account
    line, *lines = heads[0].decode().lower().split("\r\n")
    assert line == "post /v1/x?api-version=1 http/1.1"
    sent = dict(one.split(": ", 1) for one in lines if one)
    assert sent["authorization"] == f"bearer {SECRET}" and sent["host"].startswith("127.0.0.1:")
    assert sent["x-agentspec-step"] == "plan" and sent["content-length"] == "2"
    assert not {"cookie", "x-forwarded-for", "transfer-encoding", "connection"} & sent.keys()


def test_every_error_of_the_http_library_is_an_upstream_error() -> None:
    """Those that a proxy of the environment or a given transport raises."""
    settings = OpenAISettings(base_url="http://up.test/v1", server_kind="other")  # type: ignore[arg-type]
    for kind in {one for one in vars(httpx).values() if isinstance(one, type) and issubclass(one, httpx.HTTPError)}:
        error = kind.__new__(kind)
        Exception.__init__(error, "message")

        def fail(request: httpx.Request, error: Exception = error) -> httpx.Response:
            raise error

        backend = OpenAIBackend(settings, transport=httpx.MockTransport(fail))
        expected = UpstreamTimeoutError if issubclass(kind, httpx.TimeoutException) else UpstreamError
        with pytest.raises(expected, match=kind.__name__) as caught:
            asyncio.run(ask(backend))  # each loop has its own connections
        assert type(caught.value) is expected and caught.value.__cause__ is error


async def test_the_key_file_is_read_and_stays_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(f" {SECRET}\n")
    async with serving(answer_all, api_key_file=str(file)) as (_, backend):
        await ask(backend)
        assert SECRET not in repr(backend) and SECRET not in caplog.text and "set" in repr(backend)
    userinfo = OpenAISettings(base_url="http://user:hunter2@upstream.test/v1")  # type: ignore[arg-type]
    assert "hunter2" not in repr(OpenAIBackend(userinfo))


def test_a_key_that_no_header_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\nother")
    for given in ({"api_key": f"{SECRET}…"}, {"api_key_file": str(tmp_path / "key")}):
        settings: dict[str, Any] = {"base_url": "http://upstream.test/v1", **given}
        with pytest.raises(ConfigurationError, match="must be a single line") as refused:
            OpenAIBackend(OpenAISettings(**settings))
        assert SECRET not in refused.value.message


async def test_only_trusted_certificates_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    handler = Server(answer_all)
    server = await asyncio.start_server(handler, "localhost", 0, ssl=context)
    settings = OpenAISettings(base_url=f"https://localhost:{server.sockets[0].getsockname()[1]}/v1")  # type: ignore[arg-type]
    with pytest.raises(UpstreamError, match=r"ConnectError\): its certificate is not trusted") as raised:
        await ask(OpenAIBackend(settings))
    assert raised.value.retryable
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    known = OpenAIBackend(settings)
    await one_at_a_time(known, 3)
    assert handler.requests == 3 and handler.open == 1
    await known.aclose()
    server.close()
    await until(lambda: not handler.open)


async def test_a_proxy_that_the_environment_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def script(client: Client) -> None:
        seen.append(await client.request())
        await client.send(ANSWER)

    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(script) as (_, proxy):
        monkeypatch.setenv("HTTP_PROXY", str(proxy.settings.url).removeprefix("http://").removesuffix("/v1"))
        settings = OpenAISettings(base_url="http://upstream.test/v1", server_kind="other")  # type: ignore[arg-type]
        backend = OpenAIBackend(settings)
        assert await ask(backend) == b"{}"
        assert seen[0].startswith(b"POST http://upstream.test/v1/x HTTP/1.1\r\n")
        await backend.aclose()


def test_httpx_takes_the_place_of_httpx2() -> None:
    code = """
import asyncio, sys
sys.modules["httpx2"] = sys.modules["httpcore2"] = None
from tests.backends.http.conftest import ANSWER, ask, serving

async def answer_all(client):
    while True:
        await client.request()
        await client.send(ANSWER)

async def main():
    async with serving(answer_all) as (server, backend):
        print(await ask(backend), await ask(backend), len(server.clients))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "b'{}' b'{}' 1\n"
