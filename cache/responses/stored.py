"""A stored answer, how it is written, and what every store of them does."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache.deletion import Scope, Selection, seconds_of
from agentspec.errors import CacheFormatError, InvalidRequestError

ROW = 512  # bytes that an answer takes besides its content
MOST_UNPACKED = 64 << 20

Refuses = Callable[[str], bool]
"""Whether a text may not be kept."""


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """`total` and `tenant` bound the bytes of all answers and of one tenant's, `seconds` their age; None: no limit."""

    total: int = 64 << 20
    tenant: int | None = None
    seconds: float | None = 30 * 86400.0

    @classmethod
    def within(
        cls, total: int, age: float | None, retention: float | None, disk: int | None, tenant_disk: int | None
    ) -> ResponseLimits:
        """Limits of at most a quarter of the disk's, so that sequences can make room for the rest, and of the lesser
        age. Raises `InvalidRequestError` unless `total` is a number of bytes and `age` one of seconds.
        """
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            message = f"responses_bytes must be a number of bytes, 0 or more, not {total!r}"
            raise InvalidRequestError(message, param="responses_bytes")
        if age is not None:
            age = seconds_of(age, "responses_age")
        ages = [seconds for seconds in (age, retention) if seconds is not None]
        shares = [total] if disk is None else [total, disk // 4]
        return cls(min(shares), None if tenant_disk is None else tenant_disk // 4, min(ages, default=None))

    @property
    def oldest(self) -> float:
        """The time, in seconds since 1970, before which answers are too old."""
        return 0.0 if self.seconds is None else time.time() - self.seconds

    @property
    def largest(self) -> int:
        """The most bytes of one answer: a larger one would push out too many others."""
        return (self.total if self.tenant is None else min(self.total, self.tenant)) // 8


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

    def is_forgotten(self, deletions: Iterable[tuple[int, Scope]], whole: int) -> bool:
        """Whether one of the deletions since its request began takes this answer along, which is about to be stored.

        It does by tenant and session. A search is in what was whole when it ran, before which deletion `whole` was the
        last: what it looked for nobody knows any more, so that all of that goes.
        """
        return any(
            (number > whole or not scope.searched)
            and scope.concerns_tenant(self.tenant)
            and scope.covers(self.session, self.created_at)
            for number, scope in deletions
        )


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


def covers(selection: Selection, tenant: str, session: str | None, created_at: float, content: bytes) -> bool:
    """Whether a deletion takes an answer with it.

    A search is made in the texts of the answer and of its input. Answers have no tokenizer, so that one named by the
    selection excludes none.
    """
    if selection.tenant is not None and tenant != selection.tenant:
        return False
    if not selection.scope.covers(session, created_at):
        return False
    try:
        return not selection.searched or selection.is_in(_texts(unpacked(content, "")))
    except CacheFormatError:
        return True  # it cannot be searched, and is of no use


def admitted(stored: StoredResponse, limits: ResponseLimits, refuses: Refuses | None) -> bytes | None:
    """The content of an answer, `packed`; None where it is too large, or `refuses` a text of it or of its input."""
    body = packed(stored)
    if body is None or ROW + len(body) > limits.largest:
        return None
    return None if refuses is not None and any(map(refuses, _texts(unpacked(body, "")))) else body


def _texts(value: Any) -> list[str]:
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
