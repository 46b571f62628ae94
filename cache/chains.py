"""The native draft chains with Python types. This module is thin and holds no algorithm.

A chain is what may follow one request, for targets that verify no trees. `allocate_budget` in
`speculation/governor.py` says in plain Python how much of each chain a step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import _native
from agentspec.cache.index import DEPTH, IndexDrafter, Sourced
from agentspec.cache.tokens import Tokens
from agentspec.errors import InvalidRequestError

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


def propose_chains(
    turns: Sequence[ChainTurn],
    cost: StepCurve,
    *,
    floor: float = 0.0,
    vocabulary: int = 2**31 - 1,
    patience: float | None = None,
) -> list[list[int]]:
    """Search, choose and propose for all requests of a step in one call; returns the proposed tokens of each.

    What requests require is served first; then the chains are cut together where the expected tokens per second are
    highest. No chain holds a token that is not below `vocabulary`, or that is less likely than `floor`: for a request
    that requires more than one token, which has to pay for that request alone, than `floor / len(turns)`. What is not
    found after `patience` seconds is left out; a chain of which more was known before goes on as it is then.
    """
    patience = None if patience is None else min(patience, 1e6)  # the native clock knows no infinity
    native = [
        (
            chain,
            None if drafter is None else drafter.native,
            [(index.native, source) for index, source in indexes],
            context[-DEPTH:],
            limit,
            factor,
            required,
        )
        for chain, drafter, indexes, context, limit, factor, required in turns
    ]
    try:
        return _native.propose_chains(native, len(turns), cost.tokens, cost.seconds, floor, vocabulary, patience)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
