from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from agentspec.errors import AuthenticationError, ConfigurationError, InvalidRequestError
from agentspec.proxy.auth import Keys, read_caller, request_id
from agentspec.settings.api_keys import ApiKey
from agentspec.types import Labels


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    for tenant in ("a", "b"):
        (tmp_path / tenant).write_text(f"key-of-{tenant}\n")
    return Keys([ApiKey(tenant=tenant, key_file=tmp_path / tenant) for tenant in ("a", "b")])


def sent(*values: str) -> Headers:
    return Headers(raw=[(b"authorization", value.encode("latin-1")) for value in values])


def test_the_tenant_comes_from_the_key(keys: Keys) -> None:
    assert keys.tenant(sent("Bearer key-of-a")) == "a" and keys.tenant(sent("bearer key-of-b ")) == "b"


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
def test_everything_else_is_refused(keys: Keys, values: tuple[str, ...]) -> None:
    with pytest.raises(AuthenticationError):
        keys.tenant(sent(*values))


def test_only_digests_are_kept(keys: Keys) -> None:
    assert "key-of-a" not in repr(vars(keys))


def test_no_keys_leave_the_door_open() -> None:
    assert not Keys([]) and Keys([]).tenant(sent("Bearer whatever")) == "default"


def test_an_empty_key_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with pytest.raises(ConfigurationError):
        Keys([ApiKey(tenant="a", key_file=tmp_path / "key")])


def test_a_key_of_two_tenants_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("same")
    with pytest.raises(ConfigurationError, match="same API key"):
        Keys([ApiKey(tenant=tenant, key_file=tmp_path / "key") for tenant in "ab"])


def test_labels_and_switches() -> None:
    headers = Headers(
        {
            "X-AgentSpec-Session": "s%C3%A9ssion%25",
            "x-agentspec-workflow": "",
            "x-agentspec-step": "write code",
            "x-agentspec-speculation": "OFF",
        }
    )
    caller = read_caller(headers, "t")
    assert caller.labels == Labels(session="séssion%", step="write code")
    assert (caller.tenant, caller.speculation, caller.store) == ("t", False, True)
    assert not read_caller(Headers({"x-agentspec-store": "off"}), "t").store


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", "x" * 257),
        ("workflow", "a%00b"),
        ("step", "%ff"),
        ("step", "a%0Ab"),
        ("speculation", "no"),
        ("store", "0"),
    ],
)
def test_bad_headers_are_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_caller(Headers({f"x-agentspec-{name}": value}), "t")
    assert caught.value.param == f"x-agentspec-{name}"


def test_request_ids_are_echoed_only_if_harmless() -> None:
    assert request_id(Headers({"x-request-id": "abc-1.2:3_4"})) == "abc-1.2:3_4"
    for bad in ("", "a b", "x" * 129, "é", '"}'):
        made = request_id(Headers({"x-request-id": bad}))
        assert made != bad and made.startswith("req-")
