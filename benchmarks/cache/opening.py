"""How long a new node of a cache on a database server takes to its first draft, with published segments and without."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.cache.synthetic_text import synthetic_tokens
from agentspec.benchmarks.report import Progress
from agentspec.cache import SuffixCache
from agentspec.types import Draft

_MEMORY = 8 << 30  # never reached
_OUTPUT = 200  # tokens of one output
_CONTEXT = 64
_FLUSHED = 1 << 20  # tokens that are written before more are added, so that none is dropped
_DRAFTS, _DRAFT = 400, 32  # drafts that are compared with those of the process that wrote, and tokens of each
COLUMNS = (
    "node",
    "seconds to the first draft",
    "processor seconds",
    "of it mapped, MB",
    f"drafts of {_DRAFTS} as the source's",
    "tokens right in them, to the source's",
)


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node that was opened: wall and processor seconds to its first draft, and bytes of mapped segments.

    `same_drafts` of its drafts are those of the process that wrote. `right` is how many tokens of all were, each draft
    up to its first wrong one, to those of that process: of many short matches a sample is looked at, which depends on
    how an index came to be, so that some drafts differ and none is worse.
    """

    variant: str
    seconds: float
    processor_seconds: float
    mapped_bytes: int
    same_drafts: int
    right: float


@dataclass(slots=True)
class OpeningReport:
    """Nodes that were opened, on a cache of `tokens` tokens that took `publish_seconds` to publish."""

    tokens: int
    publish_seconds: float
    nodes: list[OpenedNode]

    def show(self) -> Iterator[RenderableType]:
        rows = (
            (
                one.variant,
                f"{one.seconds:.2f}",
                f"{one.processor_seconds:.2f}",
                f"{one.mapped_bytes / 1e6:.0f}",
                str(one.same_drafts),
                f"{one.right:.3f}",
            )
            for one in self.nodes
        )
        yield report.table(f"{self.tokens:,} tokens, published in {self.publish_seconds:.1f} s", COLUMNS, rows)

    def data(self) -> dict[str, Any]:
        return asdict(self)


def run_opening(address: str, remote: str, tokens: int, rounds: int, progress: Progress) -> OpeningReport:
    """Fill the empty database at `address`, publish it at `remote`, and open nodes with and without.

    Raises what `SuffixCache.open` raises.
    """
    text = synthetic_tokens(tokens)
    with SuffixCache.open(address, memory_bytes=_MEMORY, remote=remote) as cache:
        for at in range(0, tokens, _OUTPUT):
            with cache.request(text[max(0, at - _CONTEXT) : at]) as request:
                request.extend(text[at : at + _OUTPUT])
            if at % _FLUSHED < _OUTPUT:
                progress(f"{at:,} of {tokens:,} tokens")
                cache.flush()
        began = time.perf_counter()
        cache.publish()
        published = time.perf_counter() - began
        expected = list(_drafts(cache, text))
    variants = [("with published segments", remote), ("without", None)] * rounds
    return OpeningReport(tokens, published, [_opened(address, text, expected, *one) for one in variants])


def _opened(address: str, text: Any, expected: list[Draft], variant: str, remote: str | None) -> OpenedNode:
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    with SuffixCache.open(address, mode="follower", memory_bytes=_MEMORY, remote=remote) as cache:
        drafts = _drafts(cache, text)
        first = next(drafts)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        mine = [first, *drafts]
        same = sum(one.tokens.tolist() == other.tokens.tolist() for one, other in zip(mine, expected, strict=True))
        right = _right(mine, text) / max(1, _right(expected, text))
        return OpenedNode(variant, seconds, used, cache.stats().segment_bytes, same, right)


def _places(text: Any) -> list[int]:
    return [int(place) for place in np.linspace(1000, len(text) - _CONTEXT - _DRAFT, _DRAFTS)]


def _drafts(cache: SuffixCache, text: Any) -> Iterator[Draft]:
    for place in _places(text):
        with cache.request(text[place : place + _CONTEXT], store=False) as request:
            yield request.draft(_DRAFT, chain=True)


def _right(drafts: list[Draft], text: Any) -> int:
    """How many tokens lead the drafts as they stand in the text."""
    count = 0
    for place, draft in zip(_places(text), drafts, strict=True):
        after = text[place + _CONTEXT :][: len(draft.tokens)]
        wrong = np.flatnonzero(draft.tokens != after)
        count += int(wrong[0]) if len(wrong) else len(after)
    return count
