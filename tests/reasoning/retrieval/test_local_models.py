"""Retrieval with a local model and real indexes: equal answers, thoughts next to the text, and the cache."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec import ralmspec
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.cache import SuffixCache
from agentspec.reasoning.retrieval.backend import RetrievalBackend
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge
from agentspec.reasoning.settings import RaLMSpecSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams

pytestmark = pytest.mark.anyio
PASSAGES = [json.loads(line) for line in (Path(__file__).parent / "passages.jsonl").read_text().splitlines()]
KINDS = ("bm25", "dense", "hnsw")


def asking(number: int, question: str, **fields: Any) -> GenerateRequest:
    """Every other question is sampled, and asks for log-probabilities."""
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": number, "logprobs": True} if number % 2 else {}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "repetition_penalty": 1.2} | drawn)
    return GenerateRequest("m", messages=[{"role": "user", "content": question}], sampling=sampling, **fields)


def reader(backend: Any, knowledge: IndexKnowledge) -> RetrievalBackend:
    return RetrievalBackend("reader", RaLMSpecSettings(base="m", knowledge="k"), ModelRef(backend, "m"), knowledge)


async def answered(deltas: AsyncGenerator[Delta]) -> tuple[list[Any], list[int], list[int]]:
    """What a client gets of an answer, its tokens, and those that have a log-probability."""
    found = [delta async for delta in deltas]
    shown = [(one.text, one.extra) for one in found]
    return shown, [t for one in found for t in one.token_ids], [p.token_id for one in found for p in one.logprobs]


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        ("bm25", 2),
        *(pytest.param(kind, 3, marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, 200, marks=[pytest.mark.long, pytest.mark.timeout(1800)]) for kind in KINDS),
    ],
)
async def test_speculation_changes_no_answer(
    tiny_model: Path, make_index: Callable[..., Any], kind: Any, questions: int
) -> None:
    knowledge = IndexKnowledge(make_index(kind, [f"{passage['title']} {passage['text']}" for passage in PASSAGES]))
    backend = TorchBackend.load(TorchSettings(model=str(tiny_model), device="cpu"))
    for number in range(questions):
        request = asking(number, f"{PASSAGES[number % len(PASSAGES)]['question']} {number}")
        plain = await answered(reader(backend, knowledge).generate(replace(request, speculation=False)))
        assert len(plain[1]) > 4 and plain[2] == (plain[1] if number % 2 else [])
        for stride in (3, None):
            given: dict[str, Any] = {"backend": backend, "knowledge": knowledge, "stride": stride}
            assert await answered(ralmspec(request, **given)) == plain
    await backend.aclose()


async def test_a_cache_gets_whole_answers(tiny_model: Path, make_index: Callable[..., Any]) -> None:
    """Rounds of four tokens, each with what stands before it, would take the room of everything else."""
    knowledge = IndexKnowledge(make_index("bm25", [passage["text"] for passage in PASSAGES]))
    with SuffixCache.open() as cache:
        backend = TorchBackend.load(TorchSettings(model=str(tiny_model), device="cpu"), cache=cache)
        strategy, tokens = reader(backend, knowledge), 0
        for number, speculation in enumerate((False, True, True)):
            request = asking(number, PASSAGES[number]["question"], labels=Labels(session=f"s{number}"))
            request = replace(request, speculation=speculation)
            tokens += len((await answered(strategy.generate(request)))[1])
            assert (cache.stats().sequences, cache.stats().partial) == (number + 1, 0)
        assert cache.stats().tokens == tokens
        await answered(strategy.generate(replace(request, store=False)))
        assert cache.stats().sequences == 3
        assert cache.forget(session="s1") == 1
        assert cache.stats().sequences == 2
        await backend.aclose()
