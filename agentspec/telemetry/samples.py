"""The counts that backends keep themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The counts of a local engine, which serves `model`; `drafted` and `accepted` are totals by source of the draft.

    `draft_lengths` maps a number of accepted tokens to the drafts of which so many were; `forwards` maps a number of
    answers to the number of forwards that they shared; `rows` counts reserved KV slots, `draft_failures` the
    answers that went on without drafts because their drafter failed. `prefills` counts the prompts read ahead that
    were "launched" and "used", and the "tokens" computed for them.
    """

    backend: str
    queued: int
    active: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    forwards: Mapping[int, int]
    rows: int
    draft_failures: int = 0
    draft_lengths: Mapping[int, int] = field(default_factory=dict)
    model: str = ""
    prefills: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemberSample:
    """One upstream, a server of a pool or alone, as this process sees it. Totals since the start; `running`, `waiting`
    and `kv_use` by the server's own metrics, None without; `drafted` and `accepted` by those of our plug-in in it.
    """

    backend: str
    member: str
    state: str
    in_flight: int
    calls: int
    retries: int
    failures: int
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    drafted: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TenantSample:
    """One tenant's requests at the gateway: running now, and waiting for a slot now."""

    tenant: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """The token index of a process: its bytes and sequences, and of its database the rows that cannot be read, those
    not read yet, for how many seconds the index has not had all of them, and whether deleted bytes may be left in it.
    """

    bytes: int
    sequences: int
    damaged: int
    unread: int
    behind: float
    erasure_pending: bool
