"""The token cache as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.backends.torch.drafters import SuffixDrafter, chain_draft
from agentspec.types import Draft, Source


class Request:
    def __init__(self, fixed: Draft) -> None:
        self.fixed, self.asked = fixed, []

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0, *, after: Sequence[int] = ()) -> Draft | None:
        self.asked.append((max_tokens, tuple(after)))
        return self.fixed


def test_the_suffix_drafter_asks_the_cache() -> None:
    request = Request(chain_draft([1], 0.5, Source.SHARED))
    assert SuffixDrafter(request).propose([1, 2], 7) is request.fixed
    assert request.asked == [(7, ())]


def test_what_comes_after_tokens_that_may_never_come() -> None:
    request = Request(chain_draft([1, 2, 3], (0.9, 0.8, 0.1), Source.SHARED))
    assert list(SuffixDrafter(request).ahead([8, 9], 4)) == [1, 2] and request.asked == [(4, (8, 9))]
