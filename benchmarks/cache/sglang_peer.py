"""The drafter of SGLang's NGRAM algorithm as a peer: its C++ corpus, compiled from an installed or unpacked SGLang.

SGLang (Apache-2.0) is not a dependency, and nothing of it is kept. The corpus is fed as SGLang's worker feeds it
(`sglang/srt/speculative/ngram_worker.py`): after each step with the last tokens of the request.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.cache.peer import PeerDraft
from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.recordings.replay import Open, replay, replay_cache
from agentspec.recordings.traces import EncodedCall

DEPTH, LEAST_BREADTH, MOST_BREADTH, CAPACITY = 18, 1, 10, 10_000_000
"""SGLang's defaults: tokens of a path, children of a node, nodes of the trie."""

FROM_EMPTY = "from empty"

_SOURCES = ("result.cpp", "trie.cpp", "suffix_automaton.cpp", "ngram.cpp")
_WRAPPER = """
#include "ngram.h"
using sglang::ngram::Ngram;
extern "C" {
void* corpus_open(long capacity, long depth, long least, long most, long tokens) {
  sglang::ngram::Param param{};
  param.enable = true;
  param.max_trie_depth = depth;
  param.min_bfs_breadth = least;
  param.max_bfs_breadth = most;
  param.draft_token_num = tokens;
  param.match_type = "BFS";
  return new Ngram(capacity, param);
}
void corpus_close(void* corpus) { delete static_cast<Ngram*>(corpus); }
void corpus_put(void* corpus, const int* tokens, long count) {
  static_cast<Ngram*>(corpus)->asyncInsert({{tokens, tokens + count}});
  static_cast<Ngram*>(corpus)->synchronize();
}
void corpus_draft(void* corpus, long request, const int* tail, long count, long length, int* tokens, char* mask) {
  auto found = static_cast<Ngram*>(corpus)->batchMatch({request}, {{tail, tail + count}}, {size_t(length)});
  std::copy(found.token.begin(), found.token.end(), tokens);
  std::copy(found.mask.begin(), found.mask.end(), mask);
}
void corpus_end(void* corpus, long request) { static_cast<Ngram*>(corpus)->eraseMatchState({request}); }
}
"""


@dataclass(frozen=True, slots=True)
class SglangFigures:
    """Tokens per step of trees of `draft_tokens` tokens, the context's last one included; `fed` with whole prompts."""

    draft_tokens: int
    situation: str
    ours: float
    ngram: float
    fed: float


def compare_with_sglang(
    calls: Sequence[EncodedCall], draft_tokens: int, library: ctypes.CDLL
) -> Iterator[SglangFigures]:
    """Both from empty, both after a restart in the middle, and both for two tenants who have every other session.

    SGLang's corpus is gone after a restart, and is one for all tenants; our cache is on disk, and apart by tenant.
    """
    budget, half = draft_tokens - 1, len(calls) // 2

    def ngram(replayed: Sequence[EncodedCall]) -> list[float]:
        return [_ngram_replay(replayed, draft_tokens, library, fed) for fed in (False, True)]

    alone = ngram(calls)
    yield SglangFigures(draft_tokens, FROM_EMPTY, replay_cache(calls, budget).tokens_per_step, *alone)
    if half:
        kept = _replay_restarted(calls[:half], calls[half:], budget)
        yield SglangFigures(draft_tokens, "after a restart", kept, *ngram(calls[half:]))
    yield SglangFigures(draft_tokens, "two tenants", _replay_tenants(calls, budget), *alone)


def _ngram_replay(calls: Sequence[EncodedCall], draft_tokens: int, library: ctypes.CDLL, fed: bool) -> float:
    with closing(NgramCorpus(library, draft_tokens)) as corpus:
        return replay(calls, corpus.requests(with_prompts=fed), draft_tokens - 1).tokens_per_step


def _replay_restarted(before: Sequence[EncodedCall], after: Sequence[EncodedCall], budget: int) -> float:
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        for calls in (before, after):
            with SuffixCache.open(folder) as cache:
                found = replay(calls, _opener(cache, lambda call: "one"), budget)
    return found.tokens_per_step


def _replay_tenants(calls: Sequence[EncodedCall], budget: int) -> float:
    sessions = {session: number for number, session in enumerate(dict.fromkeys(call.session for call in calls))}
    with SuffixCache.open() as cache:
        return replay(
            calls, _opener(cache, lambda call: f"tenant-{sessions[call.session] % 2}"), budget
        ).tokens_per_step


def _opener(cache: SuffixCache, tenant: Callable[[EncodedCall], str]) -> Open:
    return lambda call: cache.request(call.prompt, namespace=tenant(call), session=call.session)


def compile_corpus(package: Path, folder: Path) -> ctypes.CDLL:
    """SGLang's corpus as a library, built in `folder` from the source in the folder of the `sglang` package.

    Raises `ConfigurationError` without a compiler, or where the source is missing or not as in 0.5.23.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    found = next(package.rglob("ngram_corpus/ngram.h"), None)
    if compiler is None or found is None:
        lacking = "a C++ compiler" if compiler is None else f"ngram_corpus/ngram.h below {str(package)!r}"
        raise ConfigurationError(f"comparing with SGLang needs {lacking}")
    wrapper, library = folder / "wrapper.cpp", folder / "corpus.so"
    wrapper.write_text(_WRAPPER)
    sources = [str(wrapper), *(str(found.parent / name) for name in _SOURCES)]
    options = ["-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", f"-I{found.parent}"]
    done = subprocess.run([compiler, *options, *sources, "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigurationError(f"SGLang's corpus does not compile: {done.stderr.strip()[-500:]}")
    loaded = ctypes.CDLL(str(library))
    loaded.corpus_open.restype = ctypes.c_void_p
    return loaded


class NgramCorpus:
    """The corpus of one server that verifies `draft_tokens` tokens a step, the last one of the context included."""

    def __init__(self, library: ctypes.CDLL, draft_tokens: int) -> None:
        self._library, self._tokens = library, draft_tokens
        numbers = map(ctypes.c_long, (CAPACITY, DEPTH, LEAST_BREADTH, MOST_BREADTH, draft_tokens))
        self._corpus = ctypes.c_void_p(library.corpus_open(*numbers))
        self._numbers = count()

    def close(self) -> None:
        self._library.corpus_close(self._corpus)

    def put(self, tokens: Tokens) -> None:
        """Insert a text: all its parts of up to `DEPTH` tokens."""
        self._library.corpus_put(self._corpus, _pointer(tokens), ctypes.c_long(len(tokens)))

    def draft(self, request: int, tail: Tokens, length: int) -> PeerDraft:
        """The tree for a request by its last tokens and the length of its text. It says nothing of probabilities."""
        tokens, mask = np.zeros(self._tokens, np.int32), np.zeros((self._tokens, self._tokens), np.uint8)
        sizes = ctypes.c_long(len(tail)), ctypes.c_long(length)
        self._library.corpus_draft(
            self._corpus, ctypes.c_long(request), _pointer(tail), *sizes, _pointer(tokens), _pointer(mask)
        )
        return PeerDraft(tokens[1:], _parents(mask)[1:] - 1, np.zeros(self._tokens - 1, np.float32))

    def requests(self, *, with_prompts: bool) -> Open:
        """Opens requests for a replay, as the worker does; `with_prompts` inserts whole prompts too."""

        @contextmanager
        def opened(call: EncodedCall) -> Iterator[NgramRequest]:
            number = next(self._numbers)
            if with_prompts:
                self.put(call.prompt)
            yield NgramRequest(self, number, call.prompt)
            self._library.corpus_end(self._corpus, ctypes.c_long(number))

        return opened


@dataclass(slots=True)
class NgramRequest:
    corpus: NgramCorpus
    number: int
    text: Tokens  # prompt and output

    def draft(self, max_tokens: int) -> PeerDraft:
        return self.corpus.draft(self.number, self._tail(), len(self.text))

    def extend(self, tokens: Tokens) -> None:
        self.text = np.concatenate((self.text, tokens))
        self.corpus.put(self._tail())

    def _tail(self) -> Tokens:
        return np.ascontiguousarray(self.text[-DEPTH:])


def _parents(mask: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Each node's parent by the ancestors that it may attend to: the latest of them; -1 for the root."""
    ancestors = np.tril(mask, -1)
    latest = np.where(ancestors.any(axis=1), ancestors.shape[1] - 1 - ancestors[:, ::-1].argmax(axis=1), -1)
    return latest.astype(np.int32)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
