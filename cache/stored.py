"""An answer of the Responses API as it is stored, and the bounds of all of them."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import CacheFormatError

MOST_UNPACKED = 64 << 20  # bytes of an answer

_RESPONSES_AGE = 30 * 86400.0  # seconds


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """`total` and `tenant` bound the bytes of all rows and of one tenant's, `seconds` their age; None: no limit."""

    total: int = 64 << 20
    tenant: int | None = None
    seconds: float | None = _RESPONSES_AGE

    @classmethod
    def of_responses(
        cls, total: int, retention: float | None, disk: int | None, tenant_disk: int | None
    ) -> StoreLimits:
        """Limits of at most a quarter of the disk's, so that sequences can make room for the rest, and of 30 days."""
        seconds = _RESPONSES_AGE if retention is None else min(retention, _RESPONSES_AGE)
        tenant = None if tenant_disk is None else tenant_disk // 4
        return cls(total if disk is None else min(total, disk // 4), tenant, seconds)

    @property
    def oldest(self) -> float:
        """The time, in seconds since 1970, before which rows are too old."""
        return 0.0 if self.seconds is None else time.time() - self.seconds

    @property
    def smallest(self) -> int:
        return self.total if self.tenant is None else min(self.total, self.tenant)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer. `previous` is the id of the answer that it continues; `items` are the request's own.

    An answer that an upstream keeps has the name of its `backend` and no content: it tells whose it is. `begun` is when
    its request began, in seconds since 1970, for `put` alone; None: when it was created.
    """

    id: str
    tenant: str
    created_at: float
    session: str | None = None
    previous: str | None = None
    backend: str | None = None
    response: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[Mapping[str, Any]] = ()
    begun: float | None = None

    @property
    def since(self) -> float:
        """From when on a deletion concerns it though it was not stored yet."""
        return self.created_at if self.begun is None else min(self.begun, self.created_at)


def packed(stored: StoredResponse) -> bytes | None:
    """The content of an answer, compressed; empty for one that an upstream keeps, None for one that is too large to be
    unpacked again.
    """
    if stored.backend is not None:
        return b""
    content = {"response": stored.response, "items": list(stored.items)}
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return zlib.compress(data, 3) if len(data) <= MOST_UNPACKED else None


def unpacked(body: bytes, id: str) -> dict[str, Any]:
    """What `packed` wrote. Raises `CacheFormatError` for anything else."""
    if not body:
        return {"response": {}, "items": []}
    try:
        unpacker = zlib.decompressobj()
        content = json.loads(unpacker.decompress(body, MOST_UNPACKED))
        return {"response": dict(content["response"]), "items": list(content["items"])}
    except (zlib.error, ValueError, LookupError, TypeError):
        raise CacheFormatError(f"the stored response {id} is damaged") from None


def texts_of(value: Any) -> list[str]:
    """All strings of a JSON value, names included, and the neighbouring ones of an array joined: a text may be in
    several parts. Arguments of calls are JSON in a string, whose strings are among them.
    """
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found.append(one)
            if one.lstrip()[:1] in ("{", "["):
                with suppress(ValueError, RecursionError):
                    waiting.append(json.loads(one))
        elif isinstance(one, dict):
            waiting.extend((*one, *one.values()))
        elif isinstance(one, list):
            waiting.extend(one)
            found.append("".join(str(part.get("text", "")) for part in one if isinstance(part, dict)))
    return found
