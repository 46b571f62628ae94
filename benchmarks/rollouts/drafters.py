"""The drafters of a replay: agentspec's as its plug-ins use it, the peer's tree, vLLM's n-gram, and an oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from agentspec.backends.engine_plugin.cache_router import CacheRouter
from agentspec.backends.engine_plugin.request_state import RequestInfo, RequestState
from agentspec.backends.engine_plugin.settings import DrafterSettings
from agentspec.benchmarks.cache.peer import PeerCache
from agentspec.benchmarks.rollouts.recording import Rollouts
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH, SuffixIndex, propose_batch
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.recordings.replay import EncodedCall
from agentspec.types import Draft, Namespace

LONGEST, SHORTEST = 5, 2  # tokens of an n-gram, as vLLM's prompt lookup tries them


class Sample(Protocol):
    """A sample that is being written."""

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        """Tokens that may follow, with at most `most` nodes. Only an oracle looks at what does follow."""
        ...

    def extend(self, tokens: Tokens) -> None: ...

    def close(self) -> None: ...


class Contender(Protocol):
    def begin(self, rollouts: Rollouts) -> Sample: ...

    def new_policy(self) -> None: ...


class Cached:
    """The cache by the code of the plug-ins, in memory. `policies` is their setting, `grouped`: samples of a prompt are
    drafted from each other while they are written.
    """

    def __init__(self, policies: int | None = None, *, grouped: bool = True) -> None:
        self._router = CacheRouter(SuffixCache.open(), DrafterSettings(policies=policies), Namespace, None)
        self._grouped = grouped
        self._groups: dict[str, list[RequestState]] = {}

    def begin(self, rollouts: Rollouts) -> Sample:
        state = RequestState(len(rollouts.prompt), RequestInfo())
        state.cache = self._router.open(state, rollouts.prompt)
        if self._grouped:
            state.group = self._groups.setdefault(rollouts.problem, [])
            state.group.append(state)
        return _CachedSample(state, rollouts.prompt[-DEPTH:])

    def new_policy(self) -> None:
        self._router.new_policy()


class _CachedSample:
    def __init__(self, state: RequestState, context: Tokens) -> None:
        self._state, self._context = state, context

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        assert self._state.cache is not None
        job = self._state.cache.drafter, self._state.indexes, self._context, most, least, chain
        return propose_batch([job])[0]

    def extend(self, tokens: Tokens) -> None:
        assert self._state.cache is not None
        self._state.cache.extend(tokens)
        self._context = np.concatenate((self._context, tokens))[-DEPTH:]

    def close(self) -> None:
        assert self._state.cache is not None
        self._state.cache.close(ended=True)
        if self._state in self._state.group:
            self._state.group.remove(self._state)


class Peer:
    """The peer with one tree of outputs for each prompt."""

    def __init__(self) -> None:
        self._caches: dict[str, PeerCache] = {}

    def begin(self, rollouts: Rollouts) -> Sample:
        return _PeerSample(self._caches.setdefault(rollouts.problem, PeerCache()), rollouts)

    def new_policy(self) -> None:
        """Does nothing: the peer keeps what it has."""


class _PeerSample:
    def __init__(self, cache: PeerCache, rollouts: Rollouts) -> None:
        self._open = ExitStack()
        self._request = self._open.enter_context(cache.request(EncodedCall("", rollouts.prompt, EMPTY)))
        self.extend = self._request.extend
        self.close = self._open.close

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        return self._request.draft(most, **({"min_token_prob": least, "use_tree_spec": False} if chain else {}))


class Lookup:
    """vLLM's n-gram method: what followed the first place of the longest n-gram that ends the own text."""

    def begin(self, rollouts: Rollouts) -> Sample:
        return _LookupSample(rollouts.prompt)

    def new_policy(self) -> None:
        """Does nothing: nothing is kept."""


class _LookupSample:
    def __init__(self, prompt: Tokens) -> None:
        self._text = prompt

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        for length in range(LONGEST, SHORTEST - 1, -1):
            if len(self._text) > length:
                grams = np.lib.stride_tricks.sliding_window_view(self._text[:-1], length)
                if (found := np.flatnonzero((grams == self._text[-length:]).all(axis=1))).size:
                    return a_chain(self._text[found[0] + length :][:most])
        return a_chain(EMPTY)

    def extend(self, tokens: Tokens) -> None:
        self._text = np.concatenate((self._text, tokens))

    def close(self) -> None:
        """Does nothing: nothing is kept."""


class Oracle:
    """The bound of chains that copy what followed the last token somewhere in the same prompt's texts, or `anywhere`:
    it chooses the place by what follows, and drafts nothing else.
    """

    def __init__(self, *, anywhere: bool = False) -> None:
        self._texts: dict[str, SuffixIndex] = {}
        self._all = SuffixIndex() if anywhere else None
        self._count = 0

    def begin(self, rollouts: Rollouts) -> Sample:
        self._count += 1
        if (known := self._texts.get(rollouts.problem)) is None:
            known = self._texts[rollouts.problem] = self._all or SuffixIndex()
            known.append(-self._count, rollouts.prompt)
        return _OracleSample(known, self._count, rollouts.prompt[-DEPTH:])

    def new_policy(self) -> None:
        """Does nothing: all is kept."""


class _OracleSample:
    def __init__(self, texts: SuffixIndex, number: int, before: Tokens) -> None:
        self._texts, self._number, self._before, self._last = texts, number, before, before[-1:]

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        ahead = np.concatenate((self._last, actual[:most]))
        lengths = range(1, len(ahead))
        known = next(
            (length for length in lengths if not len(self._texts.successors(ahead[: length + 1])[0])), len(ahead)
        )
        return a_chain(actual[: known - 1])

    def extend(self, tokens: Tokens) -> None:
        self._texts.append(self._number, tokens, self._before)
        self._before, self._last = None, tokens[-1:]  # type: ignore[assignment]

    def close(self) -> None:
        """Does nothing: the text stays."""


def a_chain(tokens: Tokens) -> Draft:
    zeros = np.zeros(len(tokens), np.int32)
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    sure = np.ones(len(tokens), np.float32)
    return Draft(np.ascontiguousarray(tokens), parents, sure, zeros, zeros.astype(np.uint8))


Make = Callable[[], Contender]
