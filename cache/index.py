"""The native suffix index and drafter. `tests/cache/reference.py` implements both in plain Python and explains them.

Several threads may call any method at once; the native code releases the interpreter lock. Arrays of tokens are as
`as_tokens` returns them. An unknown sequence raises `KeyError`, a bad argument `InvalidRequestError`, and damage
`CacheFormatError`.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.types import Draft


class NativeExtensionError(ConfigurationError, ImportError):
    """The native extension is not built for this interpreter."""


try:
    from agentspec.cache import _native
except ImportError as error:
    raise NativeExtensionError(f"agentspec's native extension is missing: run `pip install -e .` ({error})") from error

DEPTH = 64
"""At most this many tokens of a context are matched."""

# No thread may be inside the native code when the interpreter ends: one that asks for its lock then would abort the
# process. What is registered later, such as the closing of caches, is done before.
atexit.register(_native.quiesce)

SuffixIndex = _native.SuffixIndex
"""Finds the tokens that followed a context in many sequences of token ids. Integers name the sequences.

`append(sequence, tokens, context)` adds tokens at the end of a sequence, a new or an open one; the `context` of a new
one holds the tokens before it, which are matched, never counted or drafted. Queries know of a change when it returns,
and drafting waits for no change. Changes take work in proportion to their tokens; larger merges follow before they
return or, if `deferred`, when `merge_step` is called, until `merging_due` is false. `oldest(tokens)` are the least
recently used sequences that together hold so many tokens. `memory_bytes`, and of them `reclaimable_bytes`, which
merging gives back, take constant time.

At most `tail` tokens are matched one by one, and a sorted run is at least `ratio` times as large as the next; both
change the speed only. `capacity` positions are handed out in all: one for each token, and a few for each sequence.
"""

IndexDrafter = _native.Drafter
"""Makes calibrated draft trees from matches of all lengths and indexes, and learns how reliable each kind is.

`observe(indexes, context, tokens)` learns that the tokens followed the context, before any index gets them;
`observe_end(token)` that an output ended so; `restore` loads the numbers that `state` returned. If a sorted run holds
more than `scan_limit` new matches, the drafter looks at an even sample of them. `propose_batch` makes the drafts.
"""

Sourced = tuple[SuffixIndex, int]
"""An index, and the `Source` that drafts report for its tokens."""

DraftJob = tuple[IndexDrafter, Sequence[Sourced], Tokens, int, float, bool]
"""A drafter, the indexes and the context that it drafts from, most tokens, least probability, and whether the draft is
a chain: no branches, each node the likeliest child of the last, for targets that verify no trees."""


def propose_batch(jobs: Sequence[DraftJob], patience: float | None = None) -> list[Draft]:
    """Draft for all jobs in one call, over several threads where there is enough to do.

    A draft is a tree that continues the context, likeliest paths first; at equal match length an earlier index goes
    first. One that is not complete after `patience` seconds is what there is of it then: its likeliest part. Raises
    `InvalidRequestError` for an index given twice or an unknown source.
    """
    return [Draft(*tree) for tree in _native.draft_batch(jobs, patience)]


# Chains, for targets that verify no trees: `allocate_budget` in `speculation/governor.py` says in plain Python how much
# of each a step verifies.

Chain = _native.Chain
"""One request's chain. `advance` follows further tokens, `replace` sets what follows, with the probability that all
tokens up to each are accepted; `drafted`, `accepted` and `expected` tell of the chain proposed last. One thread at a
time may use it."""


class ChainTurn(NamedTuple):
    """A chain's part in a step: at most `limit` tokens, accepted `factor` times as often as the chain says.

    The request must gain `required` tokens, as in `allocate_budget`.
    With `drafter`, what follows `context` is searched for in `indexes`; without, the chain goes on as it is.
    """

    chain: Chain
    drafter: IndexDrafter | None
    indexes: Sequence[Sourced]
    context: Tokens
    limit: int
    factor: float
    required: float = 0.0


class StepCurve(NamedTuple):
    """Seconds of a step by its tokens: straight lines between these points, level beyond them."""

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]


propose_chains = _native.propose_chains
"""Search, choose and propose for all requests of a step, its `ChainTurn`s, at the `StepCurve` `cost`, in one call;
returns the proposed tokens of each.

What requests require is served first; then the chains are cut together where the expected tokens per second are
highest. No chain holds a token that is not below `vocabulary`, or that is less likely than `floor`: for a request
that requires more than one token, which has to pay for that request alone, than `floor` by the number of requests. What
is not found after `patience` seconds is left out; a chain of which more was known before goes on as it is then.
"""
