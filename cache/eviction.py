"""Which sequences of a shared past go first when there is no room.

"lru": the least recently used, where being added and every token that was right because of it is a use. "benefit": the
same, but the more hits a sequence had per byte, the longer it may stay without one: its last use counts as later by
`_BONUS` of the time that the cache reaches back, times the logarithm of one plus that rate. Reaching back is measured
on the sequences that are there, so that recency weighs the same in a small cache and in a large one, and a burst of
hits long ago keeps nothing for ever. On recorded traces it is no better than "lru" (docs/cache.md, Budgets).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.index import Usage

Eviction = Literal["benefit", "lru"]

_BONUS = 0.25
_OVERHEAD = 32  # tokens' worth of bytes that a sequence takes whatever its length


def order(usage: Usage, policy: Eviction) -> NDArray[np.intp]:
    """The rows of `usage`, the first to go first."""
    if policy == "lru" or not len(usage.last_used):
        return np.argsort(usage.last_used, kind="stable")
    reach = int(usage.last_used.max() - usage.last_used.min())
    rate = usage.hits / (usage.lengths + _OVERHEAD)
    return np.argsort(usage.last_used + _BONUS * reach * np.log1p(rate), kind="stable")
