"""The peer of the cache benchmark: vLLM's suffix decoding, Snowflake's arctic-inference (Apache-2.0), where installed.

It is not a dependency. It gets NumPy arrays, as it takes them without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

import numpy as np

from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.recordings.replay import EncodedCall
from agentspec.types import Draft

_MODULE = "arctic_inference.suffix_decoding"
_DEPTH = 64
_BEST_TREE = {"max_spec_factor": 64.0, "max_spec_offset": 0.0, "min_token_prob": 0.02, "use_tree_spec": True}
"""The tree mode that drafted best among the modes tried, with depth `_DEPTH`."""


def installed_version() -> str | None:
    """The installed version of the peer; None if it cannot be imported."""
    try:
        import_module(_MODULE)
        return version("arctic-inference")
    except (ImportError, PackageNotFoundError):
        return None


class PeerCache:
    """The peer's cache; `request` opens a request in it as `replay` wants it."""

    def __init__(self) -> None:
        self._cache: Any = import_module(_MODULE).SuffixDecodingCache(max_tree_depth=_DEPTH)
        self._numbers = count()

    def fill(self, outputs: Iterable[Tokens]) -> None:
        for output in outputs:
            number = next(self._numbers)
            self._cache.start_request(number, EMPTY)
            self._cache.add_active_response(number, output)
            self._cache.stop_request(number)

    @contextmanager
    def request(self, call: EncodedCall) -> Iterator[_PeerRequest]:
        number = next(self._numbers)
        self._cache.start_request(number, call.prompt)
        yield _PeerRequest(self._cache, number, call.prompt[-_DEPTH:])
        self._cache.stop_request(number)


@dataclass(slots=True)
class _PeerRequest:
    cache: Any
    number: int
    context: Tokens

    def draft(self, max_tokens: int) -> Draft:
        found = self.cache.speculate(self.number, self.context, max_spec_tokens=max_tokens, **_BEST_TREE)
        tokens, parents = (np.asarray(given, dtype=np.int32) for given in (found.token_ids, found.parents))
        zeros = np.zeros(len(tokens), np.int32)
        return Draft(tokens, parents, np.asarray(found.probs, np.float32), zeros, zeros.astype(np.uint8))

    def extend(self, tokens: Tokens) -> None:
        self.cache.add_active_response(self.number, tokens)
        self.context = np.concatenate((self.context, tokens))[-_DEPTH:]
