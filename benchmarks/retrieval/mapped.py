"""A knowledge base of a million documents with random vectors: seconds and memory of building, opening and searching.

`python -m agentspec.benchmarks.retrieval.mapped FOLDER` builds it there (2 GB) unless it is there, then opens it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agentspec.reasoning.retrieval.knowledge.base import Document, Query
from agentspec.reasoning.retrieval.knowledge.dense import Vectors
from agentspec.reasoning.retrieval.knowledge.folder import build, open_folder

COUNT, DIMENSIONS = 1_000_000, 384  # numbers of MiniLM's vectors


class RandomEncoder:
    fingerprint, dimensions = "random", DIMENSIONS

    async def encode(self, text: str) -> Vectors:
        vector: Vectors = _vectors(int(text), 1)[0]
        return vector

    def encode_all(self, texts: Sequence[str], advance: Callable[[int], None]) -> Vectors:
        return _vectors(0, len(texts))

    def close(self) -> None: ...


def _vectors(seed: int, count: int) -> Vectors:
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSIONS), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def _report(what: str, began: float) -> None:
    """The seconds since `began`; memory of the process itself, and with the pages of mapped files."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    status = {name: int(value.split()[0]) >> 10 for name, value in lines if name in ("RssAnon", "VmRSS")}
    print(f"{what}: {time.perf_counter() - began:.2f} s, {status['RssAnon']} MB, mapped too {status['VmRSS']} MB")


def main(folder: Path) -> None:
    encoder = RandomEncoder()
    if not folder.exists():
        began, text = time.perf_counter(), "A passage of a hundred words or so, the same in all. " * 10
        build([Document(f"{n:07d}", text) for n in range(COUNT)], folder, "dense", encoder=encoder, model="random")
        _report("build", began)
    began = time.perf_counter()
    knowledge = open_folder(folder, lambda model: encoder)
    _report("open", began)
    for count in (1, 1, 8, 32):
        queries = [Query("", vector) for vector in _vectors(count, count)]
        began = time.perf_counter()
        asyncio.run(knowledge.search(queries, 20))
        _report(f"search for {count}", began)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
