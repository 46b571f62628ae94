"""The native suffix index and drafter. `tests/cache/reference.py` implements both in plain Python and explains them.

Several threads may call any method at once; the native code releases the interpreter lock. Arrays of tokens are as
`as_tokens` returns them. An unknown sequence raises `KeyError`, a bad argument `InvalidRequestError`, and damage
`CacheFormatError`.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentspec.errors import ConfigurationError
from agentspec.types import Draft

if TYPE_CHECKING:
    from agentspec.cache.tokens import Tokens


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
merging gives back, take a step for every 65,536 tokens.

New tokens join the newest sorted run up to `tail` tokens, and others are at least `ratio` times as large as the next;
both change the speed only. `capacity` positions are handed out in all: one for each token, and a few for each sequence.
An index of `shapes` keeps common tokens only, one other token in place of each rare one, and finds what followed a
context of the same shape: other names, numbers and paths between the same words and signs.
"""

IndexDrafter = _native.Drafter
"""Makes calibrated draft trees from matches of all lengths and indexes, and learns how reliable each kind is.

`observe(indexes, context, tokens)` learns that the tokens followed the context, before any index gets them;
`observe_end(token)` that an output ended so; `keep_ends(tokens)` forgets all other tokens that did. Of more than
`scan_limit` new matches the drafter looks at about so many, which their positions choose: the same ones however runs
have merged. `propose_batch` makes the drafts.
"""

Sourced = tuple[SuffixIndex, int]
"""An index, and the `Source` that drafts report for its tokens."""

DraftJob = tuple[IndexDrafter, Sequence[Sourced], "Tokens", int, float, bool]
"""A drafter, the indexes and the context that it drafts from, most tokens, least probability, and whether the draft is
a chain: no branches, each node the likeliest child of the last, for targets that verify no trees."""


def propose_batch(jobs: Sequence[DraftJob], patience: float | None = None) -> list[Draft]:
    """Draft for all jobs in one call, over several threads where there is enough to do.

    A draft is a tree that continues the context, likeliest paths first; at equal match length an earlier index goes
    first, and indexes of shapes are asked for what no other index offers. One that is not complete after `patience`
    seconds is what there is of it then: its likeliest part. Each access to an array of a draft makes the array anew.
    Raises `InvalidRequestError` for an index given twice or an unknown source.
    """
    return _native.draft_batch(jobs, patience)  # type: ignore[return-value]  # a native tree has all that a Draft has


are_tokens = _native.are_tokens
"""Whether an array is as `as_tokens` returns it, and not empty."""

# Passages, for engines that find on the device where in them a text has got to.

Passages = _native.Passages
"""The end of one request's text, and its likeliest continuations: `rows` rows of `width` tokens, of which the first
`overlap` are text before them. `advance` follows further tokens; `left` is the most tokens that a row has left, 0 where
the text differs from all. One thread at a time may use it."""

PassageJob = tuple[Passages, IndexDrafter | None, Sequence[Sourced], Sequence[int]]
"""A request's passages, the drafter and the indexes to search for others with, and what goes before those found."""

find_passages = _native.find_passages
"""Replace the passages of all jobs by paths of draft trees of at most `nodes` nodes, searched for in one call. None
holds a token that is not below `vocabulary`. Returns those of all jobs, one after the other: of each its tokens, filled
up with -1, then the probability of each token after those before it, in parts of `CERTAIN`, -1 where it is unknown.
Raises as `propose_batch`, before anything is replaced."""

CERTAIN = 1 << 16
