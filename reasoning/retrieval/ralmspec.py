"""Iterative retrieval: sequential, which says what an answer is, and speculative, which gives the same one sooner.

Every `round_tokens` tokens the last `query_tokens` of question and answer are a query, and its best document stands in
the prompt of the next round (RaLM with RaLMSpec; Zhang et al. 2024, arXiv 2401.14021). The paper's loop speaks a stride
of rounds and then verifies; here a batch is asked as soon as its last query is known, and rounds go on meanwhile.
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
    account: SearchStats | None = None,
) -> AsyncGenerator[Event]:
    """Ask, wait, speak a round, until the answer is over: the definition of the answer. Raises as `ralmspec` does."""
    settings, account = settings or RetrievalSettings(), account or SearchStats()
    speaker = await RoundGenerator.open(request, backend, settings)
    library = SearchClient(knowledge, settings.search_timeout, account)
    answer, said = await speaker.begin(), 0
    while not answer.over:
        query = await library.query(await speaker.query(answer))
        asked = time.perf_counter()
        found = await library.search([query], 1)
        spoken = time.perf_counter()
        document = first(found.hits[0])
        account.asked(1, 0)
        account.retrieve += spoken - asked
        yield Retrieved(name_of(document), spoken - asked)
        before, answer = answer, await speaker.speak(answer, document)
        account.rounds += 1
        account.generate += time.perf_counter() - spoken
        text = answer.certain(speaker.stops)
        fresh = answer.token_ids[len(before.token_ids) :], answer.logprobs[len(before.logprobs) :]
        yield VerifiedText(text[said:], *fresh, name_of(document))
        said = len(text)
    assert answer.finish is not None
    yield AnswerEnded(answer.finish, speaker.prompt.tokens)


async def ralmspec(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    settings: RetrievalSettings | None = None,
    account: SearchStats | None = None,
    pace: RequestStride | None = None,
    cache: RetrievedDocuments | None = None,
) -> AsyncGenerator[Event]:
    """Guess documents, verify them in batches, take back what was wrong, until the answer is over.

    Text in events is verified. `account` is filled on the way. `pace` is what earlier answers of the same model and
    knowledge base have measured; `cache` may be given to several answers of one tenant. Closing the iterator cancels
    what is generated and asked.

    Raises `KnowledgeBaseError` where the knowledge base fails, at the beginning or later: without it nobody knows how
    the answer goes on. Raises `InvalidRequestError` for what rounds cannot honour, and what the backend raises.
    """
    settings, account = settings or RetrievalSettings(), account or SearchStats()
    speaker = await RoundGenerator.open(request, backend, settings)
    library = SearchClient(knowledge, settings.search_timeout, account)
    governor = StrideGovernor(pace or RequestStride(), settings.stride, settings.asynchronous)
    cache = RetrievedDocuments(settings.cache_bytes) if cache is None else cache
    async with SpeculationState(speaker, library, cache, governor) as course:
        yield await course.retrieve(settings.prefetch)
        while not course.answer.over:
            course.replan()
            if course.lost:
                yield await course.retrieve()
            if course.may_begin and (guess := await course.begin()) is not None:
                yield guess
            course.send()
            await course.advance()
            for event in await course.settle():
                yield event
        assert course.answer.finish is not None
        yield AnswerEnded(course.answer.finish, speaker.prompt.tokens)
