"""The drafters of a replay: agentspec's as its plug-ins use it, the peer's tree, and an oracle."""

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

LONGEST = 40  # tokens of a match that an oracle tells from longer ones


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
        return self._request.draft(most)


class Oracle:
    """The bound of chains that copy what followed the last token somewhere in the same prompt's texts, or `anywhere`,
    or what followed the `longest` match: it chooses the place by what follows, and drafts nothing else.
    """

    def __init__(self, *, anywhere: bool = False, longest: bool = False) -> None:
        self._texts: dict[str, SuffixIndex] = {}
        self._all = SuffixIndex() if anywhere else None
        self._longest = longest
        self._count = 0

    def begin(self, rollouts: Rollouts) -> Sample:
        self._count += 1
        if (known := self._texts.get(rollouts.problem)) is None:
            known = self._texts[rollouts.problem] = self._all or SuffixIndex()
            known.append(-self._count, rollouts.prompt)
        return _OracleSample(known, self._count, rollouts.prompt[-DEPTH:], self._longest)

    def new_policy(self) -> None:
        """Does nothing: all is kept."""


class _OracleSample:
    def __init__(self, texts: SuffixIndex, number: int, before: Tokens, longest: bool) -> None:
        self._texts, self._number, self._context, self._longest = texts, number, before, longest
        self._before: Tokens | None = before

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        behind, most_behind = 1, LONGEST if self._longest else 1
        while behind < min(most_behind, len(self._context)) and self._follows(self._context[-behind - 1 :]):
            behind += 1
        ahead = np.concatenate((self._context[-behind:], actual[:most]))
        ends = range(behind + 1, len(ahead) + 1)
        lost = next((end for end in ends if not self._follows(ahead[:end])), len(ahead) + 1)
        return a_chain(actual[: lost - behind - 1])

    def _follows(self, text: Tokens) -> bool:
        return len(self._texts.successors(text)[0]) > 0

    def extend(self, tokens: Tokens) -> None:
        self._texts.append(self._number, tokens, self._before)
        self._before = None
        self._context = np.concatenate((self._context, tokens))[-DEPTH:]

    def close(self) -> None:
        """Does nothing: the text stays."""


def a_chain(tokens: Tokens) -> Draft:
    zeros = np.zeros(len(tokens), np.int32)
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    sure = np.ones(len(tokens), np.float32)
    return Draft(np.ascontiguousarray(tokens), parents, sure, zeros, zeros.astype(np.uint8))


Make = Callable[[], Contender]
