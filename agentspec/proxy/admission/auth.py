"""Identifies a request's caller by its headers: the API key and its tenant, the labels and the switches."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers

from agentspec.backends.openai.fields import switched_off
from agentspec.errors import AuthenticationError
from agentspec.protocol.headers import ANY, StepPolicy, read_labels, read_policy, read_switch, refuse_misspelt
from agentspec.proxy.admission.identity import identified
from agentspec.settings.server import ApiKey, read_keys
from agentspec.types import DEFAULT_TENANT, GenerateRequest, Labels

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Tenant, labels and switches of one request. The tenant comes from the API key alone. `cached`: the operator lets
    the gateway store sequences.
    """

    tenant: str
    labels: Labels
    speculation: bool
    store: bool
    policy: StepPolicy = ANY
    prefill: bool = True
    cached: bool = True

    @property
    def off(self) -> tuple[str, ...]:
        """What is switched off, for servers that draft and store themselves."""
        return switched_off(store=self.store and self.cached, speculation=self.speculation)

    def sign(self, request: GenerateRequest) -> GenerateRequest:
        """`request` with this caller's tenant, labels and switches, and with the policy where the body says nothing."""
        asked, target = self.policy, request.latency_target_ms_per_token
        return replace(
            request,
            tenant=self.tenant,
            labels=self.labels,
            speculation=self.speculation,
            store=self.store,
            prefill_next=self.prefill,
            priority=request.priority or asked.priority or 0,
            latency_target_ms_per_token=asked.latency_ms_per_token if target is None else target,
            deadline_s=asked.deadline_s,
            strategy=asked.strategy,
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose key a request has. An operator reads the metrics and uses no models; a tenant the reverse.

    Without configured keys everybody is the default tenant and operator in one. `owner` are the tenant and what the key
    is called among that tenant's.
    """

    tenant: str
    uses_models: bool = True
    reads_metrics: bool = False
    key: str = ""

    @property
    def owner(self) -> tuple[str, str]:
        return self.tenant, self.key


EVERYBODY = Identity(DEFAULT_TENANT, reads_metrics=True)


class Authenticator:
    """Checks API keys. Keeps only their SHA-256, and compares a client's key with every one in constant time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Read the keys. Raises `ConfigurationError` for one that cannot be read."""
        self._known = [(_digest(key.get_secret_value().encode()), _identity(entry)) for key, entry in read_keys(keys)]

    def __bool__(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Headers) -> Identity:
        """Whose key the request has. Raises `AuthenticationError` for a missing or wrong key."""
        identity = self.find(headers)
        if identity is None:
            raise AuthenticationError("missing or wrong API key: send it as Authorization: Bearer KEY, or as x-api-key")
        return identity

    def find(self, headers: Headers) -> Identity | None:
        """Whose key the request has, None for a missing or wrong key.

        The work is the same for every wrong key: a hash, and a comparison with each known one.
        """
        if not self._known:
            return EVERYBODY
        digest = _digest((key := _given_key(headers)).encode("latin-1", "replace"))
        matches = [identity for known, identity in self._known if hmac.compare_digest(known, digest)]
        return matches[0] if key and matches else None


def read_caller(headers: Headers, tenant: str, fields: Mapping[str, Any] = NO_FIELDS) -> Caller:
    """The caller that the headers describe, or else the `fields` of the body.

    Raises `InvalidRequestError` that names the wrong header of ours.
    """
    refuse_misspelt(headers.keys())
    labels = identified(read_labels(headers), headers, fields)
    speculation, store = read_switch(headers, "speculation"), read_switch(headers, "store")
    prefill, policy = read_switch(headers, "prefill"), read_policy(headers)
    if fields.get("priority") is not None:  # 0 too is a priority, and that of the body counts
        policy = replace(policy, priority=None)
    return Caller(tenant, labels, speculation=speculation, store=store, policy=policy, prefill=prefill)


def request_id(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and of harmless characters, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{os.urandom(16).hex()}"


def _identity(key: ApiKey) -> Identity:
    operator = key.role == "operator"
    return Identity(key.tenant, uses_models=not operator, reads_metrics=operator, key=key.label)


def _given_key(headers: Headers) -> str:
    """The key in `Authorization`, or else in `x-api-key`, where Anthropic's clients send it; empty without one."""
    given = headers.getlist("authorization")
    if given:
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return key.strip() if scheme.lower() == "bearer" else ""
    given = headers.getlist("x-api-key")
    return given[0].strip() if len(given) == 1 else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
