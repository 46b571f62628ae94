"""Identifies a request's caller by its headers: the API key and its tenant, the labels and the switches."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from agentspec.errors import AuthenticationError
from agentspec.protocol.headers import read_labels, read_switch
from agentspec.settings.api_keys import ApiKey, read_keys
from agentspec.types import DEFAULT_TENANT, GenerateRequest, Labels

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Tenant, labels and switches of one request. The tenant comes from the API key alone."""

    tenant: str
    labels: Labels
    speculation: bool
    store: bool

    def sign(self, request: GenerateRequest) -> GenerateRequest:
        """`request` with this caller's tenant, labels and switches."""
        return replace(request, tenant=self.tenant, labels=self.labels, speculation=self.speculation, store=self.store)


class Authenticator:
    """Checks API keys. Keeps only their SHA-256, and compares a client's key with every one in constant time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._tenants = [(_digest(key.get_secret_value().encode()), tenant) for key, tenant in read_keys(keys)]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Headers) -> str:
        """The tenant of the request's key; without configured keys the default tenant.

        Raises `AuthenticationError` for a missing or wrong key.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = _digest(key.strip().encode("latin-1", "replace"))
        matches = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not matches:
            raise AuthenticationError("missing or wrong API key: send it as Authorization: Bearer KEY")
        return matches[0]


def read_caller(headers: Headers, tenant: str) -> Caller:
    """The caller that the headers describe. Raises `InvalidRequestError` that names the wrong header."""
    labels = read_labels(headers)
    return Caller(tenant, labels, speculation=read_switch(headers, "speculation"), store=read_switch(headers, "store"))


def request_id(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and of harmless characters, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
