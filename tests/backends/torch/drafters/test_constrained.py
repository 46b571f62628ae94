from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentspec.backends.torch.drafters import Drafter, make_draft
from agentspec.backends.torch.drafters.constrained import ConstrainedDrafter
from agentspec.backends.torch.grammars.compiler import GrammarCompiler
from agentspec.types import Draft, Source


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokens, 259, [256])


class Fixed(Drafter):
    def __init__(self, draft: Draft | None) -> None:
        self.draft = draft

    def propose(self, context: Any, budget: int) -> Draft | None:
        return self.draft


def test_drafts_are_cut_and_what_is_forced_is_added(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    state = grammars.compile('start: ("x" | "yes") "!"', param="p").start()
    x, y, e, s, bang = byte_tokens.encode("xyes!")
    draft = make_draft([x, y, bang, s], [-1, -1, 0, 1], [0.5, 0.5, 0.4, 0.4], [1] * 4, [Source.SHARED] * 4)
    cut = ConstrainedDrafter(Fixed(draft), state).propose([], 8)
    assert cut is not None and cut.tokens.tolist() == [x, y, bang] and cut.parents.tolist() == [-1, -1, 0]
    state.advance(y)
    forced = ConstrainedDrafter(Fixed(None), state).propose([], 8)
    assert forced is not None and forced.tokens.tolist()[:2] == [e, s]
    assert set(forced.source.tolist()) == {Source.GRAMMAR} and np.all(np.diff(forced.probabilities) <= 0)
    shorter = ConstrainedDrafter(Fixed(None), state).propose([], 1)
    assert shorter is not None and len(shorter) == 1
    free = grammars.compile("start: /(.|\\n)*/", param="p").start()
    assert ConstrainedDrafter(Fixed(None), free).propose([], 8) is None
