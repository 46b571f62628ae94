"""Drafts from the token cache: from this session's own text and from earlier text of its namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentspec.backends.torch.drafters.base import LIKELY, MIN_PROBABILITY, Drafter, likeliest_path
from agentspec.types import Draft


class DraftingRequest(Protocol):
    """The open cache request that a `SuffixDrafter` drafts from."""

    def draft(
        self, max_tokens: int = 32, min_probability: float = 0.0, *, after: Sequence[int] = ()
    ) -> Draft | None: ...


class SuffixDrafter(Drafter):
    """Asks the token cache for a draft; the open cache request already knows the context."""

    def __init__(self, request: DraftingRequest) -> None:
        self._request = request

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return self._request.draft(budget, MIN_PROBABILITY)

    def ahead(self, path: Sequence[int], budget: int) -> Sequence[int]:
        draft = self._request.draft(budget, LIKELY, after=path)
        return () if draft is None else likeliest_path(draft, LIKELY)
