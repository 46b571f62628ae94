"""How long a new node of a cache on a database server takes to its first draft, with published segments and without."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.cache.synthetic_text import synthetic_tokens
from agentspec.benchmarks.report import Progress
from agentspec.cache import SuffixCache

_MEMORY = 8 << 30  # never reached
_OUTPUT = 200  # tokens of one output
_CONTEXT = 64
_FLUSHED = 1 << 20  # tokens that are written before more are added, so that none is dropped
COLUMNS = ("node", "seconds to the first draft", "processor seconds", "of it mapped, MB", "same draft as the source")


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node that was opened: wall and processor seconds to its first draft, and bytes of mapped segments."""

    variant: str
    seconds: float
    processor_seconds: float
    mapped_bytes: int
    same_draft: bool


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
                "yes" if one.same_draft else "NO",
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
        expected = _draft(cache, text)
    variants = [("with published segments", remote), ("without", None)] * rounds
    return OpeningReport(tokens, published, [_opened(address, text, expected, *one) for one in variants])


def _opened(address: str, text: Any, expected: list[int], variant: str, remote: str | None) -> OpenedNode:
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    with SuffixCache.open(address, mode="follower", memory_bytes=_MEMORY, remote=remote) as cache:
        draft = _draft(cache, text)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        return OpenedNode(variant, seconds, used, cache.stats().segment_bytes, draft == expected)


def _draft(cache: SuffixCache, text: Any) -> list[int]:
    with cache.request(text[1000:1064], store=False) as request:
        return [int(token) for token in request.draft(32).tokens]
