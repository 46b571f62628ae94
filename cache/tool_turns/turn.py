"""A stored turn."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

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


def new_turn(tenant: str, agent: str, session: str, body: str) -> StoredTurn:
    """A turn that was taught now."""
    return StoredTurn(secrets.token_hex(12), tenant, agent, session, time.time(), body)


def is_covered(selection: Selection, turn: StoredTurn) -> bool:
    """Whether a deletion takes a turn with it."""
    if selection.tenant is not None and turn.tenant != selection.tenant:
        return False
    return selection.scope.covers(turn.session, turn.created_at) and selection.is_in([turn.body])
