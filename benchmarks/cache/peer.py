"""The peer that the cache is compared with where it is installed: Arctic Inference's suffix decoding.

Snowflake's arctic-inference (Apache-2.0) is the suffix decoding of vLLM. It is not a dependency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

import numpy as np

from agentspec.cache.tokens import Tokens
from agentspec.recordings.replay import EncodedCall, Replay, replay
from agentspec.types import Draft

PEER = "arctic_inference.suffix_decoding"
DEPTH = 64
BEST_TREE = {"max_spec_factor": 64.0, "max_spec_offset": 0.0, "min_token_prob": 0.02, "use_tree_spec": True}
"""The peer's tree mode that drafted best among the modes tried, with depth `DEPTH`."""


def installed_version() -> str | None:
    """The installed version of the peer; None if it cannot be imported."""
    try:
        import_module(PEER)
        return version("arctic-inference")
    except (ImportError, PackageNotFoundError):
        return None


def replay_peer(calls: Sequence[EncodedCall], budget: int) -> Replay:
    """Replay `calls` with the installed peer's best tree mode."""
    cache: Any = import_module(PEER).SuffixDecodingCache(max_tree_depth=DEPTH)
    numbers = count()

    @contextmanager
    def open_request(call: EncodedCall) -> Iterator[PeerRequest]:
        number = next(numbers)
        cache.start_request(number, call.prompt.tolist())
        yield PeerRequest(cache, number, call.prompt[-DEPTH:].tolist())
        cache.stop_request(number)

    return replay(calls, open_request, budget)


@dataclass(slots=True)
class PeerRequest:
    cache: Any
    number: int
    context: list[int]

    def draft(self, max_tokens: int) -> Draft:
        found = self.cache.speculate(self.number, self.context, max_spec_tokens=max_tokens, **BEST_TREE)
        tokens, parents = (np.asarray(given, dtype=np.int32) for given in (found.token_ids, found.parents))
        zeros = np.zeros(len(tokens), np.int32)
        return Draft(tokens, parents, np.asarray(found.probs, np.float32), zeros, zeros.astype(np.uint8))

    def extend(self, tokens: Tokens) -> None:
        new = tokens.tolist()
        self.cache.add_active_response(self.number, new)
        self.context = [*self.context, *new][-DEPTH:]
