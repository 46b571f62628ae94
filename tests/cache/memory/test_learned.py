from __future__ import annotations

from agentspec.cache.memory.learned import KeptLearned
from agentspec.types import Namespace


def test_nothing_is_kept_of_what_was_dropped_or_taken_back() -> None:
    kept = KeptLearned(room=10)
    names = [Namespace(f"t{number}") for number in range(100)]
    for one in names:
        kept.put(one, b"state", [])
    assert kept.take(names[-1]) == b"state" and kept.take(names[0]) is None
    assert kept._unsaved == {names[-2]}
    assert kept.take_unsaved() == ([], {names[-2].key: b"state"})
