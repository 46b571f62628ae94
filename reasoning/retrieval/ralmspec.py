"""Iterative retrieval: sequential, which defines the answer, and speculative, which gives the same one sooner.

Every `round_tokens` tokens the last `query_tokens` of question and answer are a query, and its best document stands in
the prompt of the next round (RaLM with RaLMSpec; Zhang et al. 2024, arXiv 2401.14021). The paper's loop generates a
stride of rounds and then verifies; here a batch is asked as soon as its last query is known, while rounds go on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from agentspec.backends.base import Backend
from agentspec.reasoning.retrieval.events import AnswerEnded, Event, Retrieved, VerifiedText
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.documents import RetrievedDocuments
from agentspec.reasoning.retrieval.knowledge.search_client import SearchClient, SearchStats, first, name_of
from agentspec.reasoning.retrieval.round_generator import RoundGenerator
from agentspec.reasoning.retrieval.settings import RetrievalSettings
from agentspec.reasoning.retrieval.speculation import SpeculationState
from agentspec.speculation.stride import RequestStride, StrideGovernor
from agentspec.types import GenerateRequest


async def sequential(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    settings: RetrievalSettings | None = None,
    stats: SearchStats | None = None,
) -> AsyncGenerator[Event]:
    """Search, then generate a round, until the answer is over: this defines the answer. Raises as `ralmspec` does."""
    settings, stats = settings or RetrievalSettings(), stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, settings)
    client = SearchClient(knowledge, settings.search_timeout, stats)
    answer, sent = await generator.begin(), 0
    while not answer.over:
        query = await client.query(await generator.query(answer))
        asked = time.perf_counter()
        found = await client.search([query], 1)
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
    yield AnswerEnded(answer.finish, generator.prompt.tokens)


async def ralmspec(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    settings: RetrievalSettings | None = None,
    stats: SearchStats | None = None,
    pace: RequestStride | None = None,
    cache: RetrievedDocuments | None = None,
) -> AsyncGenerator[Event]:
    """Guess documents, verify them in batches, take back what was wrong, until the answer is over.

    Text in events is verified. `stats` is filled on the way. `pace` is what earlier answers of the same model and
    knowledge base have measured; `cache` may be given to several answers of one tenant. Closing the iterator cancels
    what is generated and asked.

    Raises `KnowledgeBaseError` where the knowledge base fails, at the beginning or later: without it nobody knows how
    the answer goes on. Raises `InvalidRequestError` for what rounds cannot honour, and what the backend raises.
    """
    settings, stats = settings or RetrievalSettings(), stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, settings)
    client = SearchClient(knowledge, settings.search_timeout, stats)
    governor = StrideGovernor(pace or RequestStride(), settings.stride, settings.asynchronous)
    cache = RetrievedDocuments(settings.cache_bytes) if cache is None else cache
    async with SpeculationState(generator, client, cache, governor) as state:
        yield await state.retrieve(settings.prefetch)
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
        yield AnswerEnded(state.answer.finish, generator.prompt.tokens)
