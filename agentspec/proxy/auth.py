"""Who is asking: API keys, tenants and the `x-agentspec-*` headers."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers

from agentspec.errors import AuthenticationError, InvalidRequestError
from agentspec.settings.api_keys import ApiKey, read_keys
from agentspec.types import DEFAULT_TENANT, Labels

MAX_LABEL = 256
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Tenant, labels and switches of one request. The tenant comes from the key alone."""

    tenant: str
    labels: Labels
    speculation: bool
    store: bool

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of a `GenerateRequest` that the caller decides."""
        names = ("tenant", "labels", "speculation", "store")
        return {name: getattr(self, name) for name in names}


class Keys:
    """The API keys. Only their SHA-256 is kept; every comparison looks at every key, in constant time each."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._tenants = [(_digest(key.get_secret_value().encode()), tenant) for key, tenant in read_keys(keys)]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Headers) -> str:
        """Whose request this is. Raises `AuthenticationError` unless there are no keys at all."""
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
    """The caller that the headers describe. Raises `InvalidRequestError` naming the header that is wrong."""
    labels = Labels(
        session=_label(headers, "session"), workflow=_label(headers, "workflow"), step=_label(headers, "step")
    )
    return Caller(tenant, labels, speculation=_switch(headers, "speculation"), store=_switch(headers, "store"))


def request_id(headers: Headers) -> str:
    """The client's own id where it is harmless, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _label(headers: Headers, name: str) -> str | None:
    """A label, percent-decoded; empty counts as none."""
    header = f"x-agentspec-{name}"
    try:
        value = unquote(headers.get(header, ""), errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{header} is not percent-encoded UTF-8", param=header) from None
    if len(value) > MAX_LABEL or not value.isprintable():
        raise InvalidRequestError(f"{header} must be at most {MAX_LABEL} printable characters", param=header)
    return value or None


def _switch(headers: Headers, name: str) -> bool:
    """Everything is on unless the header says `off`."""
    header = f"x-agentspec-{name}"
    value = headers.get(header, "on").strip().lower()
    if value not in ("on", "off"):
        raise InvalidRequestError(f"{header} must be 'on' or 'off'", param=header)
    return value == "on"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
