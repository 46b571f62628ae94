"""Where a sequence of the shared past comes from."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """The session it belongs to, when it was finished, and the token it ends with (-1: it is empty)."""

    session: str | None
    created_at: float  # seconds since 1970
    end: int
