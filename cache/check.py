"""Whether a cache on disk is whole: the database, every sequence in it, and the index that is built from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.suffix_cache import SuffixCache
from agentspec.errors import AgentSpecError

Progress = Callable[[str], None]


def verify(folder: Path | str, memory_bytes: int, progress: Progress = lambda stage: None) -> Iterator[str]:
    """What is wrong, one line each; nothing for a cache that is whole. Changes nothing; others may use the folder.

    The index holds the newest sequences that fit into `memory_bytes`, as a server's would.
    """
    found = 0
    for stage, look in (("database", _database_problems), ("index", _index_problems)):
        progress(stage)
        try:
            for problem in look(folder, memory_bytes):
                found += 1
                yield problem
        except AgentSpecError as error:
            found += 1
            yield str(error)
        if found:
            return  # what is built upon it cannot be right


def _database_problems(folder: Path | str, _: int) -> Iterator[str]:
    store = SequenceStore.open(folder, disk_bytes=None, mode="follower")
    try:
        yield from store.problems()
    finally:
        store.close()


def _index_problems(folder: Path | str, memory_bytes: int) -> Iterator[str]:
    with SuffixCache.open(folder, mode="follower", memory_bytes=memory_bytes) as cache:
        cache.check_integrity()
    yield from ()
