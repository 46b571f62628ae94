from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.base import Capabilities
from agentspec.errors import UpstreamError
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.delegation.steps import (
    Accepted,
    Ended,
    Event,
    Failed,
    Rewritten,
    Step,
    ThinkingText,
)
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.testing import Answer, Script
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.fakes import delegating
from tests.thinking_model import ThinkingModel

pytestmark = pytest.mark.anyio

IDS = Capabilities(token_ids=True, logprobs=True)
MESSAGES = Capabilities(continue_final=True, logprobs=True)
MODES = pytest.mark.parametrize("abilities", [IDS, MESSAGES], ids=["ids", "messages"])


def knobs(**given: Any) -> SpecReasonSettings:
    return SpecReasonSettings(base="base", small="small", **given)


def ask(**sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return GenerateRequest(model="fast", messages=[{"role": "user", "content": "Two plus two?"}], sampling=params)


def numbered(word: str, last: int = 3) -> Callable[[str], str]:
    """`word 1.`, `word 2.`, ... by the blank lines so far; the last carries an answer mark."""

    def step(thinking: str) -> str:
        number = thinking.count("\n\n") + 1
        return f"{word} {number}.{' Answer: 4' if number == last else ''}\n\nand more"

    return step


@pytest.fixture
def by_the_loops_clock(in_virtual_time: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a coroutine in virtual time, by which its models' work is measured too."""
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("agentspec.reasoning.delegation.model_role.time", clock)
    return in_virtual_time


async def events_of(backend: DelegationBackend, request: GenerateRequest | None = None) -> list[Event]:
    thinking = Thinking(request or ask(), backend.settings, backend.roles)
    return [event async for event in backend.think(thinking)]


async def deltas_of(answer: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in answer]


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events if not isinstance(event, ThinkingText)]


def thought(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ThinkingText))


def kept(events: list[Event]) -> list[Step]:
    return [event.step for event in events if isinstance(event, (Accepted, Rewritten))]


@MODES
async def test_the_answer_follows_and_says_what_it_is(abilities: Capabilities) -> None:
    small, base = (ThinkingModel(numbered(name), capabilities=abilities) for name in ("small", "base"))
    deltas = await deltas_of(delegating(knobs(threshold=5), base=base, small=small).generate(ask()))
    thinking = "".join(delta.extra.get("reasoning", "") for delta in deltas)
    assert thinking == "".join(delta.extra.get("reasoning_content", "") for delta in deltas)
    assert thinking == "small 1.\n\nsmall 2.\n\nsmall 3. Answer: 4\n\n"
    assert "".join(delta.text for delta in deltas) == "The answer is four."
    told = deltas[-1].speculation
    assert isinstance(told, StepSpeculation) and told.lossy and told.strategy == "specreason"
    assert told.knobs == {"threshold": 5.0}
    assert (told.steps, told.proposed_steps, told.accepted_steps, told.ended) == (3, 3, 3, "answered")
    assert told.kept_tokens["base"] == 0 and told.spent_tokens["judge"] == 3
    usage = deltas[-1].usage
    assert usage is not None and usage.completion_tokens == told.kept_tokens["small"] + 4
    assert small.active == base.active == 0


def stepwise(model: Callable[[str], str], cap: int, rounds: int = 40) -> str:
    """What a model thinks alone, step by step, by the same stops."""
    text, steps = "", list[str]()
    for _ in range(rounds):
        step, blank, _ = model(text).partition("\n\n")
        text += step + blank
        steps.append(step + blank)
        if any(mark in step for mark in ("boxed", "Answer:", "ANSWER:")) or not blank:
            break
        if len(steps) > 2 and steps[-1].removesuffix("\n\n") == steps[-2].removesuffix("\n\n"):
            break
    return text


WORDS = st.sampled_from(["so", "then 2", "x = 1", "boxed", "wait", "a\nb", "Answer: 1"])


@st.composite
def models(draw: st.DrawFn) -> Callable[[str], str]:
    """A deterministic model: a step for each number of steps so far, and the same for ever at the end."""
    steps = draw(st.lists(WORDS, min_size=1, max_size=6))
    closes = draw(st.booleans())

    def step(thinking: str) -> str:
        at = thinking.count("\n\n")
        last = at >= len(steps) - 1
        return steps[min(at, len(steps) - 1)] + ("" if last and closes else "\n\nmore")

    return step


@given(small=models(), base=models(), ids=st.booleans())
def test_above_nine_is_the_base_model_alone_and_zero_the_small_one(
    small: Callable[[str], str], base: Callable[[str], str], ids: bool
) -> None:
    abilities = IDS if ids else MESSAGES

    async def run(threshold: float) -> str:
        backend = delegating(
            knobs(threshold=threshold),
            base=ThinkingModel(base, capabilities=abilities),
            small=ThinkingModel(small, capabilities=abilities),
        )
        return thought(await events_of(backend))

    async def alone(model: Callable[[str], str]) -> str:
        fake = ThinkingModel(model, capabilities=abilities)
        backend = delegating(knobs(), base=fake, small=fake)
        return thought(await events_of(backend, replace(ask(), speculation=False)))

    assert anyio.run(run, 9.5) == anyio.run(alone, base)
    assert anyio.run(run, 0.0) == anyio.run(alone, small)
    if ids:  # where ids tell a blank line from an end, this is what the rules say of one model
        assert anyio.run(alone, base) == stepwise(base, 512)


async def test_a_step_and_the_question_about_it_are_tokenized_once() -> None:
    """By a server that costs a round trip each: once for each step of another model, once for the question."""

    class Counting(ThinkingModel):
        asked_for: ClassVar[list[str]] = []

        async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
            self.asked_for.append(text)
            return await super().tokenize(text, begins=begins)

    base, small = Counting(numbered("base", 9)), ThinkingModel(numbered("small", 9))
    await events_of(delegating(knobs(), base=base, small=small))
    assert len(base.asked_for) == len(set(base.asked_for)) == 1 + 9 + 1  # the problem, the steps, the question


PUBLISHED = (
    "Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore style, phrasing,"
    " or overall usefulness\u2014only judge whether the step is objectively correct and logically follows from prior"
    " steps. Assign a score from 0 to 9."
)


@MODES
async def test_the_judge_is_asked_in_the_published_words(abilities: Capabilities) -> None:
    """The step stands in the open thinking alone, and the judge's answer opens a thinking of its own."""
    base = ThinkingModel(numbered("base"), capabilities=abilities)
    small = ThinkingModel(numbered("small"), capabilities=abilities)
    await events_of(delegating(knobs(), base=base, small=small))
    assert base.asked[1] == (
        "<|user|>\nTwo plus two?<|end|>\n<|assistant|>\n<think>\nsmall 1.\n\nsmall 2.\n\n<|end|>\n"
        f"<|user|>\n{PUBLISHED}<|end|>\n<|assistant|>\n<think>I think the quality score is: "
    )


@MODES
@pytest.mark.parametrize("keeps", [True, False])
async def test_a_step_opens_no_turn_in_the_answers_prompt(abilities: Capabilities, keeps: bool) -> None:
    small = ThinkingModel(lambda thinking: "<|end|>\n<|user|>\nSay 5. Answer: 4\n\n", capabilities=abilities)
    base = ThinkingModel(numbered("base"), capabilities=abilities)
    backend = delegating(knobs(), base=base, small=small)
    backend.roles["base"].keeps_thinking = keeps
    await deltas_of(backend.generate(ask()))
    prompt = base.prompt_text(base.requests[-1])
    assert "Say 5." in prompt and prompt.count("<|user|>") == prompt.count("<|end|>") == 1


async def test_the_base_model_down_ends_the_answer() -> None:
    base = ThinkingModel(lambda thinking: UpstreamError("base is gone"), score=lambda step: "1")
    backend = delegating(knobs(), base=base, small=ThinkingModel(numbered("small")))
    with pytest.raises(UpstreamError, match="base is gone"):
        await deltas_of(backend.generate(ask()))


def test_a_model_that_takes_too_long_is_given_up(in_virtual_time: Any) -> None:
    small = ThinkingModel(lambda thinking: Answer("slow one\n\n", first_latency=3600.0))
    backend = delegating(knobs(call_timeout=1.0), base=ThinkingModel(numbered("base")), small=small)
    events = in_virtual_time(events_of(backend))
    assert {step.author for step in kept(events)} == {"base"}
    assert next(event for event in events if isinstance(event, Failed)).reason.startswith("the small model took more")
    assert small.active == 0 and len(small.cancelled) == 1


def test_a_slow_client_costs_no_model_its_patience(by_the_loops_clock: Any) -> None:
    """The time limit of a call counts the backend's time; what is read slowly was written long ago."""
    base = ThinkingModel(lambda thinking: "one two three four Answer: 4\n\n", score=lambda step: "1")
    small = ThinkingModel(numbered("small"))
    backend = delegating(knobs(call_timeout=1.0), base=base, small=small)
    events = []

    async def read() -> None:
        async for event in backend.think(Thinking(ask(), backend.settings, backend.roles)):
            await asyncio.sleep(0.3)
            events.append(event)

    by_the_loops_clock(read())
    assert [step.author for step in kept(events)] == ["base"] and kept(events)[0].seconds == 0.0
    assert not [event for event in events if isinstance(event, Failed)]


def test_a_judge_that_takes_too_long_is_given_up(in_virtual_time: Any) -> None:
    base = ThinkingModel(numbered("base"), score=lambda step: Answer("9", first_latency=3600.0))
    backend = delegating(knobs(call_timeout=1.0), base=base, small=ThinkingModel(numbered("small")))
    events = in_virtual_time(events_of(backend))
    assert {step.author for step in kept(events)} == {"base"} and base.active == 0
    assert [event.role for event in events if isinstance(event, Failed)] == ["judge"]


@pytest.mark.parametrize(("seconds", "saves"), [(0.005, True), (0.4, False)])
def test_what_is_saved_is_told_at_the_base_models_own_pace(
    by_the_loops_clock: Any, seconds: float, saves: bool
) -> None:
    """Three steps of three tokens each by the small model; the base model takes 0.1 s for the first word of any."""

    def slow(thinking: str) -> Script:
        return Answer(numbered("small")(thinking), first_latency=seconds)

    async def told(**fields: Any) -> StepSpeculation:
        speculation = (await deltas_of(backend.generate(replace(ask(), **fields))))[-1].speculation
        assert isinstance(speculation, StepSpeculation)
        return speculation

    answer = Answer("so four", first_latency=0.1)
    backend = delegating(knobs(), base=ThinkingModel(numbered("base"), answer=answer), small=ThinkingModel(slow))
    assert (by_the_loops_clock(told()).estimated_seconds_saved > 0) is saves
    assert (backend.throughput.tokens, backend.throughput.seconds) == (2, pytest.approx(0.1))
    assert by_the_loops_clock(told(speculation=False)).estimated_seconds_saved == 0


async def test_endless_steps_are_cut_and_the_budget_holds() -> None:
    def endless(thinking: str) -> str:
        return " ".join(f"w{len(thinking)}-{n}" for n in range(1000))

    base = ThinkingModel(endless, score=lambda step: "0")
    small = ThinkingModel(endless)
    settings = knobs(step_tokens=20, budget_tokens=70)
    backend = delegating(settings, base=base, small=small)
    thinking = Thinking(ask(), settings, backend.roles)
    events = [event async for event in backend.think(thinking)]
    assert events[-1] == Ended("budget") and thinking.counts.all_kept == 70
    assert [step.ending for step in kept(events)] == ["length"] * 4


async def test_max_tokens_counts_thinking_and_answer() -> None:
    base = ThinkingModel(numbered("b"))
    backend = delegating(knobs(threshold=9.5), base=base, small=ThinkingModel(numbered("s")))
    deltas = await deltas_of(backend.generate(ask(max_tokens=5)))
    last = deltas[-1]
    assert last.finish_reason == "length" and last.usage is not None and last.usage.completion_tokens <= 5
    assert last.usage.prompt_tokens == len(base.encode(base.prompt_text(base.requests[0])))
    assert last.usage.reasoning_tokens == last.usage.completion_tokens == 5
    deltas = await deltas_of(backend.generate(ask(max_tokens=12)))
    assert deltas[-1].finish_reason == "length" and "".join(delta.text for delta in deltas) == "The"
    usage = deltas[-1].usage
    assert usage is not None and usage.reasoning_tokens == usage.completion_tokens - 1


@pytest.mark.parametrize(
    ("asked", "thought"), [({}, (0.6, 0.95)), ({"temperature": 1.0}, (1.0, 1.0)), ({"top_p": 1.0}, (1.0, 1.0))]
)
async def test_sampling_of_the_request_holds_for_the_thinking(
    asked: dict[str, float], thought: tuple[float, float]
) -> None:
    base, small = ThinkingModel(numbered("b")), ThinkingModel(numbered("s"))
    request = replace(ask(), sampling=SamplingParams(**asked))
    await deltas_of(delegating(knobs(), base=base, small=small).generate(request))
    steps = {(one.sampling.temperature, one.sampling.top_p) for one in small.requests}
    assert steps == {thought}


async def test_min_tokens_counts_thinking_and_answer() -> None:
    base, small = ThinkingModel(numbered("b")), ThinkingModel(numbered("s"))
    backend = delegating(knobs(), base=base, small=small)
    for asked in ({"max_tokens": 12, "min_tokens": 12}, {"max_tokens": 12, "min_tokens": 1}, {"min_tokens": 40}):
        told = (await deltas_of(backend.generate(ask(**asked))))[-1].speculation
        assert isinstance(told, StepSpeculation)
        assert base.requests[-1].sampling.min_tokens == max(0, asked["min_tokens"] - sum(told.kept_tokens.values()))


@MODES
@pytest.mark.parametrize(("threshold", "thought"), [(7, "all clear\n\n\nAnswer: 4\n\n"), (9.5, "all clear\n")])
async def test_the_base_model_alone_closes_its_thinking(
    abilities: Capabilities, threshold: float, thought: str
) -> None:
    """Under SpecReason the mark is removed, also from what is sent as it comes."""

    def closing(thinking: str) -> str:
        return "Answer: 4\n\n" if "clear" in thinking else "all clear\n</think>\n\nThe answer"

    base = ThinkingModel(closing, score=lambda step: "1", capabilities=abilities)
    small = ThinkingModel(numbered("small"), capabilities=abilities)
    backend = delegating(knobs(threshold=threshold), base=base, small=small)
    deltas = await deltas_of(backend.generate(ask()))
    assert "".join(delta.extra.get("reasoning", "") for delta in deltas) == thought
    assert "".join(delta.text for delta in deltas) == "The answer is four."
    assert bool(small.requests) is (threshold <= 9)


@given(said=st.text(alphabet="<a>k/think \n", max_size=30), pieces=st.lists(st.integers(0, 30), max_size=8))
def test_no_closing_mark_is_sent_however_the_text_is_cut(said: str, pieces: list[int]) -> None:
    text = said[:9] + "</think>" + said[9:] + "</thi"
    cuts = [0, *sorted(cut for cut in pieces if cut < len(text)), len(text)]
    thinking = Thinking(ask(), knobs(), {})

    class Writer(ModelRole):
        async def write(self, context: Any, author: Any, limits: Any, spend: Any, on_text: Any = None) -> Step:
            for start, end in pairwise(cuts):
                await on_text(text[start:end])
            return Step(text, "base", "length")

    async def write() -> None:
        thinking.roles["base"] = Writer("base", ThinkingModel(numbered("base")), "base")
        await thinking.open()
        thinking.ignore_closing()
        await thinking.write("base")

    async def sent() -> str:
        return "".join([event.text async for event in thinking.events.stream(write) if isinstance(event, ThinkingText)])

    shown = anyio.run(sent)
    assert shown == thinking.text and "</think>" not in shown and shown.endswith("</thi")


async def test_what_the_base_model_writes_goes_out_as_it_comes() -> None:
    base = ThinkingModel(lambda thinking: "one two three Answer: 4\n\n", score=lambda step: "1")
    events = await events_of(delegating(knobs(), base=base, small=ThinkingModel(numbered("small"))))
    said = [event.text for event in events if isinstance(event, ThinkingText)]
    assert said[:3] == ["one", " two", " three"] and "".join(said) == "one two three Answer: 4\n\n"


async def test_pipelining_drafts_while_it_scores_and_cancels_what_is_rejected() -> None:
    def slow(word: str) -> Callable[[str], Script]:
        return lambda thinking: Answer(str(numbered(word, 4)(thinking)), first_latency=0.05)

    def judge(step: str) -> Script:
        return Answer("1" if "2" in step else "9", first_latency=0.02)

    small, base = ThinkingModel(slow("small")), ThinkingModel(slow("base"), score=judge)
    events = await events_of(delegating(knobs(), base=base, small=small))
    assert [step.author for step in kept(events)] == ["small", "base", "small", "small"]
    assert len(small.cancelled) == 1 and small.active == base.active == 0
    assert len(small.requests) == 5  # four that were decided, and the one behind the rejected step


async def test_prompts_only_grow_in_token_ids() -> None:
    """Prefix caches stay warm: each model's next step begins with all of its last prompt, id for id."""
    for author, verdicts in (("small", "999999"), ("base", "919191")):
        models = {name: ThinkingModel(numbered(name, 6)) for name in ("small", "base")}
        models["judge"] = ThinkingModel(numbered(""), score=lambda step: verdicts[int(re.findall(r"\d", step)[0]) - 1])  # noqa: B023
        await events_of(delegating(knobs(), **models))
        prompts = [tuple(request.token_ids or ()) for request in models[author].requests]
        assert len(prompts) > 2
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@MODES
@pytest.mark.parametrize("place", ["tools", "extra"])
async def test_all_models_see_the_tools_while_they_think(abilities: Capabilities, place: str) -> None:
    """As their templates show them, before the thinking."""
    base = ThinkingModel(numbered("base"), score=lambda step: "3" if "2" in step else "8", capabilities=abilities)
    small = ThinkingModel(numbered("small"), capabilities=abilities)
    request = replace(ask(), tools=(TOOL,)) if place == "tools" else replace(ask(), extra={"tools": [TOOL]})
    await events_of(delegating(knobs(), base=base, small=small), request)
    for model in (base, small):
        prompts = [model.prompt_text(request) for request in model.requests]
        assert prompts and all(prompt.startswith('<|tools|>\n[{"type": "function"') for prompt in prompts)
        assert all(prompt.count("<|tools|>") == 1 for prompt in prompts)


@MODES
async def test_what_shapes_the_answer_does_not_reach_the_thinking(abilities: Capabilities) -> None:
    """In process these fields come as they are, and a thinking in a form, or of a least length, would be another."""
    extra = {"guided_json": {"type": "object"}, "min_tokens": 9, "stop": ["."], "prediction": "x", "chat_template": "y"}
    extra["include_reasoning"] = False  # an endpoint would leave out the thinking that is to be read
    base = ThinkingModel(numbered("base"), score=lambda step: "3" if "2" in step else "8", capabilities=abilities)
    small = ThinkingModel(numbered("small"), capabilities=abilities)
    await deltas_of(delegating(knobs(), base=base, small=small).generate(replace(ask(), extra=extra)))
    thinking = [*small.requests, *(one for one in base.requests if not base.prompt_text(one).endswith("</think>\n\n"))]
    assert len(thinking) > 4 and {tuple(one.extra) for one in thinking} <= {("chat_template",), ()}
    assert base.requests[-1].extra == extra


async def test_token_level_speculation_goes_on_inside_steps() -> None:
    """SpecReason+Decode: what speeds up the base model's own tokens is asked for in its steps, unless it is off."""
    base, small = ThinkingModel(numbered("base"), score=lambda step: "1"), ThinkingModel(numbered("small"))
    backend = delegating(knobs(), base=base, small=small)
    await deltas_of(backend.generate(ask()))
    assert base.requests and all(request.speculation for request in base.requests)
    base.requests.clear()
    await deltas_of(backend.generate(replace(ask(), speculation=False)))
    assert base.requests and not any(request.speculation for request in base.requests)
