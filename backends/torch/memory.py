"""One generation's place in the token cache. Its failures cost speed, never an answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from agentspec.types import Draft, GenerateRequest, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentspec.cache import CacheRequest, SuffixCache

logger = logging.getLogger(__name__)


class Memory:
    """An open cache request, or nothing where there is no cache.

    Any error of the cache, its database's included, closes it and is logged once: drafting is a luxury.
    """

    def __init__(self, request: CacheRequest | None) -> None:
        self._request = request

    @classmethod
    def open(
        cls,
        cache: SuffixCache | None,
        request: GenerateRequest,
        prompt: Sequence[int],
        namespace: Namespace,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> Memory:
        """Open a place for `prompt`; what is generated is recorded at a clean `close` if the request allows it.

        `decode` is the tokenizer's, for a cache that refuses some texts.
        """
        if cache is None:
            return cls(None)
        labels = request.labels
        try:
            opened = cache.request(
                np.asarray(prompt, dtype=np.int32),
                namespace=namespace,
                session=labels.session,
                workflow=labels.workflow,
                step=labels.step,
                store=request.store,
                decode=decode,
            )
        except Exception as error:
            logger.warning("generating without the token cache: %s", error)
            return cls(None)
        return cls(opened)

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None:
        if self._request is None:
            return None
        try:
            return self._request.draft(max_tokens, min_probability)
        except Exception as error:
            self._give_up(error)
            return None

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer grew by `tokens`."""
        if self._request is None:
            return
        try:
            self._request.extend(np.asarray(tokens, dtype=np.int32))
        except Exception as error:
            self._give_up(error)

    def close(self, *, clean: bool) -> None:
        """The answer is complete and may be shared (`clean`), or was cut and stays partial. Idempotent."""
        request, self._request = self._request, None
        if request is None:
            return
        try:
            if clean:
                request.close()
            else:
                request.abandon()
        except Exception as error:
            logger.warning("the token cache did not record an answer: %s", error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("going on without the token cache: %s", error)
        self.close(clean=False)
