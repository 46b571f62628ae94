"""A sequence's place in the token cache: recorded, kept back, or lost without harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine import cache_session
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.cache import SuffixCache
from agentspec.cache.index import SuffixIndex, propose_batch
from agentspec.cache.tokens import as_tokens
from agentspec.types import GenerateRequest, Labels, Namespace, SamplingParams, Source

SPACE = Namespace("t", "model")
PROMPT = list(range(100, 120))
ANSWER = list(range(200, 240))


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache


def opened(cache: SuffixCache | None, prompt: list[int] = PROMPT, *, store: bool = True, **labels: Any) -> CacheSession:
    request = GenerateRequest("m", token_ids=prompt, labels=Labels(**labels), store=store)
    return CacheSession.open(cache, request, prompt, SPACE)


def drafted(memory: CacheSession, start: list[int]) -> list[int]:
    memory.extend(start)
    draft = memory.draft(8)
    memory.close(clean=False)
    return [] if draft is None else draft.tokens.tolist()


def test_a_part_of_an_answer_is_its_sessions_and_the_whole_is_shared(cache: SuffixCache) -> None:
    for at in range(0, len(ANSWER), 4):
        prompt = PROMPT + ANSWER[:at]
        part = CacheSession.open(
            cache, GenerateRequest("m", token_ids=prompt, labels=Labels("s"), share=False), prompt, SPACE
        )
        part.extend(ANSWER[at : at + 4])
        part.close(clean=True)
    assert cache.stats().sequences == 0 and drafted(opened(cache, [1, 2, 3]), ANSWER[:6]) == []
    assert drafted(opened(cache, PROMPT, session="s"), ANSWER[:6]) == []  # its transcript is replaced by the prompt
    with cache.request([1], namespace=SPACE, store=False) as other:
        ends, text = other.drafter.ends().tolist(), SuffixIndex()
        text.append(0, as_tokens(PROMPT))
        job = other.drafter, [(text, Source.SESSION)], as_tokens(PROMPT[:-2]), 8, 0.0, False
        learned = propose_batch([job])[0].probabilities.tolist()
        opened(cache, PROMPT, session="s").record(ANSWER)
        assert other.drafter.ends().tolist() == [*ends, ANSWER[-1]]  # only how it ended
        assert propose_batch([job])[0].probabilities.tolist() == learned
    assert cache.stats().sequences == 1
    assert drafted(opened(cache, [1, 2, 3]), ANSWER[:6])[:2] == ANSWER[6:8]
    opened(None).record(ANSWER)


@pytest.mark.parametrize("clean", [True, False])
def test_drafts_are_the_same_whenever_the_cache_learns(clean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a text that was said before, what is counted of them, and what others see in the end."""
    monkeypatch.setattr(cache_session, "DRAFT_SECONDS", 60.0)  # on a busy machine
    seen = []
    for early in (False, True):
        with SuffixCache.open() as cache:
            drafts = list[list[int]]()
            for _ in range(2):
                session = opened(cache)
                for start in range(0, len(ANSWER), 4):
                    draft = session.draft(3)
                    drafts.append([] if draft is None else draft.tokens.tolist())
                    if not early:
                        session.flush_to_cache()
                    session.extend(ANSWER[start : start + 4])
                    if early:
                        session.flush_to_cache()
                session.close(clean=clean)
            seen.append((drafts, replace(cache.stats(), memory_bytes=0)))
    assert seen[0] == seen[1] and (seen[0][1].accepted >= 24) == clean


@pytest.mark.anyio
async def test_only_an_answer_that_ended_teaches_where_answers_end(lab: Any) -> None:
    async def answered(**sampling: Any) -> list[int]:
        asked = GenerateRequest("m", text="be kind", sampling=SamplingParams(temperature=0, max_tokens=5, **sampling))
        return [token async for delta in backend.generate(asked) for token in delta.token_ids]

    with SuffixCache.open() as cache:
        backend = TorchBackend(lab.loaded, TorchSettings(), cache)
        tokens = await answered(ignore_eos=True)
        [partition] = cache._pool.namespaces.partitions()
        assert len(tokens) == 5 and len(partition.drafter.ends()) == 0
        assert await answered(stop_token_ids=tokens[1:2]) == tokens[:2]
        assert partition.drafter.ends().tolist() == tokens[1:2]
        await backend.aclose()
