"""API keys, the names that agents give themselves, and the Host that a request is meant for."""

from __future__ import annotations

import hmac
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from agentspec.errors import AgentSpecError, AuthenticationError, ConfigurationError, HeadersTooLargeError
from agentspec.proxy.auth import (
    Authenticator,
    HostCheck,
    Identity,
    is_loopback,
    read_caller,
    request_id,
)
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.types import GenerateRequest, Labels


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    for tenant in ("a", "b"):
        (tmp_path / tenant).write_text(f"key-of-{tenant}\n")
    return Authenticator([ApiKey(tenant=tenant, key_file=tmp_path / tenant) for tenant in ("a", "b")])


def sent(*values: str) -> Headers:
    return Headers(raw=[(b"authorization", value.encode("latin-1")) for value in values])


def test_the_tenant_comes_from_the_key(authenticator: Authenticator, tmp_path: Path) -> None:
    assert authenticator.identify(sent("Bearer key-of-a")) == Identity("a", key=str(tmp_path / "a"))
    assert authenticator.identify(sent("bearer key-of-b ")) == Identity("b", key=str(tmp_path / "b"))


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("",),
        ("Bearer",),
        ("Bearer ",),
        ("Bearer key-of-",),
        ("Bearer key-of-aa",),
        ("key-of-a",),
        ("Basic key-of-a",),
        ("Bearer \xff",),
        ("Bearer key-of-a", "Bearer key-of-b"),
        ("Bearer key-of-a", "Bearer key-of-a"),
    ],
)
def test_everything_else_is_refused(authenticator: Authenticator, values: tuple[str, ...]) -> None:
    with pytest.raises(AuthenticationError):
        authenticator.identify(sent(*values))


def test_only_digests_are_kept(authenticator: Authenticator) -> None:
    assert "key-of-a" not in repr(vars(authenticator))


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert not Authenticator([]) and Authenticator([]).identify(sent("Bearer whatever")).tenant == "default"


def test_an_operator_reads_metrics_and_uses_no_models(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("watch")
    identity = Authenticator([ApiKey(role="operator", key_file=tmp_path / "key")]).identify(sent("Bearer watch"))
    assert identity.reads_metrics and not identity.uses_models
    (tmp_path / "tenant").write_text("watch")
    with pytest.raises(ConfigurationError, match="operator"):
        Authenticator([ApiKey(role="operator", key_file=tmp_path / "key"), ApiKey(key_file=tmp_path / "tenant")])


class CountingDigest:
    """Counts the comparisons that one check makes."""

    def __init__(self) -> None:
        self.compared: list[tuple[bytes, bytes]] = []

    def compare_digest(self, one: bytes, other: bytes) -> bool:
        self.compared.append((one, other))
        return hmac.compare_digest(one, other)


def test_i1_every_wrong_key_is_hashed_and_compared_with_every_known_one(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CountingDigest()
    monkeypatch.setattr("agentspec.proxy.auth.hmac", counting)
    for key in ("", "k", "key-of-", "key-of-a", "key-of-b", "key-of-bb", "x" * 8, "\xff"):
        counting.compared.clear()
        with suppress(AuthenticationError):
            authenticator.identify(sent(f"Bearer {key}"))
        assert len(counting.compared) == 2 and {len(one) for pair in counting.compared for one in pair} == {32}


def test_an_empty_key_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with pytest.raises(ConfigurationError):
        Authenticator([ApiKey(tenant="a", key_file=tmp_path / "key")])


def test_a_key_of_two_tenants_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("same")
    with pytest.raises(ConfigurationError, match="same API key"):
        Authenticator([ApiKey(tenant=tenant, key_file=tmp_path / "key") for tenant in "ab"])


def test_the_headers_describe_the_caller() -> None:
    caller = read_caller({"x-agentspec-session": "s", "x-agentspec-speculation": "OFF"}, "t")
    request = caller.sign(GenerateRequest("m", text="x"))
    assert request == GenerateRequest("m", text="x", tenant="t", labels=Labels(session="s"), speculation=False)


def test_request_ids_are_echoed_only_if_harmless() -> None:
    assert request_id(Headers({"x-request-id": "abc-1.2:3_4"})) == "abc-1.2:3_4"
    for bad in ("", "a b", "x" * 129, "é", '"}'):
        made = request_id(Headers({"x-request-id": bad}))
        assert made != bad and made.startswith("req-")


def labels_of(headers: dict[str, str], fields: dict[str, Any]) -> Labels:
    return read_caller(headers, "t").asking(fields).labels


CLAUDE = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})


@pytest.mark.parametrize(
    ("headers", "fields", "labels"),
    [
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, Labels("s", None, "a")),
        ({"session-id": "s"}, {}, Labels("s")),
        ({"session_id": "s"}, {}, Labels("s")),
        ({"x-session-id": "s"}, {}, Labels("s")),
        ({"x-session-affinity": "s"}, {}, Labels("s")),
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, {}, Labels("s", "p")),
        ({}, {"session_id": "s"}, Labels("s")),
        ({}, {"prompt_cache_key": "s"}, Labels("s")),
        ({}, {"previous_response_id": "resp_1"}, Labels("resp_1")),
        ({}, {"metadata": {"user_id": "u"}}, Labels("u")),
        ({}, {"metadata": {"user_id": CLAUDE}}, Labels("s-1")),
        ({}, {"metadata": {"user_id": "user_1_account__session_s-1"}}, Labels("s-1")),
        ({}, {"metadata": {"user_id": "{not json"}}, Labels("{not json")),
        ({}, {"metadata": {"thread_id": "t", "user_id": "u"}}, Labels("t")),
        ({"x-session-id": "h"}, {"session_id": "b", "prompt_cache_key": "k"}, Labels("h")),
        ({}, {}, Labels()),
    ],
)
def test_what_agents_send(headers: dict[str, str], fields: dict[str, Any], labels: Labels) -> None:
    assert labels_of(headers, fields) == labels


def test_our_own_labels_count_first() -> None:
    own = {"x-agentspec-session": "mine", "x-agentspec-workflow": "flow"}
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert labels_of(own | headers, {}) == Labels("mine", "flow", "a")


@pytest.mark.parametrize("odd", ["", " ", 5, None, [], {"a": 1}, "x" * 5000])
def test_what_is_no_name_is_none(odd: Any) -> None:
    fields = {"session_id": odd, "metadata": {"user_id": odd}, "prompt_cache_key": odd}
    assert labels_of({}, fields) == labels_of({}, {"metadata": odd}) == Labels()


def test_a_name_that_no_label_may_be_is_replaced_by_its_digest() -> None:
    long, broken = (labels_of({}, {"session_id": name}).session for name in ("x" * 300, "a\nb"))
    assert long is not None and broken is not None and len(long) == len(broken) == 64 and long != broken


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
