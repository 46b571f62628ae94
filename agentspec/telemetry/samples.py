"""What a backend counts by itself, as the gateway's metrics show it. Needs no metrics library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The counts of a local engine; `drafted` and `accepted` are totals by source of the draft.

    `forwards` is the number of forwards by how many answers shared one, `rows` the key/value rows reserved.
    """

    backend: str
    queued: int
    active: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    forwards: Mapping[int, int]
    preempted: int
    rows: int


@dataclass(frozen=True, slots=True)
class UpstreamSample:
    """What an upstream counts of its own drafts, since it started."""

    backend: str
    drafts: float
    drafted: float
    accepted: float


BackendSample = EngineSample | UpstreamSample
