"""I5: no request makes the gateway, or an upstream that it asks, connect to an address that is not configured."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend

pytestmark = pytest.mark.reliability

CHAT = "/v1/chat/completions"
URLS = [
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://100.100.100.200/latest/meta-data/",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://localhost:{port}/",
    "http://127.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://0.0.0.0:{port}/",
    "http://0:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::]:{port}/",
    "http://127.0.0.1.nip.io:{port}/",
    "http://rebind.example:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://configured.example@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@configured.example/",
    "http://127.0.0.1:{port}\\@configured.example/",
    "HTTP://LOCALHOST:{port}/",
    "https://127.0.0.1:{port}/",
    " http://127.0.0.1:{port}/",
    "\thttp://127.0.0.1:{port}/",
    "ht\ntp://127.0.0.1:{port}/",
    "http:/\\127.0.0.1:{port}/",
    "//127.0.0.1:{port}/",
    "\\\\127.0.0.1\\share",
    "http://\uff11\uff12\uff17.0.0.1:{port}/",
    "http://127\u30020\u30020\u30021:{port}/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/_GET",
    "ftp://127.0.0.1:{port}/",
    "ws://127.0.0.1:{port}/",
    "s3://bucket/key",
    "gs://bucket/key",
    "unix:///var/run/docker.sock",
]


@dataclass
class Outgoing:
    """Which addresses this process connects to or asks a name server for, apart from the ports in `known`."""

    known: set[int] = field(default_factory=set)
    found: list[Any] = field(default_factory=list)

    def _connecting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def connect(connection: socket.socket, address: Any) -> Any:
            if not self._expected(address):
                self.found.append(address)
            return real(connection, address)

        return connect

    def _asking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
            if host not in ("127.0.0.1", b"127.0.0.1"):
                self.found.append(host)
            return real(host, *arguments, **options)

        return getaddrinfo

    def _expected(self, address: Any) -> bool:
        return isinstance(address, tuple) and address[0] == "127.0.0.1" and address[1] in self.known

    @contextmanager
    def watching(self, *known: int) -> Iterator[None]:
        """No audit hook: Python cannot remove one, and before 3.12 a thread may not start to be traced beside one."""
        self.known = set(known)
        self.found.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("connect", "connect_ex"):
                patch.setattr(socket.socket, name, self._connecting(getattr(socket.socket, name)))
            patch.setattr(socket, "getaddrinfo", self._asking(socket.getaddrinfo))
            yield
        assert self.found == []


OUTGOING = Outgoing()


@dataclass
class Served:
    """A gateway with a local model and an upstream, and a third server that nobody may ever reach."""

    running: Any
    upstream: Any
    bystander: Any
    client: httpx.Client

    def post(self, fields: dict[str, Any], *, model: str = "up", path: str = CHAT, **options: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.client.post(path, content=json.dumps(body), **options)

    @contextmanager
    def reaching_nobody(self) -> Iterator[None]:
        """Nothing but the gateway and its upstream is connected to inside the block."""
        self.upstream.requests.clear()
        with OUTGOING.watching(_port(self.running.url), _port(self.upstream.url)):
            yield
        assert self.bystander.requests == []

    def urls(self) -> list[str]:
        return [url.replace("{port}", str(_port(self.bystander.url))) for url in URLS]


def _port(url: str) -> int:
    return int(url.removesuffix("/v1").rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def served(shared_gateway: Any, shared_upstream: Any) -> Iterator[Served]:
    server, bystander = (shared_upstream(lambda request: request.answer(b'{"choices":[]}')) for _ in range(2))
    settings = Settings(
        server=ServerSettings(),
        backends={"up": OpenAISettings(base_url=server.url, server_kind="other")},  # type: ignore[arg-type]
        models={"up": ModelSettings(backend="up")},
    )
    running = shared_gateway({"local": FakeBackend("fine")}, settings)
    with httpx.Client(base_url=running.url, headers={"content-type": "application/json"}, timeout=60) as client:
        yield Served(running, server, bystander, client)


SHARES = pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
"""Each form with a fifth of the addresses, and each address in a fifth of the forms; or every one with every other."""


def test_i5_connections_are_seen(served: Served) -> None:
    for url in (served.bystander.url, "http://localhost:1/"):
        known = _port(served.running.url)
        with pytest.raises(AssertionError), OUTGOING.watching(known), suppress(httpx.HTTPError):
            httpx.get(url)
    served.bystander.requests.clear()


FIELDS = """
    api_base base_url model_url url endpoint azure_endpoint callback_url webhook fallbacks proxy server_url host
    unheard_of
""".split()


@SHARES
def test_i5_no_field_names_an_address(served: Served, share: int) -> None:
    with served.reaching_nobody():
        for number, url in enumerate(served.urls()):
            every = (
                *({name: url} for name in FIELDS),
                {"unheard_of": [url]},
                {"unheard_of": {"x": [[{"y": url}]]}},
                {"vllm_xargs": {"x": url}},
                {"kv_transfer_params": {"remote_host": url, "remote_port": 80}},
                {"extra_body": {"api_base": url}},
                {"tools": [{"type": "mcp", "server_label": "x", "server_url": url}]},
                {"web_search_options": {"where": url}},
                {"bootstrap_host": url},
                {"model": url},
            )
            for fields in every[number % share :: share]:
                response = served.post(fields)
                assert response.status_code in (400, 404) and response.json()["error"]["param"], fields
    assert served.upstream.requests == []


@SHARES
def test_i5_media_come_with_the_request(served: Served, share: int) -> None:
    with served.reaching_nobody():
        for number, url in enumerate(served.urls()):
            every = (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "image_url", "image_url": url},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "audio_url", "audio_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "input_image", "image_url": url},
                {"type": "image", "source": {"type": "url", "url": url}},
                {"type": "file", "file": {"file_url": url}},
                {"type": "file", "file": {"file_id": url}},
            )
            for part in every[number % share :: share]:
                for model in ("up", "local"):
                    response = served.post({"messages": [{"role": "user", "content": [part]}]}, model=model)
                    assert response.status_code == 400, (part, response.text)
            response = served.post({"input": [{"image": url}]}, path="/v1/embeddings")
            assert response.status_code == 400
    assert served.upstream.requests == []


def test_i5_text_and_the_arguments_of_tools_are_text(served: Served) -> None:
    with served.reaching_nobody():
        for url in served.urls():
            call = {"id": "c", "type": "function", "function": {"name": "fetch", "arguments": json.dumps({"url": url})}}
            messages = [
                {"role": "user", "content": f"read {url}"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": url},
                {"role": "user", "content": [{"type": "text", "text": url}]},
            ]
            for model in ("up", "local"):
                response = served.post({"messages": messages}, model=model)
                assert response.status_code == 200, (url, response.text)
            assert served.upstream.requests[-1].json["messages"] == messages
    assert len(served.upstream.requests) == len(URLS)


HEADERS = """
    x-api-base x-forwarded-host x-forwarded-for x-forwarded-proto x-original-url forwarded referer origin host
    x-rewrite-url x-http-method-override x-forwarded-prefix te
    x-upstream-url x-litellm-api-base x-portkey-custom-host helicone-target-url via true-client-ip x-agentspec-backend
""".split()


def test_i5_no_header_leads_elsewhere(served: Served) -> None:
    with served.reaching_nobody():
        for url in served.urls():
            value = url.strip().replace("\n", "").encode()
            headers = [(name.encode(), b"rebind.example" if name == "host" else value) for name in HEADERS]
            response = served.post({}, headers=[*headers, (b"content-type", b"application/json")])
            assert response.status_code in (200, 400, 403, 421), response.text
    for request in served.upstream.requests:
        assert request.target == CHAT and request.headers["host"] == f"127.0.0.1:{_port(served.upstream.url)}"
        unknown = {name for name in HEADERS if name in request.headers} - {"host", "x-agentspec-backend"}
        assert not unknown


def test_i5_no_query_or_path_leads_elsewhere(served: Served) -> None:
    with served.reaching_nobody():
        for url in served.urls():
            for name in ("api_base", "url", "x"):
                response = served.post({}, params={name: url})
                assert response.status_code == 400, (name, url)
            response = served.client.get("/v1/models/" + httpx.URL("http://x/", params={"": url}).query.decode()[1:])
            assert response.status_code == 404
    assert served.upstream.requests == []


@SHARES
def test_i5_redirects_are_not_followed(served: Served, share: int) -> None:
    script = served.upstream.script
    try:
        with served.reaching_nobody():
            for number, url in enumerate(served.urls()):
                for status in (301, 302, 303, 307, 308)[number % share :: share]:
                    where = "".join(url.split())
                    location = where if where.isascii() else "http://127.0.0.1:1/"
                    served.upstream.script = lambda request, status=status, location=location: request.answer(
                        b"{}", status, location=location, refresh=f"0; url={location}", alt_svc='h2="127.0.0.1:1"'
                    )
                    response = served.post({})
                    assert response.status_code == 502 and url not in response.text
                    assert not {"location", "refresh", "alt-svc"} & set(response.headers)
    finally:
        served.upstream.script = script
