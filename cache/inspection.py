"""What a cache reports of itself: its figures, and whether its indexes are sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agentspec.types import Namespace

if TYPE_CHECKING:
    from agentspec.cache.request import CachePool


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Counts are since open unless said otherwise; a step is an `extend` that followed a draft. `steps`,
    `hits`, `drafted` and `accepted` are those of requests that ended.
    """

    namespaces: int = 0  # in memory now
    sessions: int = 0  # in memory now
    sequences: int = 0  # cached past outputs now
    tokens: int = 0  # of cached past outputs now
    memory_bytes: int = 0  # now, mapped segments included
    segment_bytes: int = 0  # of them in mapped segments, whose pages all processes share
    disk_bytes: int = 0  # now, segments included
    requests: int = 0
    steps: int = 0
    hits: int = 0  # steps with at least one accepted token
    drafted: int = 0
    accepted: int = 0
    partial: int = 0  # answers aborted, without parts of answers (`share=False`)
    evicted: int = 0  # sequences and sessions evicted to make room
    unloaded: int = 0  # namespaces that left memory, where the next request loads them again
    forgotten: int = 0  # sequences that this process deleted, on request or by age
    refused: int = 0  # outputs not shared because their text matched a pattern
    mode: Literal["memory", "writer", "follower"] = "memory"
    store_error: str | None = None  # why nothing is written now
    unwritten: int = 0  # outputs and updates that the store gave up writing
    segment_error: str | None = None  # why a segment could not be written or used
    segments_skipped: int = 0  # segments that were damaged or missing, and rebuilt from the database
    damaged: int = 0  # rows of the database that were found unreadable, and are left out
    unread: int = 0  # rows of the database that are known of and not taken in yet, at most
    erasure_pending: bool = False  # bytes of what was deleted may still be in the database's files
    behind: float = 0.0  # seconds since this process had last taken in all that others wrote


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace in memory. `oldest` and `newest` are when outputs of it finished, in seconds since 1970, None
    without any; `steps`, `hits`, `drafted` and `accepted` count since it was loaded.
    """

    namespace: Namespace
    sessions: int
    sequences: int
    tokens: int
    memory_bytes: int
    oldest: float | None
    newest: float | None
    steps: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0


def namespace_stats(pool: CachePool, tenant: str | None) -> list[NamespaceStats]:
    """The namespaces in memory, of one tenant or of all."""
    found = []
    for one in pool.namespaces.partitions():
        if one.loaded and tenant in (None, one.namespace.tenant):
            with one.lock:
                times = [meta.created_at for _, meta in one.known()]
                sizes = len(one.sessions), one.shared.sequence_count, one.shared.token_count, one.memory_bytes()
            ages = min(times, default=None), max(times, default=None)
            found.append(NamespaceStats(one.namespace, *sizes, *ages, **one.counts))
    return found


def memory_stats(pool: CachePool) -> CacheStats:
    """The figures of the cache in memory; the store's fields have their defaults."""
    partitions, counts = pool.namespaces.partitions(), pool.counts()
    return CacheStats(
        **counts,
        namespaces=len(partitions),
        sessions=sum(len(one.sessions) for one in partitions),
        sequences=sum(one.shared.sequence_count for one in partitions),
        tokens=sum(one.shared.token_count for one in partitions),
        memory_bytes=pool.namespaces.total,
        evicted=pool.namespaces.evicted,
        unloaded=pool.namespaces.unloaded,
        segment_bytes=sum(one.shared.mapped_bytes() for one in partitions),
    )


def check_integrity(pool: CachePool) -> None:
    """Raise `CacheFormatError` when an index is damaged."""
    for partition in pool.namespaces.partitions():
        with partition.lock:
            indexes = [partition.shared, partition.shapes, *(session.index for session in partition.sessions)]
        for index in indexes:
            index.check_integrity()
