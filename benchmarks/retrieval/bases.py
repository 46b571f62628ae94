"""The knowledge bases of the retrieval benchmark: one corpus in several indexes, and one index behind a delay."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge import folder
from agentspec.reasoning.retrieval.knowledge.base import Document, KnowledgeBase, Metric, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.dense import DenseIndex, Encoder
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge, load_encoder
from agentspec.recordings.calls import json_object, lines
from agentspec.recordings.corpus import read_corpus

NOISE = 0.5  # length of the noise around a corpus vector of length 1
PART = 50_000
SLOW = 0.05  # seconds of delay when only answers are compared
KINDS: tuple[folder.Kind, ...] = ("dense", "hnsw", "bm25")


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    id: str
    text: str


def read_questions(path: Path, count: int) -> list[CorpusQuestion]:
    """`count` questions, spread over a file of JSON lines with `id` and `question`. Raises `ConfigurationError`."""
    try:
        records = (json_object(line, place) for place, line in lines(path))
        questions = [CorpusQuestion(str(record["id"]), str(record["question"])) for record in records]
    except KeyError:
        raise ConfigurationError(f"{path}: want JSON lines with id and question") from None
    step = max(1, len(questions) // count)
    return questions[::step][:count]


class DelayedKnowledge:
    """A knowledge base that delays every search by `delay` seconds, as one behind a network would."""

    def __init__(self, base: KnowledgeBase, delay: float) -> None:
        self._base, self.delay = base, delay

    @property
    def metric(self) -> Metric:
        return self._base.metric

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        await asyncio.sleep(self.delay)
        return await self._base.search(queries, count)

    async def aclose(self) -> None:
        await self._base.aclose()


@dataclass(slots=True)
class Bases:
    """Indexes of one corpus in a temporary folder, and the embedding model that made them."""

    path: Path
    model: str
    encoder: SharedEncoder
    documents: list[Document]
    vectors: NDArray[np.float32]
    loop: asyncio.AbstractEventLoop

    @classmethod
    @contextmanager
    def built(
        cls, corpus: Path, model: str, loop: asyncio.AbstractEventLoop, progress: Callable[[str], None]
    ) -> Iterator[Bases]:
        """Index `corpus` as dense, HNSW and BM25. Knowledge bases over these indexes run on `loop`."""
        documents = sorted(read_corpus(corpus), key=lambda document: document.id)
        loaded = load_encoder(model)
        encoder = SharedEncoder(loaded)
        try:
            with tempfile.TemporaryDirectory() as path:
                for kind in KINDS:
                    progress(f"indexing {len(documents)} documents: {kind}")
                    folder.build(documents, Path(path) / kind, kind, encoder=encoder, model=model)
                assert encoder.vectors is not None
                yield cls(Path(path), model, encoder, documents, encoder.vectors, loop)
        finally:
            loaded.close()

    @property
    def dimensions(self) -> int:
        return self.encoder.dimensions

    def opened(self, kind: str) -> AbstractContextManager[KnowledgeBase]:
        """Open one of `KINDS`, or the delayed one."""
        return self.delayed(SLOW) if kind == "delayed" else self.local(kind)

    @contextmanager
    def local(self, kind: str) -> Iterator[KnowledgeBase]:
        base = folder.open_folder(self.path / kind, lambda name: self.encoder)
        with self._closing(base):
            yield base

    @contextmanager
    def synthetic(self, size: int) -> Iterator[KnowledgeBase]:
        """An exact index of `size` vectors, which are corpus vectors plus seeded noise, with the corpus's texts."""
        import faiss

        index = faiss.IndexFlatIP(self.dimensions)
        draw = np.random.default_rng(0)
        for start in range(0, size, PART):
            near = self.vectors[np.arange(start, min(start + PART, size)) % len(self.vectors)]
            noise = draw.standard_normal(near.shape, dtype=np.float32) * np.float32(NOISE / self.dimensions**0.5)
            noisy = near + noise
            index.add(noisy / np.linalg.norm(noisy, axis=1, keepdims=True))
        sources = [self.documents[at % len(self.documents)] for at in range(size)]
        documents = [Document(f"{at:09}", source.text, source.title) for at, source in enumerate(sources)]
        dense = DenseIndex(documents, index, self.encoder)
        with self._closing(IndexKnowledge(dense, "synthetic")) as base:
            yield base

    @contextmanager
    def delayed(self, delay: float = 0.0) -> Iterator[DelayedKnowledge]:
        """The dense index behind a delay."""
        with self.local("dense") as base:
            yield DelayedKnowledge(base, delay)

    @contextmanager
    def _closing(self, base: Any) -> Iterator[Any]:
        try:
            yield base
        finally:
            self.loop.run_until_complete(base.aclose())


class SharedEncoder:
    """An encoder that several knowledge bases share: it encodes a corpus once, and stays open when one base closes."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.fingerprint, self.dimensions = encoder.fingerprint, encoder.dimensions
        self.vectors: NDArray[np.float32] | None = None

    async def encode(self, text: str) -> NDArray[np.float32]:
        return await self._encoder.encode(text)

    def encode_all(self, texts: Sequence[str], advance: Callable[[int], None]) -> NDArray[np.float32]:
        if self.vectors is None:
            self.vectors = self._encoder.encode_all(texts, advance)
        return self.vectors

    def close(self) -> None: ...
