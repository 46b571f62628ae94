"""Whether a cache on disk is whole: the database, every sequence in it, and the index that is built from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.suffix_cache import SuffixCache
from agentspec.errors import AgentSpecError


def verify(folder: Path | str, memory_bytes: int, progress: Callable[[str], None] = lambda stage: None) -> list[str]:
    """What is wrong, one line each; nothing for a cache that is whole. Changes nothing; others may use the folder.

    The index holds the newest sequences that fit into `memory_bytes`, as a server's would. It is not looked at where
    the database that it is built from is damaged.
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
