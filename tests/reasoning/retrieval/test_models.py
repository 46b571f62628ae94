"""Real models, in process: a tiny random one in every way, and SmolLM2 on twenty questions."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.reasoning.retrieval import search
from agentspec.reasoning.retrieval.knowledge.base import Document, KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Index
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge
from agentspec.reasoning.retrieval.ralmspec import ralmspec, sequential
from agentspec.reasoning.retrieval.search import SearchStats, VerifiedText
from agentspec.reasoning.settings import RetrievalSettings
from agentspec.types import GenerateRequest, Labels, SamplingParams

pytest.importorskip("torch")

PASSAGES = [json.loads(line) for line in (Path(__file__).parent / "passages.jsonl").read_text().splitlines()]


@contextmanager
def loaded(model: str, cache: Any = None, **options: Any) -> Iterator[Any]:
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    backend = TorchBackend.load(TorchSettings(model=model, **options), cache=cache)
    try:
        yield backend
    finally:
        asyncio.run(backend.aclose())


def passages() -> KnowledgeBase:
    documents = sorted((Document(p["id"], p["text"], p["title"]) for p in PASSAGES), key=lambda one: one.id)
    return IndexKnowledge(Bm25Index.build(documents))


def asking(question: str, seed: int | None, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=max_tokens)
    return GenerateRequest("m", messages=[{"role": "user", "content": question}], sampling=sampling)


@pytest.fixture
def few_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the cache often guesses wrong."""
    monkeypatch.setattr(search, "FOUND", 3)


async def said(run: Any, request: GenerateRequest, **given: Any) -> tuple[str, tuple[int, ...]]:
    events = [event async for event in run(request, knowledge=passages(), **given) if isinstance(event, VerifiedText)]
    return "".join(event.text for event in events), tuple(token for event in events for token in event.token_ids)


@pytest.mark.slow
@pytest.mark.usefixtures("few_found")
def test_a_tiny_model_says_the_same_in_every_way(tiny_model: Path) -> None:
    """Its tokens are bytes and its text is noise, which ends inside characters and retrieves at random."""
    stats = SearchStats()

    async def check(backend: Any) -> None:
        for number, passage in enumerate(PASSAGES[:8]):
            request = asking(passage["question"], number if number % 2 else None, 24)
            plain = await said(sequential, request, backend=backend)
            for stride, asynchronous in itertools.product((3, "os3"), (False, True)):
                given: dict[str, Any] = {"backend": backend, "settings": RetrievalSettings(stride=stride)}  # type: ignore[arg-type]
                assert await said(ralmspec, request, **given, stats=stats, asynchronous=asynchronous) == plain

    with loaded(str(tiny_model)) as backend:
        asyncio.run(check(backend))
    assert stats.guesses and stats.rounds


def test_a_cache_gets_whole_answers(tiny_model: Path) -> None:
    """Rounds of four tokens, each with what stands before it, would take the room of everything else."""
    from agentspec.cache import SuffixCache

    async def check(backend: Any, cache: SuffixCache) -> None:
        for number, passage in enumerate(PASSAGES[:3]):
            request = replace(asking(passage["question"], number, 24), labels=Labels(session=f"s{number}"))
            run = (sequential, ralmspec, ralmspec)[number]
            _, answer = await said(run, request, backend=backend, settings=RetrievalSettings(stride=3))
            stats = cache.stats()
            assert (stats.sequences, stats.partial) == (number + 1, 0)
            [namespace] = cache._pool.namespaces.partitions()
            assert tuple(namespace.shared.tokens(number).tolist()) == answer
        await said(ralmspec, replace(request, store=False), backend=backend)
        assert cache.stats().sequences == 3
        assert cache.forget(session="s1") == 1
        assert cache.stats().sequences == 2

    with SuffixCache.open() as cache, loaded(str(tiny_model), cache=cache) as backend:
        asyncio.run(check(backend, cache))
