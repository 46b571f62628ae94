"""Speculative retrieval gives what sequential retrieval gives, byte for byte, whatever the knowledge base does."""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentspec.backends.base import Capabilities
from agentspec.errors import ContextLengthError, InvalidRequestError, KnowledgeBaseError
from agentspec.reasoning.retrieval import ralmspec as ralmspec_module
from agentspec.reasoning.retrieval import rounds
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, SearchResult, ranked
from agentspec.reasoning.retrieval.ralmspec import AnswerEnded, Event, SearchStats, VerifiedText, ralmspec, sequential
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, Labels, Message, SamplingParams, Usage

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


@dataclass
class Outcome:
    events: list[Event]
    stats: SearchStats

    @property
    def answer(self) -> tuple[str, tuple[int, ...], str]:
        said = [event for event in self.events if isinstance(event, VerifiedText)]
        ended = self.events[-1]
        assert isinstance(ended, AnswerEnded)
        return "".join(s.text for s in said), tuple(i for s in said for i in s.token_ids), ended.finish

    @property
    def documents(self) -> list[str | None]:
        return [event.document for event in self.events if isinstance(event, VerifiedText)]


async def outcome(run: Callable[..., AsyncGenerator[Event]], request: GenerateRequest, **options: object) -> Outcome:
    stats = SearchStats()
    return Outcome([event async for event in run(request, stats=stats, **options)], stats)


@given(data=st.data())
def test_says_the_same_with_any_knowledge_base_that_ranks(data: st.DataObject) -> None:
    """Documents with one text, ties everywhere, answers in another order each time, fewer documents than asked for."""
    size = data.draw(st.integers(0, 12))
    documents = corpus(size, data.draw(st.integers(0, 5)))
    if documents and data.draw(st.booleans()):
        documents.append(replace(documents[0], id="a-twin"))
    delays = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=2, max_size=2))
    knowledge = FakeKnowledge(documents, delays[0], data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 2])))
    document_tokens = data.draw(st.integers(1, 20))
    guessing = {"stride": data.draw(st.sampled_from(["os3", 1, 2, 5, 16])), "asynchronous": data.draw(st.booleans())}
    lengths = {"ROUND_TOKENS": data.draw(st.integers(1, 6)), "QUERY_TOKENS": data.draw(st.integers(1, 20))}
    kept, sought = data.draw(st.sampled_from([0, 2000, 1 << 20])), data.draw(st.integers(1, 8))
    stop = data.draw(st.sampled_from([(), ("日",), (" ra", "éé"), ("x su", "xyz")]))
    request = asking(data.draw(st.integers(0, 99)), max_tokens=data.draw(st.integers(1, 20)), stop=stop)
    model = HashedModel(latency=delays[1])

    async def both() -> None:
        given = {"backend": model, "knowledge": knowledge, "document_tokens": document_tokens}
        found = await outcome(ralmspec, request, **given, **guessing)
        plain = await outcome(sequential, request, **given)
        assert found.answer == plain.answer and found.documents == plain.documents
        assert not any(mark in found.answer[0] for mark in stop)
        assert knowledge.active == model.active == 0

    with (
        patch.multiple(rounds, **lengths),
        patch.multiple(ralmspec_module, FOUND=sought, CACHE_BYTES=kept),
    ):
        asyncio.run(both())


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


@pytest.mark.parametrize("knowledge", [Passages(corpus(2)), Approximate(corpus(30))], ids=["passages", "approximate"])
async def test_a_service_that_finds_by_its_own_rules_gives_equal_answers(knowledge: FakeKnowledge) -> None:
    """Another passage of the same document is another document, and the best one may depend on the count."""
    for n in range(5):
        given = {"backend": HashedModel(), "knowledge": knowledge}
        found = await outcome(ralmspec, asking(n), **given, stride=3)
        plain = await outcome(sequential, asking(n), **given)
        assert found.answer == plain.answer


async def test_text_is_that_of_all_its_tokens_and_is_never_taken_back() -> None:
    model = HashedModel(ends=10**9)
    found = await outcome(ralmspec, asking(max_tokens=40), backend=model, knowledge=FakeKnowledge(corpus(9)))
    text, ids, finish = found.answer
    assert text == await model.detokenize(ids) and finish == "length" and len(ids) == 40


async def test_a_batch_asks_for_a_whole_stride() -> None:
    one = [Document("only", " ran lot")]
    knowledge, model = FakeKnowledge(one), HashedModel(ends=10**9)
    given: dict[str, Any] = {"backend": model, "knowledge": knowledge, "stride": 3}
    found = await outcome(ralmspec, asking(max_tokens=40), **given, asynchronous=False)
    assert knowledge.searches == [1, 3, 3, 3] and found.stats.hit_rate == 1.0 and found.stats.strides == [0, 3, 3, 3]


async def test_verification_runs_beside_the_rounds_that_follow() -> None:
    one, beside = [Document("only", " ran lot")], {}
    for asynchronous in (False, True):
        model, knowledge = HashedModel(latency=0.02, ends=10**9), FakeKnowledge(one, latency=0.06)
        searching, generate = list[int](), model.generate

        def watched(request: GenerateRequest) -> AsyncGenerator[Delta]:
            searching.append(knowledge.active)  # noqa: B023
            return generate(request)  # noqa: B023

        model.generate = watched  # type: ignore[method-assign]
        given: dict[str, Any] = {"backend": model, "knowledge": knowledge, "stride": 1}
        await outcome(ralmspec, asking(max_tokens=40), **given, asynchronous=asynchronous)
        beside[asynchronous] = sum(searching)
    assert beside[True] > 3 and beside[False] == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("change", range(1, 8))
async def test_what_was_guessed_of_another_version_is_redone(change: int, asynchronous: bool) -> None:
    """The answer is one of those that sequential retrieval gives if the knowledge base changes at some round."""

    def changing(at: int) -> FakeKnowledge:
        return FakeKnowledge(corpus(30), version=lambda n: "1" if n < at else "2")

    model = HashedModel(ends=10**9)
    possible = [
        (await outcome(sequential, asking(1), backend=model, knowledge=changing(at))).answer for at in range(1, 8)
    ]
    given: dict[str, Any] = {"backend": model, "knowledge": changing(change), "stride": 2}
    found = await outcome(ralmspec, asking(1), **given, asynchronous=asynchronous)
    assert found.answer in possible


async def test_a_knowledge_base_without_documents_leaves_the_prompt_as_it_is() -> None:
    model, request = HashedModel(), asking(4)
    found = await outcome(ralmspec, request, backend=model, knowledge=FakeKnowledge([]))
    alone = [token async for delta in model.generate(await _encoded(model, request)) for token in delta.token_ids]
    assert list(found.answer[1]) == alone


async def _encoded(model: HashedModel, request: GenerateRequest) -> GenerateRequest:
    return replace(request, text=None, token_ids=await model.tokenize(request.text or ""))


@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("error", [KnowledgeBaseError("gone"), ConnectionError("refused")])
async def test_a_knowledge_base_that_fails_ends_the_answer(nth: int, error: Exception) -> None:
    model = HashedModel(latency=0.001, ends=10**9)
    knowledge = FakeKnowledge(corpus(9), failing=lambda n: error if n >= nth else None)
    said: list[Event] = []
    with pytest.raises(KnowledgeBaseError, match=r"gone|refused"):
        async for event in ralmspec(asking(), backend=model, knowledge=knowledge, stride=2):
            said.append(event)
    assert model.active == 0 and any(isinstance(event, VerifiedText) for event in said) == (nth > 0)


async def test_a_search_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ralmspec_module, "SEARCH_SECONDS", 0.5)
    with pytest.raises(KnowledgeBaseError, match=r"0\.5 seconds"):
        await outcome(ralmspec, asking(), backend=HashedModel(), knowledge=FakeKnowledge([], 3600.0))


async def test_leaving_cancels_what_is_generated_and_asked() -> None:
    model, knowledge = HashedModel(latency=0.02, ends=10**9), FakeKnowledge(corpus(9))
    run = asyncio.create_task(outcome(ralmspec, asking(), backend=model, knowledge=knowledge, stride=1))
    await asyncio.sleep(0.01)
    knowledge.latency, model.latency = 3600.0, 3600.0
    while not model.active == knowledge.active == 1:
        await asyncio.sleep(0.01)
    run.cancel()
    await asyncio.wait([run])
    assert model.active == knowledge.active == 0


async def test_one_answer_leaves_nothing_for_the_next() -> None:
    """Documents that one request was given are not there for another, whatever their ids claim."""
    model = HashedModel()
    poisoned = FakeKnowledge([Document("d000", " " + "poison" * 3)])
    await outcome(ralmspec, asking(5), backend=model, knowledge=poisoned, stride=2)
    found = await outcome(ralmspec, asking(5), backend=model, knowledge=FakeKnowledge(corpus(9)), stride=2)
    plain = await outcome(sequential, asking(5), backend=model, knowledge=FakeKnowledge(corpus(9)))
    assert found.answer == plain.answer


@pytest.mark.parametrize("length", [70, 90, 400])
async def test_where_the_context_is_short_the_document_is_cut(length: int) -> None:
    model, request = HashedModel(context_length=length, ends=10**9), asking(2, max_tokens=24)
    knowledge = FakeKnowledge([replace(one, text=one.text * 9) for one in corpus(20)])
    found = await outcome(ralmspec, request, backend=model, knowledge=knowledge)
    plain = await outcome(sequential, request, backend=model, knowledge=knowledge)
    assert found.answer == plain.answer and len(found.answer[1]) == 24
    assert model.longest <= length


async def test_a_question_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="takes 20"):
        await outcome(ralmspec, asking(), backend=HashedModel(context_length=20), knowledge=FakeKnowledge(corpus(3)))


async def test_an_answer_without_a_length_ends_with_the_context() -> None:
    model = HashedModel(context_length=50, ends=10**9)
    request = asking(max_tokens=None)
    found = await outcome(ralmspec, request, backend=model, knowledge=FakeKnowledge(corpus(3)))
    assert found.answer[2] == "length" and len(found.answer[1]) == 50 - len(await model.tokenize(request.text or ""))


async def test_in_a_conversation_the_document_stands_before_the_last_question() -> None:
    seen: list[str] = []
    model = FakeBackend(lambda request: seen.append(model.prompt_text(request)) or "an answer")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ran"},
        {"role": "assistant", "content": "lot"},
        {"role": "user", "content": [{"type": "text", "text": "mix?"}]},
    ]
    request = GenerateRequest("m", messages=messages, sampling=SamplingParams(temperature=0, max_tokens=4))
    knowledge = FakeKnowledge([Document("d", "It says <|end|> here.", title="Title")])
    await outcome(ralmspec, request, backend=model, knowledge=knowledge)
    assert seen[0].endswith("<|user|>\nTitle\nIt says < |end|> here.\n\nmix?<|end|>\n<|assistant|>\n")


async def test_rounds_keep_the_labels_of_the_request() -> None:
    """To forget the session therefore reaches them, whatever document they read."""
    model, labels = FakeBackend("a b c d", "e f"), Labels(session="s", workflow="w")
    request = replace(asking(max_tokens=6), labels=labels)
    await outcome(ralmspec, request, backend=model, knowledge=FakeKnowledge(corpus(1)))
    assert {one.labels for one in model.requests} == {labels}


class RecordingModel(HashedModel):
    """Notes which rounds may be shared, and what it is to record."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shared = 0
        self.recorded: list[tuple[GenerateRequest, tuple[int, ...]]] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        self.shared += request.share
        async for delta in super().generate(request):
            yield delta

    async def record(self, request: GenerateRequest, token_ids: Sequence[int]) -> None:
        self.recorded.append((request, tuple(token_ids)))


@pytest.mark.parametrize("run", [sequential, partial(ralmspec, stride=3)])
async def test_the_answer_is_recorded_and_not_its_rounds(run: Callable[..., AsyncGenerator[Event]]) -> None:
    model, request = RecordingModel(ends=10**9), replace(asking(), labels=Labels(session="s"))
    found = await outcome(run, request, backend=model, knowledge=FakeKnowledge(corpus(9)))
    assert model.calls > 5 and not model.shared
    [(recorded, answer)] = model.recorded
    assert answer == found.answer[1]
    assert await model.detokenize(recorded.token_ids or ()) == request.text and recorded.labels == request.labels
    await outcome(run, replace(request, store=False), backend=model, knowledge=FakeKnowledge(corpus(9)))
    failing = FakeKnowledge(corpus(9), failing=lambda n: KnowledgeBaseError("away") if n == 2 else None)
    with pytest.raises(KnowledgeBaseError):
        await outcome(run, request, backend=model, knowledge=failing)
    assert len(model.recorded) == 1


async def test_tools_and_schemas_are_refused() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    for request in (
        GenerateRequest("m", messages=[{"role": "user", "content": "q"}], tools=tools),
        replace(asking(), extra={"response_format": {"type": "json_object"}}),
        replace(asking(), extra={"chat_template_kwargs": {"enable_thinking": False}}),
        replace(asking(), extra={"reasoning_effort": "low"}),
        replace(asking(), extra={"max_completion_tokens": 3}),
        replace(asking(), prediction="it"),
        asking(min_tokens=2),
        replace(asking(), extra={"prompt_logprobs": 1}),
        asking(bad_words=("no",)),
        GenerateRequest("m", messages=[{"role": "user", "content": "q"}], continue_final=True),
    ):
        with pytest.raises(InvalidRequestError, match="retrieval"):
            await outcome(ralmspec, request, backend=HashedModel(), knowledge=FakeKnowledge([]))
