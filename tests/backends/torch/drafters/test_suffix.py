"""The token cache as a drafter."""

from __future__ import annotations

from agentspec.backends.torch.drafters import SuffixDrafter, chain_draft
from agentspec.types import Draft, Source


class Request:
    def __init__(self, fixed: Draft) -> None:
        self.fixed, self.asked = fixed, []

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None:
        self.asked.append((max_tokens, min_probability))
        return self.fixed


def test_the_suffix_drafter_asks_the_cache() -> None:
    request = Request(chain_draft([1], 0.5, Source.SHARED))
    assert SuffixDrafter(request).propose([1, 2], 7) is request.fixed
    assert request.asked[0][0] == 7
