"""The backend as its users see it: requests in, deltas out, on a real event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from agentspec.backends.base import Backend
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.grammars.grammar import GrammarMatcher, GrammarTrial
from agentspec.cache import SuffixCache
from agentspec.errors import AgentSpecError, ContextLengthError, InvalidRequestError, ShuttingDownError
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG_PROMPT = 1 << 16  # characters: longer ones take turns


@pytest.fixture
async def backend_of(lab: Any) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:

        def make(cache: SuffixCache | None = None, **settings: Any) -> TorchBackend:
            backend = TorchBackend(lab.loaded, TorchSettings(**settings), cache)
            stack.push_async_callback(backend.aclose)
            return backend

        yield make


def ask(sampling: SamplingParams = GREEDY, **fields: Any) -> GenerateRequest:
    prompt = {} if {"messages", "text", "token_ids"} & fields.keys() else {"messages": MESSAGES}
    return GenerateRequest("tiny", sampling=sampling, **prompt, **fields)


async def answer(backend: Backend, request: GenerateRequest) -> tuple[list[int], str, Delta]:
    tokens: list[int] = []
    text, last = "", Delta()
    async for last in backend.generate(request):
        tokens += last.token_ids
        text += last.text
    return tokens, text, last


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_second_pass_is_the_same_in_fewer_steps(backend_of: Any, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=60, logit_bias={256: -100.0})
    with SuffixCache.open() as cache:
        backend = backend_of(cache)
        off = await answer(backend, ask(sampling, speculation=False, store=False))
        first = await answer(backend, ask(sampling))
        second = await answer(backend, ask(sampling, labels=Labels(session="s", workflow="w", step="x")))
        assert off[:2] == first[:2] == second[:2]
        assert off[2].speculation is None
        assert second[2].speculation.steps <= first[2].speculation.steps
        stats = backend.stats()
    assert stats.tokens == 180 and stats.requests == 3 and stats.steps < 180
    assert sum(stats.accepted_by_source.values()) > 0
    assert backend.target.attention == "agentspec_grouped"


async def test_of_a_prediction_no_more_is_read_than_the_answer_may_have(backend_of: Any) -> None:
    """The engine's thread follows it, and everybody's answers wait for that."""
    sampling = SamplingParams(temperature=0, max_tokens=8, logit_bias={256: -100.0, 257: -100.0, 258: -100.0})
    _, _, last = await answer(backend_of(), ask(sampling, prediction="~ " * 200_000))
    assert last.usage.accepted_prediction_tokens + last.usage.rejected_prediction_tokens == 8


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"token_ids": []}, InvalidRequestError, "prompt"),
        ({"token_ids": [259]}, InvalidRequestError, "prompt"),
        ({"token_ids": [-1]}, InvalidRequestError, "prompt"),
        ({"text": ""}, InvalidRequestError, "prompt"),
        ({"sampling": SamplingParams(logit_bias={259: 1.0})}, InvalidRequestError, "logit_bias"),
        ({"sampling": SamplingParams(stop_token_ids=(259,))}, InvalidRequestError, "stop_token_ids"),
        ({"sampling": SamplingParams(stop_token_ids=(-1,))}, InvalidRequestError, "stop_token_ids"),
        ({"messages": [{"role": "x", "content": ""}]}, InvalidRequestError, "messages"),
        ({"token_ids": [1] * 512}, ContextLengthError, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, ContextLengthError, "messages"),
        ({"token_ids": [1] * 500, "sampling": SamplingParams(max_tokens=13)}, ContextLengthError, "prompt"),
        ({"token_ids": [1] * 500, "sampling": SamplingParams(min_tokens=13)}, ContextLengthError, "prompt"),
        # Nothing is compiled for a prompt that does not fit: else the form would be at fault.
        (
            {"token_ids": [1] * 512, "sampling": SamplingParams(structured_outputs=StructuredOutputs(regex="("))},
            ContextLengthError,
            "prompt",
        ),
    ],
)
async def test_a_refusal_names_the_wrong_parameter(
    backend_of: Any, fields: dict[str, Any], error: type[AgentSpecError], param: str
) -> None:
    with pytest.raises(error) as caught:
        await answer(backend_of(), ask(**fields))
    assert caught.value.param == param and type(caught.value) is error


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        (500, 13, r"input length and `max_tokens` exceed context limit: 500 \+ 13 > 512; ask for at most 12 tokens"),
        (512, 13, "prompt is too long: 512 tokens > 512 maximum"),
    ],
)
async def test_a_prompt_that_does_not_fit_is_refused_in_words_that_agents_read(
    backend_of: Any, prompt: int, max_tokens: int, says: str
) -> None:
    """Claude Code finds these numbers in Anthropic's own words, and asks again for less."""
    with pytest.raises(ContextLengthError, match=f"^{says}$"):
        await answer(backend_of(), ask(token_ids=[1] * prompt, sampling=SamplingParams(max_tokens=max_tokens)))


async def drained(stream: AsyncIterator[Delta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def test_a_form_that_fails_on_the_way_ends_its_answer_alone(
    backend_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, advance = backend_of(), GrammarMatcher.advance

    def failing(state: GrammarMatcher, token: int) -> None:
        if state._grammar.param == "structured_outputs" and len(state._tokens) == 3:
            raise InvalidRequestError("the answer cannot go on in the required form", param="structured_outputs")
        advance(state, token)

    monkeypatch.setattr(GrammarMatcher, "advance", failing)
    formed = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z]{12}"))
    plain, failed = await asyncio.gather(answer(backend, ask()), answer(backend, ask(formed)), return_exceptions=True)
    assert isinstance(failed, InvalidRequestError) and failed.param == "structured_outputs"
    monkeypatch.undo()
    assert not isinstance(plain, BaseException) and (await answer(backend, ask()))[:2] == plain[:2]
    assert re.fullmatch("[a-z]{12}", (await answer(backend, ask(formed)))[1])


async def test_a_large_grammar_delays_no_other_request(backend_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, tried, go_on = backend_of(), threading.Event(), threading.Event()

    def slow(trial: GrammarTrial, setup: Any, source: str) -> None:
        tried.set()
        assert go_on.wait(60)

    monkeypatch.setattr(GrammarTrial, "check", slow)
    formed = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z]{500}|&"))
    several = [asyncio.create_task(answer(backend, ask(formed))) for _ in range(20)]
    await asyncio.to_thread(tried.wait, 60)
    for _ in range(3):
        assert (await answer(backend, ask()))[1]
        small = replace(formed, structured_outputs=StructuredOutputs(regex="[a-z]{9}"))
        assert re.fullmatch("[a-z]{9}", (await answer(backend, ask(small)))[1])
    assert not any(task.done() for task in several)
    go_on.set()
    assert len({text for _, text, _ in await asyncio.gather(*several)}) == 1


async def test_long_prompts_of_one_tenant_hold_up_no_other(backend_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however long reading one takes."""
    backend, go, prepare = backend_of(), threading.Event(), TorchBackend._prepare

    def slow(self: TorchBackend, request: GenerateRequest, **how: Any) -> Any:
        assert request.tenant != "hog" or go.wait(60)
        return prepare(self, request, **how)

    monkeypatch.setattr(TorchBackend, "_prepare", slow)
    hogs = [asyncio.create_task(answer(backend, ask(text="x" * (LONG_PROMPT + 1), tenant="hog"))) for _ in range(64)]
    await asyncio.sleep(0)
    await answer(backend, ask(tenant="other"))
    with pytest.raises(ContextLengthError):
        await answer(backend, ask(text="x" * (LONG_PROMPT + 1), tenant="other"))
    go.set()
    assert {type(one) for one in await asyncio.gather(*hogs, return_exceptions=True)} == {ContextLengthError}


async def test_closing_fails_running_answers(lab: Any) -> None:
    backend = TorchBackend(lab.loaded, TorchSettings())
    stream = backend.generate(ask(SamplingParams(temperature=0, max_tokens=480, logit_bias={256: -100.0})))
    await anext(stream)
    await backend.aclose()
    with pytest.raises(ShuttingDownError):
        await drained(stream)
    with pytest.raises(ShuttingDownError):
        await answer(backend, ask())
    await backend.aclose()


async def test_an_answer_that_a_pattern_refuses_is_sent_and_not_shared(backend_of: Any) -> None:
    _, text, _ = await answer(backend_of(), ask())
    assert text.strip()
    for pattern, shared in ((re.escape(text.strip()), 0), (r"this is never said \d+", 1)):
        with SuffixCache.open(refuse_patterns=[pattern]) as cache:
            backend = backend_of(cache)
            assert (await answer(backend, ask()))[1] == text
            await backend.aclose()  # the engine has let go of the request
            assert (cache.stats().sequences, cache.stats().refused) == (shared, 1 - shared)


async def test_without_a_cache_an_answer_is_drafted_from_its_own_text_alone(backend_of: Any) -> None:
    backend = backend_of()
    sampling = SamplingParams(temperature=0, max_tokens=60, logit_bias={65: 100.0})  # it repeats itself
    answers = [await answer(backend, ask(sampling, speculation=drafts)) for drafts in (False, True, True)]
    assert answers[0][0] == answers[1][0] == answers[2][0]
    accepted = backend.stats().accepted_by_source
    assert {source for source, count in accepted.items() if count} == {"session"}


@pytest.mark.parametrize("fields", [{}, {"stop": ("e", "th")}, {"temperature": 0.9, "n": 2}], ids=str)
async def test_the_sources_of_tokens_are_the_answer_and_the_counts(backend_of: Any, fields: dict[str, Any]) -> None:
    """Joined they are its text, and they add up to the totals; they change nothing of it."""
    sampling = SamplingParams(
        **{"temperature": 0.0, "seed": 4, "max_tokens": 60, "logit_bias": {256: -100.0}, **fields}
    )
    with SuffixCache.open() as cache:
        backend = backend_of(cache)
        plain = [delta async for delta in backend.generate(ask(sampling, store=False))]
        for label in ("first", "again", "and again"):
            request = ask(sampling, labels=Labels(session=label), prediction=plain[0].text, token_sources=True)
            deltas = [delta async for delta in backend.generate(request)]
            sources = [one for delta in deltas for one in delta.token_sources]
            for choice in range(sampling.n):
                mine = [delta for delta in deltas if delta.index == choice]
                text = "".join(delta.text for delta in mine)
                assert text == "".join(delta.text for delta in plain if delta.index == choice)
                assert text == "".join(one.text for delta in mine for one in delta.token_sources)
            done = deltas[-1].speculation
            assert done is not None
            assert sum(one.source is not None for one in sources) == done.accepted
            assert len({(delta.index, one.forward) for delta in deltas for one in delta.token_sources}) == done.steps
            assert len(sources) == sum(len(delta.token_ids) for delta in deltas)
            assert all(one.source is None or 0 < (one.probability or 0) <= 1 for one in sources)
            assert sum(bool(one.rejected) for one in sources) <= done.drafted - done.accepted
        assert {one.source for one in sources} >= {None, "shared"}
    assert not any(delta.token_sources for delta in plain)
