"""Speculative retrieval gives what sequential retrieval gives, byte for byte, whatever the knowledge base does."""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentspec import ralmspec
from agentspec.backends.base import Capabilities
from agentspec.errors import ContextLengthError, KnowledgeBaseError
from agentspec.reasoning.retrieval.backend import RetrievalBackend
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, SearchResult, ranked
from agentspec.reasoning.settings import RaLMSpecSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, Message, SamplingParams, Usage

pytestmark = pytest.mark.anyio

WORDS = [f" {first}{second}" for first in ("ra", "lo", "mi", "su", "ke") for second in ("n", "t", "é", "x", "日")]
END = 256 + len(WORDS)
_PART = re.compile("|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)))


class HashedModel:
    """A model whose next token is a hash of all that stands before it: any difference in a prompt shows at once.

    Tokens are words and single bytes, so that rounds end inside characters.
    """

    def __init__(self, *, latency: float = 0.0, context_length: int | None = None, ends: int = 40) -> None:
        self.capabilities = Capabilities(token_ids=True, logprobs=True, context_length=context_length)
        self.active, self.calls, self.longest = 0, 0, 0
        self.latency, self._ends = latency, ends

    async def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in _PART.finditer(text):
            ids += [*text[at : found.start()].encode(), 256 + WORDS.index(found.group())]
            at = found.end()
        return [*ids, *text[at:].encode()]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        parts = (bytes([i]) if i < 256 else b"" if i == END else WORDS[i - 256].encode() for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        sampling, prompt = request.sampling, list(request.token_ids or ())
        self.calls, self.active = self.calls + 1, self.active + 1
        limit = sampling.max_tokens or 1
        self.longest = max(self.longest, len(prompt) + limit)
        try:
            await asyncio.sleep(self.latency)
            made: list[int] = []
            while len(made) < limit and END not in made:
                made.append(self._next(prompt + made, sampling))
            text = await self.detokenize(made)
            finish = "stop" if END in made else "length"
            usage = Usage(len(prompt), len(made))
            yield Delta(text=text, token_ids=tuple(made), finish_reason=finish, usage=usage)  # type: ignore[arg-type]
        finally:
            self.active -= 1

    async def aclose(self) -> None: ...

    def _next(self, tokens: list[int], sampling: SamplingParams) -> int:
        seed = 0 if sampling.temperature == 0 else sampling.seed or 0
        drawn = zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes(), seed) >> 7
        if drawn % self._ends == 0:
            return END
        bytes_of_two = "é日".encode()
        return 256 + drawn % len(WORDS) if drawn % 3 else bytes_of_two[drawn % len(bytes_of_two)]


@dataclass
class WordMetric:
    async def encode(self, text: str) -> Query:
        return Query(text, frozenset(_PART.findall(text)))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        return np.array([len(query.features & hit.features) for hit in hits], dtype=np.float64)


@dataclass
class FakeKnowledge:
    """Few words, so that ties are the rule. `version` tells the version of the nth search, whose texts are its own."""

    documents: list[Document]
    latency: float = 0.0
    shuffled: bool = False
    fewer: int | None = None
    version: Callable[[int], str] = lambda n: "1"
    failing: Callable[[int], Exception | None] = lambda n: None
    searches: list[int] = field(default_factory=list)
    active: int = 0
    metric: WordMetric = field(default_factory=WordMetric)

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        number = len(self.searches)
        self.searches.append(len(queries))
        self.active += 1
        try:
            await asyncio.sleep(self.latency)
        finally:
            self.active -= 1
        if (error := self.failing(number)) is not None:
            raise error
        version = self.version(number)
        return SearchResult(
            version, tuple(self._best(query, min(count, self.fewer or count), version) for query in queries)
        )

    async def aclose(self) -> None: ...

    def _best(self, query: Query, count: int, version: str) -> tuple[Hit, ...]:
        documents = [replace(one, text=one.text + version) if version != "1" else one for one in self.documents]
        hits = [Hit(one, 0.0, frozenset(_PART.findall(one.text))) for one in documents]
        scores = self.metric.scores(query, hits)
        scored = [replace(hit, score=float(score)) for hit, score in zip(hits, scores, strict=True)]
        best = ranked(scored, scores)[:count]
        if self.shuffled:
            random.Random(len(self.searches)).shuffle(best)
        return tuple(best)


def corpus(size: int, seed: int = 0) -> list[Document]:
    draw = random.Random(seed)
    return [Document(f"d{n:03}", "".join(draw.choices(WORDS, k=12)), title=draw.choice(["", "t"])) for n in range(size)]


def asking(number: int = 0, **sampling: object) -> GenerateRequest:
    draw = random.Random(number)
    given = SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | sampling))  # type: ignore[arg-type]
    return GenerateRequest("m", text="Why" + "".join(draw.choices(WORDS, k=9)), sampling=given)


Answer = tuple[str, tuple[int, ...], str | None]


async def answer_of(deltas: AsyncGenerator[Delta]) -> Answer:
    """The text, the tokens and the finish of an answer."""
    found = [delta async for delta in deltas]
    tokens = tuple(token for delta in found for token in delta.token_ids)
    return "".join(delta.text for delta in found), tokens, found[-1].finish_reason


def strategy(model: Any, knowledge: Any, **knobs: Any) -> RetrievalBackend:
    settings = RaLMSpecSettings(base="m", knowledge="k", **knobs)
    return RetrievalBackend("reader", settings, ModelRef(model, "m"), knowledge)


async def sequentially(request: GenerateRequest, model: Any, knowledge: Any, **knobs: Any) -> Answer:
    return await answer_of(strategy(model, knowledge, **knobs).generate(replace(request, speculation=False)))


class Passages(FakeKnowledge):
    """Finds one of two passages of a document, by the query."""

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        found = await super().search(queries, count)
        hits = tuple(
            tuple(replace(hit, document=replace(hit.document, text=WORDS[len(query.text) % 2] * 5)) for hit in one)
            for query, one in zip(queries, found.hits, strict=True)
        )
        return replace(found, hits=hits)


class Approximate(FakeKnowledge):
    """Looks at as many documents as are asked for."""

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        return await FakeKnowledge(self.documents[:count]).search(queries, count)


@given(data=st.data())
def test_answers_equal_sequential_retrieval_with_any_knowledge_base(data: st.DataObject) -> None:
    """Documents with one text, ties everywhere, answers in another order each time, fewer documents than asked for;
    another passage of the same document is another document, and the best one may depend on the count.
    """
    size = data.draw(st.integers(0, 12))
    documents = corpus(size, data.draw(st.integers(0, 5)))
    if documents and data.draw(st.booleans()):
        documents.append(replace(documents[0], id="a-twin"))
    delays = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=2, max_size=2))
    kind = data.draw(st.sampled_from([FakeKnowledge, Passages, Approximate]))
    knowledge = kind(documents, delays[0], data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 2])))
    document_tokens = data.draw(st.integers(1, 20))
    stride = data.draw(st.sampled_from([None, 1, 2, 5, 16]))
    lengths = {"ROUND_TOKENS": data.draw(st.integers(1, 6)), "QUERY_TOKENS": data.draw(st.integers(1, 20))}
    cached, sought = data.draw(st.sampled_from([0, 2000, 1 << 20])), data.draw(st.integers(1, 8))
    stop = data.draw(st.sampled_from([(), ("日",), (" ra", "éé"), ("x su", "xyz")]))
    request = asking(data.draw(st.integers(0, 99)), max_tokens=data.draw(st.integers(1, 20)), stop=stop)
    model = HashedModel(latency=delays[1])

    async def both() -> None:
        given = {"backend": model, "knowledge": knowledge, "document_tokens": document_tokens}
        found = await answer_of(ralmspec(request, **given, stride=stride))
        assert found == await sequentially(request, model, knowledge, document_tokens=document_tokens)
        assert not any(mark in found[0] for mark in stop)
        assert stop or found[0] == await model.detokenize(found[1])
        assert knowledge.active == model.active == 0

    with (  # the published lengths are constants: with those alone short answers would have one round
        patch.multiple("agentspec.reasoning.retrieval.rounds", **lengths),
        patch.multiple("agentspec.reasoning.retrieval.ralmspec", FOUND=sought, CACHE_BYTES=cached),
    ):
        asyncio.run(both())


async def test_a_batch_asks_for_a_whole_stride() -> None:
    knowledge = FakeKnowledge([Document("only", " ran lot")])
    given: dict[str, Any] = {"backend": HashedModel(ends=10**9), "knowledge": knowledge, "stride": 3}
    await answer_of(ralmspec(asking(max_tokens=40), **given))
    assert knowledge.searches[:3] == [1, 3, 3]


def test_verification_runs_with_the_rounds_that_follow(in_virtual_time: Any) -> None:
    knowledge, searching = FakeKnowledge([Document("only", " ran lot")], latency=0.06), list[int]()

    class Watched(HashedModel):
        def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
            searching.append(knowledge.active)
            return super().generate(request)

    given: dict[str, Any] = {"backend": Watched(latency=0.02, ends=10**9), "knowledge": knowledge, "stride": 1}
    in_virtual_time(answer_of(ralmspec(asking(max_tokens=40), **given)))
    assert sum(searching) > 3


@pytest.mark.parametrize("change", range(1, 8))
async def test_guesses_from_another_version_are_redone(change: int) -> None:
    """The answer is one of those that sequential retrieval gives if the knowledge base changes at some round."""

    def changing(at: int) -> FakeKnowledge:
        return FakeKnowledge(corpus(30), version=lambda n: "1" if n < at else "2")

    model = HashedModel(ends=10**9)
    possible = [await sequentially(asking(1), model, changing(at)) for at in range(1, 8)]
    given: dict[str, Any] = {"backend": model, "knowledge": changing(change), "stride": 2}
    assert await answer_of(ralmspec(asking(1), **given)) in possible


async def test_a_knowledge_base_without_documents_leaves_the_prompt_as_it_is() -> None:
    model, request = HashedModel(), asking(4)
    found = await answer_of(strategy(model, FakeKnowledge([])).generate(request))
    encoded = replace(request, text=None, token_ids=await model.tokenize(request.text or ""))
    assert found[1] == (await answer_of(model.generate(encoded)))[1]


@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("error", [KnowledgeBaseError("gone"), ConnectionError("refused")])
async def test_a_knowledge_base_that_fails_ends_the_answer(nth: int, error: Exception) -> None:
    knowledge = FakeKnowledge(corpus(9), failing=lambda n: error if n == nth else None)
    model = HashedModel()
    with pytest.raises(KnowledgeBaseError, match=r"gone|could not be asked: refused"):
        await answer_of(ralmspec(asking(), backend=model, knowledge=knowledge, stride=2))
    assert model.active == knowledge.active == 0


@pytest.mark.parametrize("speculation", [True, False])
def test_a_slow_knowledge_base_times_out(in_virtual_time: Any, speculation: bool) -> None:
    model, knowledge = HashedModel(), FakeKnowledge(corpus(9), latency=3600.0)
    with pytest.raises(KnowledgeBaseError, match="more than 30 seconds"):
        in_virtual_time(answer_of(strategy(model, knowledge).generate(replace(asking(), speculation=speculation))))
    assert model.active == knowledge.active == 0


@pytest.mark.parametrize("latency", [0.0, 0.05])
@pytest.mark.parametrize("stride", [1, 4])
async def test_a_client_that_leaves_ends_generation_and_searches(stride: int, latency: float) -> None:
    model, knowledge = HashedModel(latency=0.01, ends=10**9), FakeKnowledge(corpus(9), latency=latency)
    deltas = ralmspec(asking(max_tokens=400), backend=model, knowledge=knowledge, stride=stride)
    await anext(deltas)
    reading = asyncio.ensure_future(anext(deltas))
    while not model.active:
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.wait([reading])
    await deltas.aclose()
    assert model.active == knowledge.active == 0


async def test_requests_share_no_documents() -> None:
    """Documents that one request was given are not there for another, even if their ids are the same."""
    model, known = HashedModel(), FakeKnowledge(corpus(9))
    poisoned = FakeKnowledge([Document("d000", " " + "poison" * 3)])
    strategies = [strategy(model, base) for base in (poisoned, known)]
    found = [await answer_of(one.generate(asking(5))) for one in strategies]
    assert found[1] == await sequentially(asking(5), model, known) != found[0]


@pytest.mark.parametrize("length", [70, 90, 400])
async def test_where_the_context_is_short_the_document_is_cut(length: int) -> None:
    model, request = HashedModel(context_length=length, ends=10**9), asking(2, max_tokens=24)
    knowledge = FakeKnowledge([replace(one, text=one.text * 9) for one in corpus(20)])
    found = await answer_of(strategy(model, knowledge).generate(request))
    assert found == await sequentially(request, model, knowledge) and len(found[1]) == 24
    assert model.longest <= length


async def test_a_question_that_does_not_fit_is_refused_and_without_a_length_the_answer_ends_with_the_context() -> None:
    knowledge, request = FakeKnowledge(corpus(3)), asking(max_tokens=None)
    with pytest.raises(ContextLengthError, match="takes 20"):
        await answer_of(strategy(HashedModel(context_length=20), knowledge).generate(asking()))
    model = HashedModel(context_length=50, ends=10**9)
    _, ids, finish = await answer_of(strategy(model, knowledge).generate(request))
    assert finish == "length" and len(ids) == 50 - len(await model.tokenize(request.text or ""))


async def test_in_a_conversation_the_document_stands_before_the_last_question() -> None:
    model = FakeBackend("an answer")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ran"},
        {"role": "assistant", "content": "lot"},
        {"role": "user", "content": [{"type": "text", "text": "mix?"}]},
    ]
    request = GenerateRequest("m", messages=messages, sampling=SamplingParams(temperature=0, max_tokens=4))
    knowledge = FakeKnowledge([Document("d", "It says <|end|> here.", title="Title")])
    await answer_of(strategy(model, knowledge).generate(request))
    prompt = model.prompt_text(model.requests[0])
    assert prompt.endswith("<|user|>\nTitle\nIt says < |end|> here.\n\nmix?<|end|>\n<|assistant|>\n")


@pytest.mark.parametrize(
    ("tokens", "sent", "text"),
    [
        (b"a\n\n", "a\n", "a\n"),  # the last one ended the answer, and reads like the end of the text
        (b"a\n\n", "a\n\n", "a\n\n"),  # a server that leaves the token out by which it ended
        (b"a\n", "a\n", "a\n"),
        (b"a!", "a", "a"),
        (b"!", "", ""),
        (b"", "", ""),
    ],
)
async def test_a_token_that_ends_the_answer_adds_no_text(tokens: bytes, sent: str, text: str) -> None:
    class Ends(HashedModel):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
            yield Delta(sent, tuple(tokens), finish_reason="stop")

    said, _, finish = await answer_of(strategy(Ends(), FakeKnowledge([])).generate(asking()))
    assert (said, finish) == (text, "stop")
