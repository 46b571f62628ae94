"""One sequence's session with the token cache. If the cache fails, the answer is slower but still correct."""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Draft, GenerateRequest, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentspec.cache import CacheRequest, SuffixCache

HELD = 16  # while nothing is drafted, the cache gets its tokens in batches of at least this size: fewer calls
DRAFT_SECONDS = 0.005  # an index that cannot be read within this time is left out of the draft
STALL_SECONDS = 2.0  # a call that takes longer means that the cache hangs, on its disk for example
PAUSE_SECONDS = 10.0  # after that the cache is left alone for so long

logger = logging.getLogger(__name__)
T = TypeVar("T")


class CacheHealth:
    """Notices that the cache hangs, so that only one call waits for it. The sessions of an engine share it."""

    def __init__(self) -> None:
        self._paused_until = float("-inf")

    @property
    def paused(self) -> bool:
        return perf_counter() < self._paused_until

    def called(self, started: float) -> None:
        """Judge a call to the cache that began at `started` and ends now, by `perf_counter`."""
        now = perf_counter()
        if now - started > STALL_SECONDS:
            self._paused_until = now + PAUSE_SECONDS
            logger.warning(
                "the token cache took %.1f s for one call: nothing is drafted from it for %.0f s",
                now - started,
                PAUSE_SECONDS,
            )


class CacheSession:
    """Wraps an open cache request; without a cache, every call does nothing.

    The cache learns committed tokens when `flush_to_cache` is called, which costs no time while a device computes.
    Until then they are passed to `draft` as context.

    Any error of the cache, including its database's, is logged once and closes the session: drafting is optional. While
    `health` says that the cache hangs, it is left alone.
    """

    def __init__(self, request: CacheRequest | None, health: CacheHealth | None = None) -> None:
        self._request = request
        self._health = health or CacheHealth()
        self._held: list[int] = []
        self._drafted = False  # in this round: then the cache must get the next tokens at once to score its draft

    @classmethod
    def open(
        cls,
        cache: SuffixCache | None,
        request: GenerateRequest,
        prompt: Sequence[int],
        namespace: Namespace,
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        health: CacheHealth | None = None,
    ) -> CacheSession:
        """Open a session for `prompt`. A clean `close` records the answer if the request allows it.

        `decode` is the tokenizer's; a cache that refuses to store some texts needs it.
        """
        health = health or CacheHealth()
        if cache is None or health.paused:
            return cls(None)
        labels, started = request.labels, perf_counter()
        try:
            opened = cache.request(
                np.asarray(prompt, dtype=np.int32),
                namespace=namespace,
                session=labels.session,
                store=request.store,
                share=request.share,
                decode=decode,
            )
        except Exception as error:
            logger.warning("generating without the token cache: %s", safe_message(error))
            return cls(None)
        health.called(started)
        return cls(opened, health)

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None:
        """What follows the committed tokens."""
        if self._request is None or self._health.paused:
            return None
        self._drafted = True
        behind = np.asarray(self._held, dtype=np.int32)
        return self._call(
            lambda request: request.draft(max_tokens, min_probability, behind=behind, patience=DRAFT_SECONDS)
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        self._held.extend(tokens)

    def flush_to_cache(self) -> None:
        """Let the cache learn what was added; called once a step. After steps without a draft it does so in batches."""
        if self._drafted or len(self._held) >= HELD:
            self._release()

    def close(self, *, clean: bool, ended: bool = True) -> None:
        """End the session of an answer that finished cleanly (`clean`) and may be shared, or was aborted and stays
        partial. The cache learns that answers end after its last token if it `ended` by itself. Idempotent.
        """
        if self._health.paused:  # the engine must not wait for the cache now
            threading.Thread(target=self._end, kwargs={"clean": False}, daemon=True).start()
            return
        self._release()
        self._end(clean=clean, ended=ended)

    def record(self, answer: Sequence[int]) -> None:
        """Close the session of an answer whose parts were answers of requests before, so that the cache has learned."""
        self._call(lambda request: request.extend(np.asarray(answer, dtype=np.int32), learn=False))
        self._end(clean=True)

    def _release(self) -> None:
        """Pass the held tokens to the cache."""
        if self._health.paused:
            return
        held, self._held, self._drafted = self._held, [], False
        if held:
            self._call(lambda request: request.extend(np.asarray(held, dtype=np.int32)))

    def _end(self, *, clean: bool, ended: bool = True) -> None:
        request, self._request = self._request, None
        if request is None:
            return
        started = perf_counter()
        try:
            if clean:
                request.close(ended=ended)
            else:
                request.abandon()
        except Exception as error:
            logger.warning("the token cache did not record an answer: %s", safe_message(error))
        finally:
            self._health.called(started)

    def _call(self, function: Callable[[CacheRequest], T]) -> T | None:
        """What `function` of the open request returns; None without one, and if it fails, which closes the session."""
        if self._request is None:
            return None
        started = perf_counter()
        try:
            return function(self._request)
        except Exception as error:
            logger.warning("going on without the token cache: %s", safe_message(error))
            self._end(clean=False)
            return None
        finally:
            self._health.called(started)
