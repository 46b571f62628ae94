"""API keys, the names that agents give themselves, and the Host that a request names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.testing import FakeBackend
from agentspec.types import Labels


def app_of(**server: Any) -> Any:
    settings = Settings(server=ServerSettings(**server), backends={})
    return create_app(Runtime(settings, backends={"fake": FakeBackend("x")}), settings)


def get(
    app: Any, *headers: tuple[str, str], path: str = "/v1/models", version: str = "1.1", method: str = "GET"
) -> tuple[int, str]:
    """The status and the body of the answer to a request with exactly these headers."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": version,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    sent: list[Any] = []
    came = [{"type": "http.request", "body": b'{"model": "fake"}'}]

    async def receive() -> Any:
        return came.pop() if came else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:]).decode()


HOST = ("host", "localhost")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[ApiKey, ...]:
    for tenant in ("a", "b", "operator"):
        (tmp_path / tenant).write_text(f"key-of-{tenant}\n")
    tenants = [ApiKey(tenant=tenant, key_file=tmp_path / tenant) for tenant in ("a", "b")]
    return (*tenants, ApiKey(role="operator", key_file=tmp_path / "operator"))


WRONG = ["", "Bearer", "Bearer ", "Bearer key-of-", "Bearer key-of-aa", "key-of-a", "Basic key-of-a", "Bearer \xff"]


def test_only_one_right_key_is_served(keys: Any) -> None:
    app = app_of(api_keys=keys)
    for right in ("Bearer key-of-a", "bearer key-of-b "):
        assert get(app, HOST, ("authorization", right))[0] == 200
    assert get(app, HOST, ("x-api-key", "key-of-a"))[0] == 200
    wrong = [("authorization", value) for value in WRONG]
    doubled = [("authorization", "Bearer key-of-a")] * 2
    for headers in (
        [],
        *([one] for one in wrong),
        doubled,
        [("x-api-key", "key-of-a")] * 2,
        [wrong[0], ("x-api-key", "key-of-a")],
    ):
        assert get(app, HOST, *headers)[0] == 401


def test_a_probe_learns_no_more_than_whether_the_gateway_is_ready(keys: Any) -> None:
    """Orchestrators send no key, and call by any name; only clients see why it is not ready."""
    app = app_of(api_keys=keys)  # whose models load: its lifespan has not begun
    probe, key = ("host", "probe.cluster.local"), ("authorization", "Bearer key-of-a")
    assert get(app, probe, path="/health")[0] == 200
    for headers, status in (([], "not ready"), ([("authorization", "Bearer no")], "not ready"), ([key], "loading")):
        assert get(app, probe, *headers, path="/ready") == (503, f'{{"status":"{status}"}}')
    refused = get(app, HOST, key, ("content-type", "application/json"), path="/v1/chat/completions", method="POST")
    assert refused[0] == 503 and "not_ready" in refused[1]


def test_request_ids_are_echoed_only_if_harmless(gateway: Any) -> None:
    url = f"{gateway({'fake': FakeBackend('x')}).url}/health"
    for given, echoed in (("abc-1.2:3_4", True), ("a b", False), ("x" * 129, False), ('"}', False)):
        id = httpx.get(url, headers={"x-request-id": given}).headers["x-request-id"]
        assert (id == given) is echoed and (echoed or id.startswith("req-"))


OWN = {"x-agentspec-session": "mine", "x-agentspec-workflow": "flow"}
NAMES: list[tuple[dict[str, str], dict[str, Any], Labels]] = [
    ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, Labels("s", None, "a")),
    (OWN | {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, Labels("mine", "flow", "a")),
    *(({name: "s"}, {}, Labels("s")) for name in ("session-id", "session_id", "x-session-id", "x-session-affinity")),
    ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, {}, Labels("s", "p")),
    *(({}, {name: "s"}, Labels("s")) for name in ("session_id", "prompt_cache_key", "previous_response_id")),
    ({}, {"metadata": {"user_id": "u"}}, Labels("u")),
    ({}, {"metadata": {"thread_id": "t", "user_id": "u"}}, Labels("t")),
    ({"x-session-id": "h"}, {"session_id": "b", "prompt_cache_key": "k"}, Labels("h")),
    *(({}, {"metadata": {"user_id": odd}, "prompt_cache_key": odd}, Labels()) for odd in (" ", 5, [], "x" * 5000)),
    ({}, {}, Labels()),
]


@pytest.fixture(scope="module")
def labelled(shared_gateway: Any, shared_upstream: Any) -> Any:
    """What an upstream is sent as labels for a request with these headers and fields."""
    server = shared_upstream(lambda request: request.answer(b"{}", 400 if request.body == b"{}" else 200))
    running = shared_gateway({"m": server.backend()})

    def send(headers: dict[str, str], fields: dict[str, Any]) -> Labels:
        body = {"model": "m", "input": "hi", **fields}
        assert httpx.post(f"{running.url}/v1/responses", json=body, headers=headers).status_code == 200
        got = server.requests[-1].headers
        found = (got.get(f"x-agentspec-{name}") for name in ("session", "workflow", "step"))
        return Labels(*(name and unquote(name) for name in found))

    return send


@pytest.mark.parametrize(("headers", "fields", "labels"), NAMES)
def test_labels_are_read_from_the_headers_and_fields_of_agents(
    labelled: Any, headers: dict[str, str], fields: dict[str, Any], labels: Labels
) -> None:
    assert labelled(headers, fields) == labels


def test_a_name_that_is_no_valid_label_is_replaced_by_its_digest(labelled: Any) -> None:
    long, broken = (labelled({}, {"session_id": name}).session for name in ("x" * 300, "a\nb"))
    assert len(long) == len(broken) == 64 and long != broken


LOOPBACK: dict[str, Any] = {}
PUBLIC = {"host": "0.0.0.0"}
NAMED = {"host": "gateway.example", "allowed_hosts": ("API.example.", "*.team.example")}
ANY = {"allowed_hosts": ("*",)}
OK, ELSEWHERE, BAD = 200, 421, 400


@pytest.mark.parametrize(
    ("server", "hosts", "expected"),
    [
        (LOOPBACK, ("localhost", "LOCALHOST:8700", "127.0.0.1:1", "127.9.9.9", "[::1]:8700", "a.localhost"), OK),
        (LOOPBACK, ("evil.example", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io"), ELSEWHERE),
        (LOOPBACK, ("", "a b", "a,b", "a@b", "a/b", "[::1", "::1", "a:b", "a:123456", "é"), BAD),
        (PUBLIC, ("localhost:80", "10.244.0.7:8700", "[2001:db8::7]:8700"), OK),
        (PUBLIC, ("evil.example", "gateway"), ELSEWHERE),
        (NAMED, ("gateway.example", "api.example:443", "a.team.example", "api.example."), OK),
        (NAMED, ("team.example", "evilteam.example", "x.api.example"), ELSEWHERE),
        (ANY, ("evil.example",), OK),
    ],
)
def test_hosts(server: dict[str, Any], hosts: tuple[str, ...], expected: int) -> None:
    app = app_of(**server)
    for host in [*hosts, *hosts]:  # also those that are known already
        assert get(app, ("host", host))[0] == expected, host


def test_with_keys_every_host_is_served_unless_some_are_listed(keys: Any) -> None:
    key = ("authorization", "Bearer key-of-a")
    assert get(app_of(api_keys=keys), ("host", "evil.example"), ("origin", "http://evil.example"), key)[0] == OK
    listed = app_of(api_keys=keys, allowed_hosts=("api.example",))
    assert [get(listed, ("host", host), key)[0] for host in ("api.example", "localhost")] == [OK, OK]
    assert [get(listed, ("host", host), key)[0] for host in ("evil.example", "10.0.0.1")] == [ELSEWHERE] * 2


def test_one_host_is_needed_and_a_refusal_says_what_to_set() -> None:
    app = app_of()
    assert get(app)[0] == get(app, HOST, HOST)[0] == BAD and get(app, version="1.0")[0] == OK
    assert get(app, ("host", "evil.example"), path="/health")[0] == OK, "a probe may send any host"
    assert get(app, ("host", "a b"), path="/health")[0] == BAD
    refusal = get(app, ("host", "x.example"))[1]
    assert "x.example" in refusal and "server.allowed_hosts" in refusal and "server.api_keys" in refusal


@pytest.mark.parametrize(
    ("server", "host", "origins", "expected"),
    [
        (LOOPBACK, "localhost:8700", ("http://localhost:3000", "http://127.0.0.1"), OK),
        (LOOPBACK, "localhost", ("http://evil.example", "null", "", "http://10.0.0.1", "http://["), 403),
        (LOOPBACK, "localhost", ("https://localhost.evil.example",), 403),
        (PUBLIC, "10.244.0.7:8700", ("http://10.244.0.7:8700",), OK),
        (PUBLIC, "10.244.0.7:8700", ("http://6.6.6.6",), 403),
        (NAMED, "gateway.example", ("https://a.team.example",), OK),
        (NAMED, "gateway.example", ("https://evil.example",), 403),
        (ANY, "localhost", ("http://evil.example",), OK),
    ],
)  # fmt: skip
def test_origins(server: dict[str, Any], host: str, origins: tuple[str, ...], expected: int) -> None:
    app = app_of(**server)
    for origin in origins:
        assert get(app, ("host", host), ("origin", origin))[0] == expected, origin
    assert server or get(app, HOST, ("origin", origins[0]), ("origin", origins[0]))[0] == 403
