"""The order of an index's rows, kept in the order of their documents' ids: better first, of equals the earlier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The places of the `count` highest scores, or of all if there are fewer, in order."""
    chosen = np.arange(len(scores))
    if count < len(scores):
        last = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > last)
        chosen = np.concatenate([above, np.flatnonzero(scores == last)[: count - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]
