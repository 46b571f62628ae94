"""Whom a request is meant for: names, addresses and pages that a gateway answers, and those that it does not."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import AgentSpecError, HeadersTooLargeError
from agentspec.proxy.hosts import HostCheck, is_loopback
from agentspec.settings.server import ApiKey, ServerSettings

KEYS = (ApiKey(key_env="KEY"),)
OK = 200


def status(check: HostCheck, *headers: tuple[str, str], version: str = "1.1", **options: bool) -> int:
    scope: dict[str, Any] = {
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "http_version": version,
        "raw_path": b"/v1/models",
        "query_string": b"",
    }
    try:
        check.check(scope, **options)
    except AgentSpecError as error:
        return error.status
    return OK


LOOPBACK = HostCheck(ServerSettings())
PUBLIC = HostCheck(ServerSettings(host="0.0.0.0"))
NAMED = HostCheck(ServerSettings(host="gateway.example", allowed_hosts=("API.example.", "*.team.example")))
KEYED = HostCheck(ServerSettings(api_keys=KEYS))
KEYED_NAMED = HostCheck(ServerSettings(api_keys=KEYS, allowed_hosts=("api.example",)))
ANY = HostCheck(ServerSettings(allowed_hosts=("*",)))


@pytest.mark.parametrize(
    ("check", "host", "expected"),
    [
        *[(LOOPBACK, host, OK) for host in ("localhost", "LOCALHOST:8700", "127.0.0.1:1", "127.9.9.9", "[::1]:8700")],
        *[(LOOPBACK, host, 421) for host in ("evil.example", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io")],
        *[(PUBLIC, host, OK) for host in ("localhost:80", "10.244.0.7:8700", "[2001:db8::7]:8700")],
        *[(PUBLIC, host, 421) for host in ("evil.example", "gateway")],
        *[(NAMED, host, OK) for host in ("gateway.example", "api.example:443", "a.team.example", "api.example.")],
        *[(NAMED, host, 421) for host in ("team.example", "evilteam.example", "x.api.example")],
        *[(KEYED, host, OK) for host in ("evil.example", "10.0.0.1")],
        *[(KEYED_NAMED, host, OK) for host in ("api.example", "localhost")],
        *[(KEYED_NAMED, host, 421) for host in ("evil.example", "10.0.0.1")],
        (ANY, "evil.example", OK),
        *[(KEYED, host, 400) for host in ("", "a b", "a,b", "a@b", "a/b", "[::1", "::1", "a:b", "a:123456", "é")],
    ],
)
def test_hosts(check: HostCheck, host: str, expected: int) -> None:
    assert status(check, ("host", host)) == expected
    assert status(check, ("host", host)) == expected  # also when it is known already


@pytest.mark.parametrize("check", [LOOPBACK, KEYED, ANY])
def test_one_host_is_needed(check: HostCheck) -> None:
    assert status(check) == 400
    assert status(check, ("host", "localhost"), ("host", "localhost")) == 400
    assert status(check, version="1.0") == OK
    assert status(check, ("host", "localhost"), version="3.1") == 400


def test_a_probe_may_send_any_host() -> None:
    assert status(LOOPBACK, ("host", "evil.example"), any_host=True) == OK
    assert status(LOOPBACK, ("host", "evil.example")) == 421
    assert status(LOOPBACK, ("host", "a b"), any_host=True) == 400


@pytest.mark.parametrize(
    ("check", "host", "origin", "expected"),
    [
        *[(LOOPBACK, "localhost:8700", origin, OK) for origin in ("http://localhost:3000", "http://127.0.0.1")],
        *[
            (LOOPBACK, "localhost:8700", origin, 403)
            for origin in (
                "http://evil.example",
                "null",
                "",
                "http://10.0.0.1",
                "http://[",
                "https://localhost.evil.ex",
            )
        ],
        (PUBLIC, "10.244.0.7:8700", "http://10.244.0.7:8700", OK),
        (PUBLIC, "10.244.0.7:8700", "http://6.6.6.6", 403),
        (NAMED, "gateway.example", "https://a.team.example", OK),
        (NAMED, "gateway.example", "https://evil.example", 403),
        (KEYED, "localhost", "http://evil.example", OK),  # the page does not have the key
        (ANY, "localhost", "http://evil.example", OK),
    ],
)
def test_origins(check: HostCheck, host: str, origin: str, expected: int) -> None:
    assert status(check, ("host", host), ("origin", origin)) == expected


def test_two_origins_are_refused() -> None:
    assert (
        status(LOOPBACK, ("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://localhost")) == 403
    )


def test_the_error_says_what_to_set() -> None:
    scope = {"headers": [(b"host", b"x.example")], "http_version": "1.1", "query_string": b""}
    with pytest.raises(AgentSpecError, match=r"x\.example.*server\.allowed_hosts.*server\.api_keys"):
        LOOPBACK.check(scope)


def test_heads_are_bounded() -> None:
    check = HostCheck(ServerSettings())
    assert status(check, ("host", "localhost"), ("x", "y" * 32_000)) == OK
    assert status(check, ("host", "localhost"), ("x", "y" * 32_768)) == HeadersTooLargeError.status
    assert status(check, ("host", "localhost"), *[("x", "")] * 128) == HeadersTooLargeError.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("a.localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
