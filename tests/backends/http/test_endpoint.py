from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.backends.http import Endpoint, httpx, mapped_errors
from agentspec.backends.http.response import UpstreamResponse
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamTimeoutError

pytestmark = pytest.mark.anyio
SECRET = "sk-planted-canary"


def settings(**fields: Any) -> OpenAISettings:
    return OpenAISettings(**{"base_url": "http://upstream.test/v1", **fields})


class Recorder:
    """A transport that answers 200 and keeps the requests."""

    def __init__(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.requests: list[httpx.Request] = []
        self._answer = (status, headers or {})
        self.transport = httpx.MockTransport(self._handle)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        status, headers = self._answer
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(b"body"))


def exception_classes() -> Iterator[type[Exception]]:
    for value in vars(httpx).values():
        if isinstance(value, type) and issubclass(value, Exception):
            yield value


def build(kind: type[Exception]) -> Exception:
    """An instance, whatever its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "message")
    return error


@pytest.mark.parametrize("kind", sorted(exception_classes(), key=lambda kind: kind.__name__))
def test_every_error_of_the_client_is_mapped(kind: type[Exception]) -> None:
    expected = UpstreamTimeoutError if issubclass(kind, httpx.TimeoutException) else UpstreamError
    with pytest.raises(expected, match="upstream U .*" + kind.__name__) as caught, mapped_errors("U"):
        raise build(kind)
    assert type(caught.value) is expected and isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(("encoding", "encoded"), [(b"", False), (b"Identity", False), (b"gzip", True)])
def test_an_empty_encoding_is_none(encoding: bytes, encoded: bool) -> None:
    answer: Any = SimpleNamespace(status=200, headers=[(b"content-encoding", encoding)])
    assert UpstreamResponse(answer, "U").is_encoded == encoded


async def test_headers_are_allow_listed_and_the_own_key_wins() -> None:
    recorder = Recorder(headers={"set-cookie": "a=b", "Retry-After": "2", "connection": "close", "x-ratelimit-a": "1"})
    endpoint = Endpoint(settings(api_key=SECRET), transport=recorder.transport)
    given = {
        "Authorization": "Bearer client",
        "Cookie": "c",
        "Host": "evil",
        "Connection": "keep-alive, x-agentspec-step",
        "Transfer-Encoding": "chunked",
        "X-Forwarded-For": "1.2.3.4",
        "X-AgentSpec-Step": "plan",
        "Content-Type": "application/json",
    }
    async with endpoint.send("POST", "/chat/completions", headers=given, body=b"{}", query="api-version=1") as response:
        assert response.headers == {"retry-after": "2"}  # rate limits are those of the operator's account
        assert await response.aread() == b"body"
    [request] = recorder.requests
    assert str(request.url) == "http://upstream.test/v1/chat/completions?api-version=1"
    assert request.headers["authorization"] == f"Bearer {SECRET}" and request.headers["host"] == "upstream.test"
    assert request.headers["x-agentspec-step"] == "plan" and request.headers["content-length"] == "2"
    assert not {"cookie", "x-forwarded-for", "transfer-encoding"} & set(request.headers)
    await endpoint.aclose()


@pytest.mark.parametrize("status", [301, 302, 307, 308, 304])
async def test_redirects_are_not_followed(status: int) -> None:
    recorder = Recorder(status, {"location": "http://169.254.169.254/"})
    endpoint = Endpoint(settings(api_key=SECRET), transport=recorder.transport)
    with pytest.raises(UpstreamError, match="redirects are not followed"):
        async with endpoint.send("POST", "/completions", headers={}):
            pass
    assert len(recorder.requests) == 1


async def test_answers_are_bounded() -> None:
    endpoint = Endpoint(settings(), transport=Recorder().transport)
    async with endpoint.send("GET", "/models", headers={}) as response:
        with pytest.raises(UpstreamError, match="more than 3 bytes"):
            await response.aread(limit=3)


def test_the_key_file_is_read_and_stays_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(f" {SECRET}\n")
    recorder = Recorder(500)
    endpoint = Endpoint(settings(api_key_file=str(file)), transport=recorder.transport)

    async def send() -> None:
        async with endpoint.send("GET", "/models", headers={}):
            pass

    asyncio.run(send())
    assert recorder.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in repr(endpoint) and SECRET not in caplog.text and "set" in repr(endpoint)


def test_a_key_that_no_header_can_hold(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\nother")
    for given in ({"api_key": f"{SECRET}…"}, {"api_key_file": str(tmp_path / "key")}):
        with pytest.raises(ConfigurationError, match="must be a single line") as refused:
            Endpoint(settings(**given))
        assert SECRET not in refused.value.message


def test_a_password_in_the_address_is_not_shown() -> None:
    assert "hunter2" not in repr(Endpoint(settings(base_url="http://user:hunter2@upstream.test/v1")))


def test_each_event_loop_has_its_own_connections() -> None:
    recorder = Recorder()
    endpoint = Endpoint(settings(), transport=recorder.transport)

    async def send() -> None:
        async with endpoint.send("GET", "/models", headers={}):
            pass

    asyncio.run(send())
    asyncio.run(send())
    assert len(recorder.requests) == 2
