"""Keeps the tenants of a gateway apart in an upstream that they share.

vLLM and SGLang keep the prompts of earlier requests in a prefix cache, so that how long an answer takes tells what was
sent before. Requests with different salts share nothing there.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.types import Labels

SALT = "cache_salt"
SGLANG_KEY = "extra_key"
"""SGLang's second salt; it joins the two without a separator."""
_IDS = ("x-request-id", "idempotency-key")
# What vLLM takes, and stores on disk behind it can hold.
_HARMLESS = re.compile(r"[\w.:+=-]{1,128}", re.ASCII)


class TenantIsolation:
    """Makes what an upstream is told in place of a tenant's name and of names that the tenant chose.

    All of it is HMAC-SHA256 with the server's `secret`, 64 hexadecimal digits: nobody can guess another tenant's.
    `required`: the gateway has several tenants, so that no request may go out without a salt.
    """

    def __init__(self, secret: bytes, *, required: bool) -> None:
        self._secret = secret
        self._salts: dict[tuple[str, int], str] = {}  # of the tenants, whose number is the configuration's
        self.required = required

    def salt(self, tenant: str, *chosen: str | None) -> str:
        """The salt of a tenant's requests, another one for each combination of salts that a client has chosen."""
        if any(chosen):
            return self._digest("salt", tenant, *chosen)
        known = self._salts.get((tenant, len(chosen)))
        if known is None:
            known = self._salts[tenant, len(chosen)] = self._digest("salt", tenant, *chosen)
        return known

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


def chosen_salt(given: Mapping[str, Any], name: str) -> str | None:
    """The salt in a body's field `name`, None if there is none. Raises `InvalidRequestError` if it is no text."""
    value = given.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidRequestError(f"{name} must be a string that is not empty", param=name)
    return value


def is_harmless(salt: str) -> bool:
    """Whether a client's own salt can pass as it is: other characters have ended servers."""
    return _HARMLESS.fullmatch(salt) is not None
