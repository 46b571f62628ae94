"""A stored turn, and what every store of them does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentspec.cache.deletion import Selection

ROW = 256  # bytes that a turn takes besides its body
LARGEST = 64 << 10  # bytes of a body
MOST = 4000  # turns of an agent; then the older half goes


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """What one turn of an agent taught, as text; `created_at` is in seconds since 1970."""

    id: str
    tenant: str
    agent: str
    session: str
    created_at: float
    body: str

    @property
    def size(self) -> int:
        """Bytes, before compression."""
        return ROW + len(self.body.encode("utf-8", "replace"))


class ToolTurnStore(Protocol):
    """Stored turns. Thread-safe. Methods that read or change a database raise `CacheError` if that cannot be used."""

    @property
    def generation(self) -> int:
        """A number that changes when this process deletes turns."""
        ...

    def put(self, turn: StoredTurn) -> bool:
        """Keep a turn; returns at once, and what is kept becomes durable soon after. False if it is refused."""
        ...

    def ids(self, tenant: str, agent: str) -> list[str]:
        """The ids of all turns of an agent, oldest first."""
        ...

    def read(self, tenant: str, agent: str, ids: Sequence[str]) -> list[StoredTurn]:
        """Those of the agent's turns that have these ids, oldest first. Damaged ones are logged and left out."""
        ...

    def forget(self, selection: Selection) -> int:
        """Delete the turns that a selection covers; returns how many."""
        ...

    def maintain(self) -> None:
        """Called periodically: write what waits, delete what is too old, and finish erasing what was deleted."""
        ...

    def flush(self) -> None:
        """Write what waits."""
        ...

    def close(self) -> None:
        """Write what waits. Nothing is kept or found afterwards."""
        ...

    def leave_behind(self) -> None:
        """Called in a forked process, which keeps nothing."""
        ...


def new_turn(tenant: str, agent: str, session: str, body: str) -> StoredTurn:
    """A turn that was taught now."""
    return StoredTurn(secrets.token_hex(12), tenant, agent, session, time.time(), body)


def is_covered(selection: Selection, turn: StoredTurn) -> bool:
    """Whether a deletion takes a turn with it."""
    if selection.tenant is not None and turn.tenant != selection.tenant:
        return False
    return selection.scope.covers(turn.session, turn.created_at) and selection.is_in([turn.body])
