"""An engine's KV cache with automatic prefix caching, in stretches of blocks instead of single ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Stretch = tuple[int, int]
"""A stretch of prompts that is shared or not as a whole: its key, and its tokens."""


class SimulatedPrefixCache:
    """Least recently used blocks go first, of one prompt the last ones, as in vLLM.

    A prompt is a path of stretches: those it shares with other sessions, then its session's own, which grows. All
    blocks of a stretch are used at the same times, so that evicting a stretch from its end is evicting blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pinned_tokens = 0
        self._idle_tokens = 0
        self._idle: OrderedDict[int, int] = OrderedDict()  # tokens by stretch, the least recently used first
        self._pinned: dict[int, list[int]] = {}  # tokens and users

    def begin(self, shared: Sequence[Stretch], own: int, keep: int, tokens: int) -> int | None:
        """Hold a prompt and its answer: `tokens` of the session's `own` stretch, whose first `keep` are as before.

        Returns how many tokens of the prompt were cached, or None, and holds nothing, if there is no room now.
        """
        hit, whole, missing = 0, True, 0
        for key, size in shared:
            cached = self._cached(key)
            hit += cached if whole else 0
            whole = whole and cached == size
            missing += size - cached
        cached = min(self._idle.get(own, 0), keep) if whole else 0
        held_idle = sum(self._idle.get(key, 0) for key, _ in shared) + self._idle.get(own, 0)
        if self.pinned_tokens + held_idle + missing + tokens - self._idle.get(own, 0) > self.capacity:
            return None
        for key, size in shared:
            self._pin(key, size)
        self._pin(own, tokens)
        self._evict()
        return hit + cached

    def end(self, shared: Sequence[Stretch], own: int) -> None:
        """The answer is written: what was held may be evicted from now on, the session's own end first."""
        self._release(own)
        for key, _ in reversed(shared):
            self._release(key)

    def _cached(self, key: int) -> int:
        pinned = self._pinned.get(key)
        return pinned[0] if pinned else self._idle.get(key, 0)

    def _pin(self, key: int, tokens: int) -> None:
        pinned = self._pinned.get(key)
        if pinned is not None:
            pinned[1] += 1
            return
        self._idle_tokens -= self._idle.pop(key, 0)
        self._pinned[key] = [tokens, 1]
        self.pinned_tokens += tokens

    def _release(self, key: int) -> None:
        pinned = self._pinned[key]
        pinned[1] -= 1
        if not pinned[1]:
            del self._pinned[key]
            self._idle[key] = pinned[0]
            self.pinned_tokens -= pinned[0]
            self._idle_tokens += pinned[0]

    def _evict(self) -> None:
        over = self.pinned_tokens + self._idle_tokens - self.capacity
        while over > 0:
            key, tokens = self._idle.popitem(last=False)
            if tokens > over:
                self._idle[key] = tokens - over
                self._idle.move_to_end(key, last=False)
            self._idle_tokens -= min(tokens, over)
            over -= tokens
