"""Searches for all requests of a round, in the time that the round has."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from agentspec.backends.engine_plugin.round_stats import RoundStats
from agentspec.cache.index import DraftJob, propose_batch
from agentspec.types import Draft


class SearchOrder:
    """Goes round: a round begins behind the last row that the round before has reached in its time."""

    def __init__(self) -> None:
        self._first = 0

    def rows(self, count: int) -> list[int]:
        """The rows 0 to `count` - 1 of this round, the first to be searched for first."""
        first = self._first % count if count else 0
        return [*range(first, count), *range(first)]

    def reached(self, rows: Sequence[int], found: Sequence[bool]) -> None:
        """Note whether anything was `found` for each of the `rows`, in the order of the search."""
        last = max((place for place, something in enumerate(found) if something), default=0)
        if last + 1 < len(rows):  # else all were reached
            self._first = rows[last + 1]


class RoundSearch:
    """Searches for the rows of each round with one deadline for all of them, and counts the searches in `stats`."""

    def __init__(self, stats: RoundStats) -> None:
        self._order = SearchOrder()
        self._stats = stats

    def search(self, jobs: Sequence[DraftJob | None], patience: float) -> list[Draft | None]:
        """What follows each row's text; None for a row without a job, and for one that had no time."""
        rows = [row for row in self._order.rows(len(jobs)) if jobs[row] is not None]
        found: list[Draft | None] = [None] * len(jobs)
        if not rows:
            return found
        until = perf_counter() + patience
        drafts = propose_batch([job for row in rows if (job := jobs[row])], patience)
        late = perf_counter() >= until
        self._order.reached(rows, [len(draft.tokens) > 0 for draft in drafts])
        for row, draft in zip(rows, drafts, strict=True):
            found[row] = None if late and not len(draft.tokens) else draft
        self._stats.searched(len(rows), missed=sum(found[row] is None for row in rows))
        return found
