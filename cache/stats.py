"""What the cache holds and how it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Counts are since open unless said otherwise; a step is an `extend` that followed a draft."""

    namespaces: int = 0  # now
    sessions: int = 0  # remembered now
    sequences: int = 0  # in the shared past now
    tokens: int = 0  # in the shared past now
    memory_bytes: int = 0  # now, mapped segments included
    segment_bytes: int = 0  # of them in mapped segments, whose pages all processes share
    disk_bytes: int = 0  # now, segments included
    requests: int = 0
    steps: int = 0
    hits: int = 0  # steps with at least one accepted token
    drafted: int = 0
    accepted: int = 0
    partial: int = 0  # requests abandoned
    evicted: int = 0  # sequences and sessions forgotten for room
    forgotten: int = 0  # sequences forgotten on purpose or by age, by this process
    refused: int = 0  # outputs not shared, by a pattern
    mode: Literal["memory", "writer", "follower"] = "memory"
    store_error: str | None = None  # why nothing is written now
    unwritten: int = 0  # outputs and updates that the store gave up writing
    segment_error: str | None = None  # why a segment could not be written or used
