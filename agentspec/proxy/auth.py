"""Checks of a request's head: its API key, which decides the tenant, and the Host and Origin that it names.

A web page can make its own name point at this machine (DNS rebinding); its requests then carry that name in Host.
Without API keys, which a page does not have, only names that are known to be this server's are served.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from agentspec.errors import (
    AuthenticationError,
    HeadersTooLargeError,
    HostNotAllowedError,
    InvalidRequestError,
    OriginNotAllowedError,
)
from agentspec.settings.server import ApiKey, ServerSettings, read_keys
from agentspec.types import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a request's key. An operator reads the metrics and uses no models; a tenant the reverse.

    Without configured keys every client is the default tenant and operator in one. `key` is the key's name among that
    tenant's.
    """

    tenant: str
    uses_models: bool = True
    reads_metrics: bool = False
    key: str = ""


ANY_CLIENT = Identity(DEFAULT_TENANT, reads_metrics=True)


class Authenticator:
    """Checks API keys. Keeps only their SHA-256, and compares a client's key with every one in constant time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Read the keys. Raises `ConfigurationError` for one that cannot be read."""
        self._known = [(_digest(key.get_secret_value().encode()), _identity(entry)) for key, entry in read_keys(keys)]

    def __bool__(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Headers) -> Identity:
        """The identity of the request's key. Raises `AuthenticationError` for a missing or wrong key."""
        identity = self.find(headers)
        if identity is None:
            raise AuthenticationError("missing or wrong API key: send it as Authorization: Bearer KEY, or as x-api-key")
        return identity

    def find(self, headers: Headers) -> Identity | None:
        """The identity of the request's key, None for a missing or wrong key.

        The work is the same for every wrong key: a hash, and a comparison with each known one.
        """
        if not self._known:
            return ANY_CLIENT
        digest = _digest((key := _given_key(headers)).encode("latin-1", "replace"))
        matches = [identity for known, identity in self._known if hmac.compare_digest(known, digest)]
        return matches[0] if key and matches else None


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


MAX_HEADERS = 128
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without brackets, means this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


class HostCheck:
    """Decides by the head of a request whether it may be answered.

    With API keys and without `allowed_hosts` every Host is; else loopback names and addresses, `host`, and
    `allowed_hosts`. A server that is not on loopback also answers to every IP address: a page cannot rebind an address.
    """

    def __init__(self, server: ServerSettings) -> None:
        self._any = "*" in server.allowed_hosts or bool(server.api_keys and not server.allowed_hosts)
        self._checks_origin = not (self._any or server.api_keys)
        self._public = not is_loopback(server.host)
        names = (name.lower().rstrip(".") for name in (server.host, *server.allowed_hosts))
        self._names = frozenset(name.strip("[]") for name in names)
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))

    def check(self, scope: Scope, *, any_host: bool = False) -> None:
        """Raise `InvalidRequestError` for a Host header that is missing, doubled or not a host, and for many headers.

        `HostNotAllowedError` and `OriginNotAllowedError` say that the request names another server, or comes
        from another server's page; not with `any_host`.
        """
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS:
            raise HeadersTooLargeError(f"a request may have at most {MAX_HEADERS} headers")
        hosts, origins = ([value for name, value in headers if name == one] for one in (b"host", b"origin"))
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            raise InvalidRequestError(f"the request has {len(hosts)} Host headers; send one")
        for host in hosts:
            self._check_host(host, any_host)
        if origins and self._checks_origin and not any_host:
            self._check_origins(origins, hosts)

    def _check_host(self, raw: bytes, any_host: bool) -> None:
        matched = _HOST.fullmatch(raw)
        if matched is None:
            raise InvalidRequestError("the Host header is not a host name or address with an optional port")
        if any_host:
            return
        name = matched[1].decode().lower().strip("[]").rstrip(".")
        if not (self._any or self._knows(name) or (self._public and _address(name) is not None)):
            raise HostNotAllowedError(
                f"this server does not answer for the host {name[:100]!r}: without API keys a web page could use it"
                " under any name. Add the name to server.allowed_hosts, or set server.api_keys"
            )

    def _check_origins(self, origins: list[bytes], hosts: list[bytes]) -> None:
        try:
            name = urlsplit(origins[0].decode("ascii")).hostname or ""
        except ValueError:
            name = ""
        matched = _HOST.fullmatch(hosts[0]) if hosts else None
        own = matched is not None and name == matched[1].decode().lower().strip("[]").rstrip(".")
        if len(origins) > 1 or not name or not (own or self._knows(name.rstrip("."))):
            raise OriginNotAllowedError(
                "without API keys, requests of another site's web page are refused (Origin header):"
                " add the page's host to server.allowed_hosts, or set server.api_keys"
            )

    def _knows(self, name: str) -> bool:
        return name in self._names or is_loopback(name) or name.endswith(self._suffixes or ("\n",))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
