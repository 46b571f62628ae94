"""Checks a cache on disk: the database, every sequence in it, and the index that is built from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.suffix_cache import SuffixCache
from agentspec.errors import AgentSpecError


def verify(folder: Path | str, memory_bytes: int, progress: Callable[[str], None] = lambda stage: None) -> list[str]:
    """The problems found, one line each; empty for a sound cache. Read-only; other processes may use the folder.

    The index that is checked holds the newest sequences that fit into `memory_bytes`, as a server's would. It is not
    checked if the database is damaged.
    """
    try:
        progress("database")
        with closing(SequenceStore.open(folder, disk_bytes=None, mode="follower")) as store:
            if problems := list(store.problems()):
                return problems
        progress("index")
        with SuffixCache.open(folder, mode="follower", memory_bytes=memory_bytes) as cache:
            cache.check_integrity()
    except AgentSpecError as error:
        return [str(error)]
    return []
