from __future__ import annotations

import hmac
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from agentspec.errors import AuthenticationError, ConfigurationError
from agentspec.proxy.admission.auth import Authenticator, Identity, read_caller, request_id
from agentspec.settings.server import ApiKey
from agentspec.types import GenerateRequest, Labels


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    for tenant in ("a", "b"):
        (tmp_path / tenant).write_text(f"key-of-{tenant}\n")
    return Authenticator(
        [ApiKey(tenant=tenant, name=f"{tenant}'s", key_file=tmp_path / tenant) for tenant in ("a", "b")]
    )


def sent(*values: str) -> Headers:
    return Headers(raw=[(b"authorization", value.encode("latin-1")) for value in values])


def test_the_tenant_comes_from_the_key(authenticator: Authenticator) -> None:
    assert authenticator.identify(sent("Bearer key-of-a")) == Identity("a", key="a's")
    assert authenticator.identify(sent("bearer key-of-b ")) == Identity("b", key="b's")


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
    monkeypatch.setattr("agentspec.proxy.admission.auth.hmac", counting)
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
    caller = read_caller(Headers({"X-AgentSpec-Session": "s", "x-agentspec-speculation": "OFF"}), "t")
    request = caller.sign(GenerateRequest("m", text="x"))
    assert request == GenerateRequest("m", text="x", tenant="t", labels=Labels(session="s"), speculation=False)


def test_request_ids_are_echoed_only_if_harmless() -> None:
    assert request_id(Headers({"x-request-id": "abc-1.2:3_4"})) == "abc-1.2:3_4"
    for bad in ("", "a b", "x" * 129, "é", '"}'):
        made = request_id(Headers({"x-request-id": bad}))
        assert made != bad and made.startswith("req-")
