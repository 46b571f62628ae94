"""Rules of the whole answer while documents change: penalties, bad words, forms and tool calls, on local models."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec import ralmspec
from agentspec.errors import InvalidRequestError
from agentspec.reasoning.retrieval.backend import RetrievalBackend
from agentspec.reasoning.retrieval.knowledge.base import Document, KnowledgeBase, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Index
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge
from agentspec.reasoning.retrieval.rounds import RoundGenerator
from agentspec.reasoning.settings import RaLMSpecSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams, StructuredOutputs

pytest.importorskip("torch")
pytestmark = pytest.mark.anyio
PASSAGES = [json.loads(line) for line in (Path(__file__).parent / "passages.jsonl").read_text().splitlines()]
LOOK: dict[str, Any] = {"type": "object", "properties": {"word": {"enum": ["ox", "owl"]}}, "required": ["word"],
                        "additionalProperties": False}  # fmt: skip
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": LOOK}},)
FORM = "[a-c]{10,30}x"
KINDS = ("bm25", "dense", "hnsw")
RULES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 1.3, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ("a", "e", "\x00")},
    "a regex": {"structured_outputs": StructuredOutputs(regex=FORM)},
    "a schema": {"structured_outputs": StructuredOutputs(json=LOOK)},
    "a call": {},
    "a call if it wants": {},
}


def asking(rule: str, question: str = "Which animal?", seed: int | None = None, **fields: Any) -> GenerateRequest:
    called = {"a call": "required", "a call if it wants": "auto"}.get(rule)
    tools: dict[str, Any] = {"tools": TOOLS, "tool_choice": called} if called else {}
    sampling = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=32, **RULES.get(rule, {}))
    return GenerateRequest("m", messages=[{"role": "user", "content": question}], sampling=sampling, **tools, **fields)


class OneDocument:
    """A knowledge base of one document, which hears the queries."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._base = IndexKnowledge(Bm25Index.build([Document("1", "An ox is an animal.")]))
        self.metric = self._base.metric

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        self.heard += [query.text for query in queries]
        return await self._base.search(queries, count)

    async def aclose(self) -> None: ...


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Iterator[Any]:
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    loaded = TorchBackend.load(TorchSettings(model=str(tiny_model), device="cpu"))
    yield loaded
    asyncio.run(loaded.aclose())


async def said(deltas: AsyncGenerator[Delta]) -> tuple[str, tuple[int, ...]]:
    """All that a client gets of an answer, in order, and its tokens."""
    found = [delta async for delta in deltas]
    shown = [(delta.text, *sorted(map(repr, delta.extra.items()))) for delta in found if delta.text or delta.extra]
    return repr(shown), tuple(token for delta in found for token in delta.token_ids)


def reader(backend: Any, knowledge: KnowledgeBase | None = None) -> RetrievalBackend:
    settings = RaLMSpecSettings(base="m", knowledge="k")
    return RetrievalBackend("reader", settings, ModelRef(backend, "m"), knowledge or OneDocument())


@pytest.mark.parametrize("rule", RULES)
async def test_rounds_make_the_answer_that_one_go_makes(backend: Any, rule: str) -> None:
    """With one document for all rounds nothing but the rules tells rounds from a whole answer, drawn greedily."""
    request = asking(rule)
    generator = await RoundGenerator.open(request, backend, 256)
    prompt = await generator.prompt.with_document(Document("1", "An ox is an animal."), 48)
    whole = [delta async for delta in backend.continue_answer(replace(request, split_reasoning=False), prompt, ())]
    tokens = tuple(token for delta in whole for token in delta.token_ids)
    for speculation in (True, False):
        assert (await said(reader(backend).generate(replace(request, speculation=speculation))))[1] == tokens


@pytest.mark.parametrize("rule", ["penalties", "a call", "nothing"])
async def test_every_token_has_its_log_probability(backend: Any, rule: str) -> None:
    request = asking(rule)
    request = replace(request, sampling=replace(request.sampling, logprobs=True, max_tokens=8))
    deltas = [delta async for delta in reader(backend).generate(request)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == 8 and tokens == [one.token_id for delta in deltas for one in delta.logprobs]


def keeps(rule: str, text: str) -> bool:
    """Whether a text keeps the rule, or is the beginning of one that does."""
    if rule == "bad words":
        return not set("ae\x00") & set(text)
    if rule == "a regex":
        return re.fullmatch("[a-c]{0,30}x?", text) is not None
    if rule == "a schema":
        return text.startswith("{"[: len(text)]) and (not text.rstrip().endswith("}") or "word" in json.loads(text))
    return True


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        ("bm25", 2),
        *(pytest.param(kind, 3, marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, 200, marks=[pytest.mark.long, pytest.mark.timeout(1800)]) for kind in KINDS),
    ],
)
async def test_speculation_changes_no_answer(
    backend: Any, make_index: Callable[..., Any], kind: Any, questions: int
) -> None:
    texts = [f"{passage['title']} {passage['text']}" for passage in PASSAGES]
    knowledge = IndexKnowledge(make_index(kind, texts))
    for number in range(questions):
        rule = ("penalties", "a call", "a regex", "a schema", "bad words", "a call if it wants")[number % 6]
        question = f"{PASSAGES[number % len(PASSAGES)]['question']} {number}"
        request = asking(rule, question, None if number % 2 else number)
        plain = [delta async for delta in reader(backend, knowledge).generate(replace(request, speculation=False))]
        assert keeps(rule, "".join(delta.text for delta in plain))
        calls = [call["function"] for delta in plain for call in delta.extra.get("tool_calls", ())]
        assert {call["name"] for call in calls if call.get("name")} <= {"look"}
        tokens = tuple(token for delta in plain for token in delta.token_ids)
        for stride, asynchronous in ((3, False), (3, True), ("os3", True)):
            given: dict[str, Any] = {"backend": backend, "knowledge": knowledge, "stride": stride}
            deltas = [delta async for delta in ralmspec(request, **given, asynchronous=asynchronous)]
            assert [(one.text, one.extra) for one in deltas] == [(one.text, one.extra) for one in plain]
            assert tuple(token for delta in deltas for token in delta.token_ids) == tokens


async def test_a_cache_gets_whole_answers(tiny_model: Path, make_index: Callable[..., Any]) -> None:
    """Rounds of four tokens, each with what stands before it, would take the room of everything else."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend
    from agentspec.cache import SuffixCache

    knowledge = IndexKnowledge(make_index("bm25", [passage["text"] for passage in PASSAGES]))
    with SuffixCache.open() as cache:
        backend = TorchBackend.load(TorchSettings(model=str(tiny_model), device="cpu"), cache=cache)
        strategy, answers = reader(backend, knowledge), list[tuple[int, ...]]()
        for number, speculation in enumerate((False, True, True)):
            request = asking("nothing", PASSAGES[number]["question"], number, labels=Labels(session=f"s{number}"))
            request = replace(request, speculation=speculation)
            answers.append((await said(strategy.generate(request)))[1])
            assert (cache.stats().sequences, cache.stats().partial) == (number + 1, 0)
        assert cache.stats().tokens == sum(map(len, answers))
        await said(strategy.generate(replace(request, store=False)))
        assert cache.stats().sequences == 3
        assert cache.forget(session="s1") == 1
        assert cache.stats().sequences == 2
        await backend.aclose()


async def test_a_call_is_told_as_one_and_its_syntax_is_in_no_query(backend: Any) -> None:
    knowledge = OneDocument()
    strategy = reader(backend, knowledge)
    request = asking("a call", parallel_tool_calls=False)
    request = replace(request, sampling=replace(request.sampling, max_tokens=120))
    deltas = [delta async for delta in strategy.generate(request)]
    (call,) = [call for delta in deltas for call in delta.extra.get("tool_calls", ()) if call["function"].get("name")]
    assert call["function"]["name"] == "look" and deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.text for delta in deltas).strip() == ""
    assert len(knowledge.heard) > 2 and not [query for query in knowledge.heard if "{" in query or "tool" in query]


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes a local model that thinks where the request does not switch it off, and then says a text."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    class Scripted(TorchBackend):
        script: list[int]

        async def continue_answer(
            self, request: GenerateRequest, prompt: Sequence[int], answer: Sequence[int]
        ) -> AsyncGenerator[Delta]:
            until = len(answer) + (request.sampling.max_tokens or 0)
            tokens = tuple(self.script[len(answer) : until])
            yield Delta(self.decode(tokens), tokens, finish_reason="length" if until < len(self.script) else "stop")

    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model, folder)
    template = folder / "chat_template.jinja"
    thinks = "{{ '<think>' if enable_thinking | default(true) else '<think></think>' }}"
    template.write_text(template.read_text() + thinks)
    loaded = Scripted.load(TorchSettings(model=str(folder), device="cpu"))
    yield loaded
    asyncio.run(loaded.aclose())


CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "ox"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("rule", "script", "thoughts", "text", "calls"),
    [
        ("a call if it wants", f"I could say {CALL}.</think>\n\nAn ox.", f"I could say {CALL}.", "An ox.", 0),
        ("a call if it wants", f"hm</think>\n\n{CALL}", "hm", "", 1),
        ("a schema", 'hm</think>\n\n{"word": "ox"}', "hm", '{"word": "ox"}', 0),
        ("penalties", "hm</think>\n\nAn ox.", "hm", "An ox.", 0),
        ("nothing", "hm</think>\n\nAn ox.", "hm", "An ox.", 0),
        ("switched off", "An ox. </think>", "", "An ox. </think>", 0),
    ],
)
async def test_thoughts_are_no_part_of_the_answer(
    thinking: Any, rule: str, script: str, thoughts: str, text: str, calls: int
) -> None:
    thinking.script, strategy = thinking.encode(script), reader(thinking)
    request = asking(rule, template_arguments={"enable_thinking": rule != "switched off"})
    request = replace(request, sampling=replace(request.sampling, max_tokens=200))
    deltas = [delta async for delta in strategy.generate(request)]
    assert "".join(delta.extra.get("reasoning_content", "") for delta in deltas) == thoughts
    assert "".join(delta.text for delta in deltas) == text
    named = [call for delta in deltas for call in delta.extra.get("tool_calls", ()) if call["function"].get("name")]
    assert len(named) == calls and deltas[-1].finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("rule", RULES)
async def test_endpoints_cannot_keep_the_rules(rule: str) -> None:
    """Their rounds know only their own tokens."""
    from agentspec.backends.base import Capabilities

    model = FakeBackend(capabilities=Capabilities(token_ids=True))
    with pytest.raises(InvalidRequestError, match="unless the model is a local one"):
        await said(reader(model).generate(asking(rule)))
