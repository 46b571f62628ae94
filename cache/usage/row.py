"""What one key used of one model on one day, and what every store of it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from agentspec.cache.deletion import Scope, Selection

Owner = tuple[str, str]
"""A tenant, and what one of its keys is called."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Counts of a day, UTC, written as 2026-11-23.

    `cached_tokens` are those of `prompt_tokens` that a cache already had, `accepted_tokens` those of
    `completion_tokens` that were drafted. `estimated_tokens` stand for prompt and answer where nobody told the counts.
    """

    day: str
    tenant: str
    key: str
    model: str
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    estimated_tokens: int = 0

    @property
    def owner(self) -> Owner:
        return self.tenant, self.key

    @property
    def tokens(self) -> int:
        """What counts for limits: the tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens

    @property
    def counts(self) -> tuple[int, ...]:
        """The counts in the order of `COUNTS`."""
        return tuple(getattr(self, name) for name in COUNTS)

    def plus(self, other: UsageRow) -> UsageRow:
        """This row with another one's counts added."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in COUNTS})


BATCH_SECONDS = 7 * 86400.0  # that the name of a batch is remembered
LOOK_SECONDS = 3600.0  # between two looks for what is too old
COUNTS = tuple(one.name for one in fields(UsageRow) if one.type == "int")


class KeepsUsage(Protocol):
    """Usage, added up over all processes. Blocking and thread-safe. Raises `CacheError` if the store cannot be used."""

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        """Add counts to what is there, all or none; returns the tokens of each key on `day`.

        The counts are not older than `since`, in seconds since 1970: those of a tenant that was forgotten after that
        are left out. Rows that were added under the same `batch`, a name that nothing else has, are not added again
        for a week.
        """
        ...


class UsageStore(KeepsUsage, Protocol):
    """Usage that ages, and that is forgotten with its tenant."""

    def read(
        self, *, tenant: str | None = None, model: str | None = None, since: str = "", until: str = "9999"
    ) -> list[UsageRow]:
        """The rows of days from `since` to `until`, both included, in the order of their days and names."""
        ...

    def forget(self, selection: Selection) -> int:
        """Delete what a selection covers; returns how many rows."""
        ...

    def maintain(self) -> None:
        """Called periodically: delete what is too old, and finish erasing what was deleted."""
        ...


def day_of(time: float) -> str:
    """The day, UTC, of a time in seconds since 1970."""
    return datetime.fromtimestamp(time, UTC).date().isoformat()  # with four digits of any year


def oldest_day(time: float, days: int) -> str:
    """The first of the last `days` days, today included; "" if they reach beyond the calendar."""
    try:
        return (datetime.fromtimestamp(time, UTC).date() - timedelta(days=days - 1)).isoformat()
    except OverflowError:
        return ""


def last_day(selection: Selection) -> str | None:
    """The last day whose usage a deletion takes with it, None for a deletion of something else than a whole tenant.

    What is deleted by session, content, tokenizer or age alone is content, and counts are none: these have an age of
    their own.
    """
    others = (selection.session, selection.tokenizer)
    if selection.tenant is None or selection.searched or any(one is not None for one in others):
        return None
    return "9999" if selection.before is None else day_of(selection.before - 86400)  # the day itself is not over


def forgets_tenant(scope: Scope, tenant: str) -> bool:
    """Whether a logged deletion was of all that the tenant had."""
    rest = (scope.session, scope.tokenizer, scope.before, scope.searched or None)
    return scope.tenant is not None and scope.concerns_tenant(tenant) and all(one is None for one in rest)
