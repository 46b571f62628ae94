"""What a draft is made of."""

from __future__ import annotations

import numpy as np
import pytest

from agentspec.backends.torch.drafters import chain_draft
from agentspec.types import Source


def test_drafts_have_the_documented_types() -> None:
    draft = chain_draft([5, 6], 0.5, Source.PREDICTION)
    assert [array.dtype for array in (draft.tokens, draft.parents, draft.probabilities, draft.match_length)] == [
        np.int32, np.int32, np.float32, np.int32,
    ]  # fmt: skip
    assert draft.source.dtype == np.uint8
    assert draft.probabilities.tolist() == pytest.approx([0.5, 0.25])


def test_a_chain_may_have_a_confidence_for_every_token() -> None:
    draft = chain_draft([5, 6, 7], [0.5, 1.0, 0.2], Source.NGRAM)
    assert draft.probabilities.tolist() == pytest.approx([0.5, 0.5, 0.1])
    assert len(chain_draft([], 0.5, Source.NGRAM)) == 0
