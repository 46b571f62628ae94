from __future__ import annotations

import numpy as np

from agentspec.benchmarks.cache.peer import BEST_TREE, DEPTH, PeerRequest


class Speculator:
    """Answers as the peer does and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int], dict[str, float]]] = []
        self.added: list[tuple[int, list[int]]] = []
        self.token_ids, self.parents, self.probs = [5, 6], [-1, 0], [0.5, 0.25]

    def speculate(self, number: int, pattern: list[int], **options: float) -> Speculator:
        self.asked.append((number, pattern, options))
        return self

    def add_active_response(self, number: int, tokens: list[int]) -> None:
        self.added.append((number, tokens))


def test_the_peer_sees_the_end_of_the_context_and_its_best_settings() -> None:
    speculator = Speculator()
    request = PeerRequest(speculator, 3, list(range(DEPTH)))
    request.extend(np.asarray([70, 71], dtype=np.int32))
    draft = request.draft(8)
    assert speculator.added == [(3, [70, 71])]
    ((number, pattern, options),) = speculator.asked
    assert (number, pattern) == (3, [*range(2, DEPTH), 70, 71])
    assert options == {"max_spec_tokens": 8, **BEST_TREE}
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 6], [-1, 0])
    assert draft.probabilities.tolist() == [0.5, 0.25]
