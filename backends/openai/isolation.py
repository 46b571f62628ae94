"""Keeps the tenants of a gateway apart in an upstream that they share.

vLLM and SGLang hold the prompts of earlier requests in a prefix cache, so that the time of an answer shows what was
sent before. Requests with different salts share nothing there.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.types import Labels

logger = logging.getLogger(__name__)

SALT = "cache_salt"
SGLANG_KEY = "extra_key"
"""SGLang's second salt; it joins the two without a separator."""
_IDS = ("x-request-id", "idempotency-key")
# What vLLM and the disk stores behind it accept; other characters have ended servers.
_HARMLESS = re.compile(r"[\w.:+=-]{1,128}", re.ASCII)


class TenantIsolation:
    """Replaces, in what is sent to an upstream, a tenant's name and the names that the tenant chose.

    Each replacement is HMAC-SHA256 with the server's `secret`, 64 hexadecimal digits: no tenant can guess another's.
    `required`: the gateway has several tenants, so that no request may be sent without a salt.
    """

    def __init__(self, secret: bytes, *, required: bool) -> None:
        self._secret = secret
        self.required = required

    def salt(self, tenant: str, *chosen: str | None) -> str:
        """The salt of a tenant's requests, another one for each combination of salts that a client has chosen."""
        return self._digest("salt", tenant, *chosen)

    def salts(self, kind: str, tenant: str, given: Mapping[str, Any], *, apart: bool) -> dict[str, Any]:
        """The salt fields of a body with the fields `given`: the tenant's, if tenants are kept `apart`; else only what
        replaces a client's salt that has ended servers. Raises `InvalidRequestError` for a salt that is no text.
        """
        names = (SALT, SGLANG_KEY) if kind == "sglang" and apart else (SALT,)
        chosen = [_chosen_salt(given, name) for name in names]
        if not apart and (chosen[0] is None or _HARMLESS.fullmatch(chosen[0])):
            return {}
        salted: dict[str, Any] = {SALT: self.salt(tenant, *chosen)}
        if chosen[1:] not in ([], [None]):
            salted[SGLANG_KEY] = None  # it is part of the salt now
        return salted

    def labels(self, tenant: str, labels: Labels) -> Labels:
        """`labels` with session and workflow names that no other tenant can have."""
        return replace(
            labels,
            session=labels.session and self._digest("session", tenant, labels.session),
            workflow=labels.workflow and self._digest("workflow", tenant, labels.workflow),
        )

    def headers(self, tenant: str, headers: Mapping[str, str]) -> dict[str, str]:
        """`headers` (lower case) with request ids that no other tenant can send, since servers tell requests apart by
        them.
        """
        ids = {name: headers[name] for name in _IDS if name in headers}
        return {**headers, **{name: f"{self._digest('id', tenant, id)[:16]}-{id}" for name, id in ids.items()}}

    def _digest(self, *parts: str | None) -> str:
        message = json.dumps(parts).encode()
        return hmac.digest(self._secret, message, "sha256").hex()


def _chosen_salt(given: Mapping[str, Any], name: str) -> str | None:
    """The salt in a body's field `name`, None without one. Raises `InvalidRequestError` if it is no text."""
    value = given.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidRequestError(f"{name} must be a string that is not empty", param=name)
    return value


def require_salts(kind: str | None, name: str) -> None:
    """Raises `ConfigurationError` if the upstream `name`, a server of this `kind`, takes no salts."""
    if kind is None:
        logger.warning("upstream %s does not answer: until it does, requests to it are refused", name)
    if kind == "other":
        raise ConfigurationError(
            f"upstream {name} is neither vLLM nor SGLang, so it cannot keep the caches of several"
            ' tenants apart: set shared_upstream = true for it if they may share them, or server_kind = "vllm" or'
            ' "sglang" if it is one that hides it'
        )
