"""Drafts for all requests of a server, once per engine step (a round): chains in vLLM's first runner, trees in SGLang.
Independent of the engines' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import NamedTuple

from agentspec.backends.engine_plugin.recorder import PATIENCE, Open, OutputUpdate, RecordingDrafter, wait_ready
from agentspec.backends.engine_plugin.request_state import (
    EMPTY_TREE,
    Deletions,
    Ending,
    FoundTree,
    RequestState,
    TokenTree,
)
from agentspec.backends.engine_plugin.rounds import metric
from agentspec.cache.index import DraftJob, Sourced, propose_batch
from agentspec.cache.tokens import MOST_TOKEN, Tokens
from agentspec.types import Draft, path_length

FREE_ROWS = 200
"""Tokens that a GPU computes while it reads the weights once: 156 on an A100, 295 on an H100, in bfloat16."""
SURE = 0.7  # the most that a large batch asks of a drafted token


class DraftTurn(NamedTuple):
    """A request's part in a round: its new tokens `fresh`, its last tokens `context`, and the draft's length limit.

    `context` is int32; only its last `DEPTH` tokens matter, and it is read during the call only.
    """

    state: RequestState
    fresh: Tokens
    context: Tokens
    limit: int


class ServerDrafter(RecordingDrafter):
    """Drafts chains or trees of tokens for the requests of a server."""

    def __init__(
        self,
        open_cache: Open,
        vocabulary: int,
        *,
        chains: bool = False,
        least: float = 0.0,
        shared: Sequence[Sourced] = (),
        on_close: Callable[[bool], None] = lambda hung: None,
    ) -> None:
        """A draft ends where the probability that it is accepted so far falls below `least`, and chains, of which each
        token costs, where it does so below the share that a round's requests have of `FREE_ROWS`. `shared` are indexes
        that every request is drafted from in addition to its own.
        """
        super().__init__(open_cache, vocabulary, on_close=on_close)
        self._thread = ThreadPoolExecutor(1, "agentspec-search")
        self._late: Future[None] = self._thread.submit(lambda: None)
        self._chains, self._least, self._shared = chains, least, shared
        self._first = 0  # of the rows that are searched for

    def record(self, state: RequestState, fresh: Tokens) -> None:
        """Record new output tokens of a request for which no draft is needed."""
        self._recorder.extend([self._update(state, fresh)])

    def end(self, state: RequestState, ending: Ending | None = None) -> None:
        """End a request and store its output, unless it was aborted; without `ending`, as its tokens say."""
        self._recorder.end(state, ending or state.ending)

    def propose(self, turns: Sequence[DraftTurn]) -> list[TokenTree]:
        """A draft for each request."""
        started = perf_counter()
        updates: list[OutputUpdate] = []
        try:
            updates = [self._update(turn.state, turn.fresh) for turn in turns]
            wait_ready([turn.state for turn in turns if not turn.state.ready.is_set()], PATIENCE)
            trees = self._search(turns)
        except Exception as error:
            self._failures.report(error)
            trees = [EMPTY_TREE for _ in turns]
        self._recorder.extend(updates)  # last: the recorder's thread would compete with the search
        for turn, tree in zip(turns, trees, strict=True):
            turn.state.tree = tree
        metric("seconds").inc(perf_counter() - started)
        metric("empty_rows").inc(sum(not tree.tokens for tree in trees))
        return trees

    def _update(self, state: RequestState, fresh: Tokens) -> OutputUpdate:
        """Follow new tokens, and count those that were drafted."""
        tree, state.tree = state.tree, EMPTY_TREE
        accepted = path_length(*tree, fresh.tolist()) if tree.tokens else 0
        return OutputUpdate(state, state.advance(fresh), len(tree.tokens), accepted, state.source)

    def _search(self, turns: Sequence[DraftTurn]) -> list[TokenTree]:
        """Search for all rows with one deadline, beginning behind the last row that had time in the round before."""
        trees, asked = self._asked(turns)
        first = self._first % max(1, len(asked))
        asked = asked[first:] + asked[:first]
        deletions, until = Deletions.count, perf_counter() + PATIENCE
        drafts = propose_batch([job for _, job in asked], PATIENCE) if asked else []
        late, done = perf_counter() >= until, 0
        again: list[tuple[RequestState, int, DraftJob]] = []
        for (row, job), draft in zip(asked, drafts, strict=True):
            turn, found = turns[row], _tree(draft)
            known = _known(turn) if late else EMPTY_TREE
            done += not late or len(found.tokens) > 0
            if late and len(known.tokens) >= len(found.tokens):
                again.append((turn.state, turn.state.length, (*job[:2], job[2].copy(), 2 * turn.limit, *job[4:])))
                trees[row] = known
            else:
                turn.state.found = FoundTree(found, turn.state.length, deletions)
                trees[row] = TokenTree(found.tokens[: turn.limit], found.parents[: turn.limit])
        self._first = first + done
        metric("searches", "done").inc(done)
        metric("searches", "missed").inc(len(asked) - done)
        if again and self._late.done():
            self._late = self._thread.submit(self._search_late, again, deletions)
        return [within(tree, self._vocabulary) for tree in trees]

    def _asked(self, turns: Sequence[DraftTurn]) -> tuple[list[TokenTree], list[tuple[int, DraftJob]]]:
        """What is known to follow without a search, and the rows that are searched for."""
        least = max(self._least, min(SURE, len(turns) / FREE_ROWS)) if self._chains else self._least
        trees, asked = list[TokenTree](), list[tuple[int, DraftJob]]()
        for row, turn in enumerate(turns):
            predicted = turn.state.from_prediction(turn.limit, least)
            turn.state.source = "prediction" if predicted else "cache"
            trees.append(chain(predicted) if predicted else self._known_chain(turn))
            if not trees[row].tokens and (job := self._job(turn, least)) is not None:
                asked.append((row, job))
        return trees, asked

    def _search_late(self, searches: Sequence[tuple[RequestState, int, DraftJob]], deletions: int) -> None:
        """Search, while the engine's step runs, for what had no time in a round: the next round knows it."""
        with self._failures.caught():
            drafts = propose_batch([job for _, _, job in searches])
            for (state, length, _), draft in zip(searches, drafts, strict=True):
                state.found = FoundTree(_tree(draft), length, deletions)

    def flush(self, timeout: float = 10.0) -> bool:
        wait([self._late], timeout)
        return super().flush(timeout)

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _known_chain(self, turn: DraftTurn) -> TokenTree:
        """What is left of the chain found in the last round, if it is long enough and the new tokens were its first."""
        (tokens, _), length, deletions = turn.state.found
        since = len(turn.fresh)
        left = tokens[since : since + turn.limit]
        if not self._chains or len(left) < turn.limit or length + since != turn.state.length:
            return EMPTY_TREE
        follows = deletions == Deletions.count and turn.state.drafts and tokens[:since] == turn.fresh.tolist()
        return chain(left) if follows else EMPTY_TREE

    def _job(self, turn: DraftTurn, least: float) -> DraftJob | None:
        """The search for a request; None if its cache is not open, or no drafts are made for it. A chain is searched
        for that lasts longer than a round.
        """
        state, cache = turn.state, turn.state.cache  # the recorder may take it away meanwhile
        if cache is None or not state.drafts or turn.limit <= 0:
            return None
        limit = 2 * turn.limit + 1 if self._chains else turn.limit
        return cache.drafter, [*state.indexes, *self._shared], turn.context, limit, least, self._chains


def chain(tokens: Sequence[int]) -> TokenTree:
    return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)))


def _tree(draft: Draft) -> TokenTree:
    return TokenTree(draft.tokens.tolist(), draft.parents.tolist())


def _known(turn: DraftTurn) -> TokenTree:
    """What the last search found to follow, as far as it goes on behind the tokens that came since."""
    found, since = turn.state.found, turn.state.length - turn.state.found.length
    if found.deletions != Deletions.count or not 0 <= since <= len(turn.context):
        return EMPTY_TREE
    edges = {edge: child for child, edge in enumerate(zip(*found.tree, strict=True))}
    node = -1
    for token in turn.context[len(turn.context) - since :].tolist():
        if (node := edges.get((token, node), len(edges))) == len(edges):
            return EMPTY_TREE
    left = within(found.tree, MOST_TOKEN + 1, node)
    return TokenTree(left.tokens[: turn.limit], left.parents[: turn.limit])


def within(tree: TokenTree, vocabulary: int, root: int = -1) -> TokenTree:
    """What follows `root` in the tree, without nodes whose token, or that of one above, is not in the vocabulary."""
    if root < 0 and max(tree.tokens, default=0) < vocabulary:
        return tree
    kept: dict[int, int] = {root: -1}
    tokens, parents = list[int](), list[int]()
    for node, (token, parent) in enumerate(zip(*tree, strict=True)):
        if token < vocabulary and parent in kept:
            kept[node] = len(tokens)
            tokens.append(token)
            parents.append(kept[parent])
    return TokenTree(tokens, parents)
