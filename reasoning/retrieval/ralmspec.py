"""Iterative retrieval: `sequential` defines the answer, and `ralmspec` gives the same answer sooner.

Every `round_tokens` tokens the last `query_tokens` tokens of question and answer form a query, and the best document
for it is put into the prompt of the next round (RaLM with RaLMSpec; Zhang et al. 2024, arXiv 2401.14021). The paper's
loop generates a stride of rounds and then verifies it; here a batch is sent as soon as its last query is known, and
generation continues meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from agentspec.backends.base import Backend
from agentspec.reasoning.retrieval.events import AnswerBegan, AnswerEnded, Event, Retrieved, VerifiedText
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.documents import RetrievedDocuments
from agentspec.reasoning.retrieval.knowledge.search_client import SearchClient, SearchStats, first, name_of
from agentspec.reasoning.retrieval.round_generator import RoundGenerator
from agentspec.reasoning.retrieval.speculation import SpeculationState
from agentspec.reasoning.settings import RetrievalSettings
from agentspec.speculation.stride import StrideGovernor, StrideMeasurements
from agentspec.types import GenerateRequest


async def sequential(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    settings: RetrievalSettings | None = None,
    stats: SearchStats | None = None,
) -> AsyncGenerator[Event]:
    """Search, then generate a round, until the answer ends. This defines the answer. Raises as `ralmspec` does.

    A search asks for as many documents as speculation does: the best one of an approximate service may depend on it.
    """
    settings, stats = settings or RetrievalSettings(), stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, settings)
    yield AnswerBegan(generator.reader)
    client = SearchClient(knowledge, settings.search_timeout, stats)
    answer, sent = await generator.begin(), 0
    while not answer.over:
        query = await client.query(await generator.query(answer))
        asked = time.perf_counter()
        found = await client.search([query], settings.prefetch)
        generating = time.perf_counter()
        document = first(found.hits[0])
        stats.count_search(1, 0)
        stats.retrieve += generating - asked
        yield Retrieved(name_of(document), generating - asked)
        before, answer = answer, await generator.generate(answer, document)
        stats.rounds += 1
        stats.generate += time.perf_counter() - generating
        text = answer.certain(generator.stops)
        fresh = answer.token_ids[len(before.token_ids) :], answer.logprobs[len(before.logprobs) :]
        yield VerifiedText(text[sent:], *fresh, name_of(document))
        sent = len(text)
    assert answer.finish is not None
    await generator.record(answer)
    yield AnswerEnded(answer.finish, generator.prompt.tokens, answer.stop_reason)


async def ralmspec(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    settings: RetrievalSettings | None = None,
    stats: SearchStats | None = None,
    measured: StrideMeasurements | None = None,
) -> AsyncGenerator[Event]:
    """Guess documents, verify them in batches and roll back wrong rounds, until the answer ends.

    Text in events is always verified. The call fills `stats`. `measured` holds the times of earlier answers of the same
    model and knowledge base. Closing the iterator cancels generation and searches.

    Raises `KnowledgeBaseError` if a search fails, since the answer cannot continue without its document. Raises
    `InvalidRequestError` for request fields that rounds cannot honour, and what the backend raises.
    """
    settings, stats = settings or RetrievalSettings(), stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, settings)
    yield AnswerBegan(generator.reader)
    client = SearchClient(knowledge, settings.search_timeout, stats)
    governor = StrideGovernor(measured or StrideMeasurements(), settings.stride, settings.asynchronous)
    cache = RetrievedDocuments(settings.cache_bytes)
    async with SpeculationState(generator, client, cache, governor) as state:
        yield await state.retrieve()
        while not state.answer.over:
            state.choose_stride()
            if state.must_retrieve:
                yield await state.retrieve()
            if state.may_begin and (guess := await state.begin()) is not None:
                yield guess
            state.send()
            await state.advance()
            for event in await state.collect():
                yield event
        assert state.answer.finish is not None
        await generator.record(state.answer)
        yield AnswerEnded(state.answer.finish, generator.prompt.tokens, state.answer.stop_reason)
