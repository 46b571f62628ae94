"""Retrieval with a local model and real indexes: equal answers, thoughts next to the text, and the cache."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator
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


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local model that thinks unless the request switches it off, and whose answers are `script`."""

    class Scripted(TorchBackend):
        script: list[int]

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
            ids, script = list(request.token_ids or ()), self.script
            said = max(n for n in range(len(script) + 1) if ids[len(ids) - n :] == script[:n])
            until = said + (request.sampling.max_tokens or 0)
            tokens = tuple(script[said:until])
            yield Delta(self.decode(tokens), tokens, finish_reason="length" if until < len(script) else "stop")

    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model, folder)
    template = folder / "chat_template.jinja"
    thinks = "{{ '<think>' if enable_thinking | default(true) else '<think></think>' }}"
    template.write_text(template.read_text() + thinks)
    loaded = Scripted.load(TorchSettings(model=str(folder), device="cpu"))
    yield loaded
    asyncio.run(loaded.aclose())


@pytest.mark.parametrize(
    ("thinks", "script", "thoughts", "text"),
    [
        (True, "hm</think>\n\nAn ox.", "hm", "An ox."),
        (True, "hm, an ox", "hm, an ox", ""),
        (False, "An ox. </think>", "", "An ox. </think>"),
    ],
)
async def test_thoughts_are_no_part_of_the_answer(
    thinking: Any, make_index: Callable[..., Any], thinks: bool, script: str, thoughts: str, text: str
) -> None:
    thinking.script = thinking.encode(script)
    strategy = reader(thinking, IndexKnowledge(make_index("bm25", ["An ox is an animal."])))
    request = asking(0, "Which animal?", template_arguments={"enable_thinking": thinks})
    deltas = [delta async for delta in strategy.generate(request)]
    assert "".join(delta.extra.get("reasoning_content", "") for delta in deltas) == thoughts
    assert "".join(delta.text for delta in deltas) == text and deltas[-1].finish_reason == "stop"
