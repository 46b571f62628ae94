"""Turns of a process without a database. They are gone at its exit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from agentspec.cache.deletion import Selection
from agentspec.cache.tool_turns.turn import LARGEST, MOST, StoredTurn, is_covered

_MOST_BYTES = 16 << 20
Key = tuple[str, str]


class MemoryToolTurns:
    """A `ToolTurnStore` in memory. Turns older than `seconds` are deleted; None: never."""

    def __init__(self, refuses: Callable[[str], bool] | None = None, seconds: float | None = None) -> None:
        self._refuses = refuses
        self._seconds = seconds
        self._lock = threading.Lock()
        self._turns: dict[Key, dict[str, StoredTurn]] = {}
        self._bytes = 0
        self.generation = 0

    def put(self, turn: StoredTurn) -> bool:
        if turn.size > LARGEST or (self._refuses is not None and self._refuses(turn.body)):
            return False
        with self._lock:
            turns = self._turns.setdefault((turn.tenant, turn.agent), {})
            turns[turn.id] = turn
            self._bytes += turn.size
            if len(turns) > MOST:
                self._remove(list(turns.values())[: MOST // 2])
            while self._bytes > _MOST_BYTES:
                self._remove_oldest()
        return True

    def ids(self, tenant: str, agent: str) -> list[str]:
        with self._lock:
            return list(self._turns.get((tenant, agent), ()))

    def read(self, tenant: str, agent: str, ids: Sequence[str]) -> list[StoredTurn]:
        with self._lock:
            turns = self._turns.get((tenant, agent), {})
            return [turns[id] for id in ids if id in turns]

    def forget(self, selection: Selection) -> int:
        with self._lock:
            covered = [turn for turns in self._turns.values() for turn in turns.values() if is_covered(selection, turn)]
            self._remove(covered)
            return len(covered)

    def maintain(self) -> None:
        if self._seconds is None:
            return
        before = time.time() - self._seconds
        with self._lock:
            old = [turn for turns in self._turns.values() for turn in turns.values() if turn.created_at < before]
            self._remove(old)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def leave_behind(self) -> None:
        pass

    def _remove_oldest(self) -> None:
        """Of the agent that has most, of the tenant that has most with all its agents, the older half."""
        sizes = {key: sum(turn.size for turn in turns.values()) for key, turns in self._turns.items()}
        tenants: Counter[str] = Counter()
        for (tenant, _), size in sizes.items():
            tenants[tenant] += size
        largest = max((key for key in sizes if key[0] == tenants.most_common(1)[0][0]), key=lambda key: sizes[key])
        turns = self._turns[largest]
        self._remove(list(turns.values())[: (len(turns) + 1) // 2])

    def _remove(self, turns: Sequence[StoredTurn]) -> None:
        for turn in turns:
            key = turn.tenant, turn.agent
            del self._turns[key][turn.id]
            self._bytes -= turn.size
            if not self._turns[key]:
                del self._turns[key]
        self.generation += bool(turns)
