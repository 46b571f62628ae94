"""Token sequences of any length that repeat themselves as agents' texts do: copied spans between new tokens."""

from __future__ import annotations

import numpy as np

from agentspec.cache.tokens import Tokens

VOCABULARY = 49_152
_SPAN = (8, 200)  # tokens copied at a time
_GAP = 20.0  # mean number of new tokens between two copies


def synthetic_tokens(count: int, *, seed: int = 0) -> Tokens:
    """`count` tokens that depend only on `seed`. About five in six are copied; new tokens are skewed to few ids."""
    rng = np.random.default_rng(seed)
    text = (VOCABULARY * rng.random(count) ** 4).astype(np.int32)
    spans = 2 + int(count / (_GAP + sum(_SPAN) / 2) * 1.2)
    lengths = rng.integers(*_SPAN, size=spans).tolist()
    gaps = rng.geometric(1 / _GAP, size=spans).tolist()
    sources = rng.random(spans).tolist()
    at = 0
    for length, gap, source in zip(lengths, gaps, sources, strict=True):
        at += gap
        begin = int(source * max(0, at - length))
        copied = text[begin : begin + min(length, at - begin, max(0, count - at))]
        text[at : at + len(copied)] = copied
        at += len(copied)
    return text
