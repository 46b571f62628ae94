"""What a client gets of a strategy: the thinking as it comes, the answer with its figures, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.base import Capabilities
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamError
from agentspec.reasoning.settings import LookaheadSettings, SpecReasonSettings, SpeculativeThinkingSettings
from agentspec.reasoning.strategy import prepare
from agentspec.testing import Answer, Script
from agentspec.types import Delta, GenerateRequest, Message
from tests.reasoning.delegation.test_calls import MODES, NAMED, TOOL, numbered, pair
from tests.thinking_model import ASK, IDS, MESSAGES, ThinkingModel, delegating, having, thinks, thought

pytestmark = pytest.mark.anyio
ANSWERS = having(LookaheadSettings, answer_marks=("Answer:",))


def specreason(**knobs: Any) -> SpecReasonSettings:
    return SpecReasonSettings(**NAMED, **knobs)


def asking(**sampling: Any) -> GenerateRequest:
    return replace(ASK, sampling=replace(ASK.sampling, **sampling))


@MODES
def test_the_answer_follows_the_thinking_and_reports_figures(abilities: Capabilities) -> None:
    found = thinks(specreason(threshold=5), **pair(abilities, score=lambda step: "9"))
    assert found.text == "".join(delta.extra.get("reasoning_content", "") for delta in found.deltas)
    assert (found.text, found.answer) == ("small 1.\n\nsmall 2.\n\nsmall 3. Answer: 4\n\n", "The answer is four.")
    figures, usage = found.figures, found.deltas[-1].usage
    assert figures.lossy and figures.strategy == "specreason" and figures.knobs == {"threshold": 5.0}
    assert (figures.steps, figures.proposed_steps, figures.accepted_steps, figures.ended) == (3, 3, 3, "answered")
    assert figures.kept_tokens["base"] == 0 and figures.spent_tokens["judge"] == 3
    assert usage is not None and usage.completion_tokens == figures.kept_tokens["small"] + 4
    base = ThinkingModel(lambda thinking: "one two three Answer: 4\n\n", score=lambda step: "1", capabilities=abilities)
    found = thinks(specreason(), **{**pair(abilities), "base": base})  # the base model's own words go out as they come
    assert [delta.extra["reasoning"] for delta in found.deltas if delta.extra][:3] == ["one", " two", " three"]


WORDS = st.sampled_from(["so", "then 2", "x = 1", "boxed", "wait", "a\nb", "Answer: 1", "a"])


EITHER = st.booleans()


@st.composite
def models(draw: st.DrawFn, closes: st.SearchStrategy[bool] = EITHER) -> Callable[[str], str]:
    """A deterministic model: a step for each number of steps so far, and the same for ever at the end."""
    steps = draw(st.lists(WORDS, min_size=1, max_size=6))
    ends = draw(closes)

    def step(thinking: str) -> str:
        at = thinking.count("\n\n")
        last = at >= len(steps) - 1
        return steps[min(at, len(steps) - 1)] + ("" if last and ends else "\n\nmore")

    return step


@given(small=models(), base=models(), ids=st.booleans())
def test_above_nine_is_the_base_model_alone_and_zero_the_small_one(
    small: Callable[[str], str], base: Callable[[str], str], ids: bool
) -> None:
    def run(settings: SpecReasonSettings, first: Any, second: Any, **fields: Any) -> str:
        one, other = (ThinkingModel(model, capabilities=IDS if ids else MESSAGES) for model in (first, second))
        return thinks(settings, replace(ASK, **fields), base=one, small=other).text

    assert run(specreason(threshold=9.5), base, small) == run(specreason(), base, base, speculation=False)
    assert run(specreason(threshold=0), base, small) == run(specreason(), small, small, speculation=False)


@given(small=models(st.just(False)), base=models(st.just(False)), depth=st.integers(0, 4))
def test_lookahead_by_a_judge_that_refuses_is_the_base_models_own_thinking(
    small: Callable[[str], str], base: Callable[[str], str], depth: int
) -> None:
    """Equal steps need no judge: whatever is drafted changes nothing."""
    settings = ANSWERS(**NAMED, depth=depth, budget_tokens=40)
    pairs = {"base": ThinkingModel(base, same=lambda draft, own: False), "small": ThinkingModel(small)}
    assert thinks(settings, **pairs).text == thinks(settings, replace(ASK, speculation=False), **pairs).text


def test_max_tokens_and_min_tokens_count_thinking_and_answer() -> None:
    models = pair()
    found = thinks(specreason(threshold=9.5), asking(max_tokens=5), **models)
    usage, prompt = found.deltas[-1].usage, models["base"].prompt_text(models["base"].requests[0])
    assert usage is not None and found.deltas[-1].finish_reason == "length"
    assert usage.reasoning_tokens == usage.completion_tokens == 5
    assert usage.prompt_tokens == len(models["base"].encode(prompt))
    found = thinks(specreason(threshold=9.5), asking(max_tokens=12), **models)
    usage = found.deltas[-1].usage
    assert found.deltas[-1].finish_reason == "length" and found.answer == "The"
    assert usage is not None and usage.reasoning_tokens == usage.completion_tokens - 1
    for asked in ({"max_tokens": 12, "min_tokens": 12}, {"max_tokens": 12, "min_tokens": 1}, {"min_tokens": 40}):
        found, models = thinks(specreason(), asking(**asked), **(models := pair())), models
        kept = sum(found.figures.kept_tokens.values())
        assert models["base"].requests[-1].sampling.min_tokens == max(0, asked["min_tokens"] - kept)


@pytest.fixture
def measured(in_virtual_time: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a coroutine in virtual time, and measures by it, too: no test waits, and none depends on the machine."""
    monkeypatch.setattr("time.perf_counter", lambda: asyncio.get_running_loop().time())
    return in_virtual_time


@pytest.mark.parametrize(("seconds", "saves"), [(0.005, True), (0.4, False)])
def test_the_time_saved_is_reported_at_the_base_models_own_pace(measured: Any, seconds: float, saves: bool) -> None:
    """Three steps of three tokens each by the small model; the base model takes 0.1 s for the first word of any."""

    def slow(thinking: str) -> Script:
        return Answer(numbered("small")(thinking), first_latency=seconds)

    base = ThinkingModel(numbered("base"), answer=Answer("so four", first_latency=0.1))
    backend = delegating(specreason(), base=base, small=ThinkingModel(slow))
    figures = measured(thought(backend)).figures
    kept = figures.kept_tokens["small"]
    assert figures.estimated_seconds_saved == pytest.approx(kept * 0.05 - 3 * seconds) and saves is (
        figures.estimated_seconds_saved > 0
    )
    assert measured(thought(backend, replace(ASK, speculation=False))).figures.estimated_seconds_saved == 0


def test_a_slow_client_uses_up_no_call_timeout(measured: Any) -> None:
    """The time limit of a call counts the backend's time; what is read slowly was written long ago."""
    base = ThinkingModel(lambda thinking: "one two three four Answer: 4\n\n", score=lambda step: "1")
    backend = delegating(specreason(call_timeout=1.0), base=base, small=ThinkingModel(numbered("small")))

    async def read() -> Any:
        figures: Any = None
        async for delta in backend.generate(ASK):
            await asyncio.sleep(0.3)
            figures = delta.speculation
        return figures

    figures = measured(read())
    assert figures.degraded == {} and figures.kept_tokens["base"] > 4


@pytest.mark.parametrize("role", ["small", "judge"])
def test_a_model_that_times_out_is_abandoned(measured: Any, role: str) -> None:
    late = Answer("9" if role == "judge" else "slow one\n\n", first_latency=3600.0)
    models = pair(score=lambda step: late if role == "judge" else "9")
    if role == "small":
        models["small"] = ThinkingModel(lambda thinking: late)
    found = measured(thought(delegating(specreason(call_timeout=1.0), **models)))
    assert {step["author"] for step in found.steps} == {"base"} and set(found.figures.degraded) == {role}
    assert "took more than 1 seconds" in found.figures.degraded[role]
    assert models["base"].active == models["small"].active == 0


@MODES
def test_what_was_sent_before_the_small_model_failed_stays_part_of_the_thinking(abilities: Capabilities) -> None:
    """The client cannot take it back, so the models go on after it."""
    broken = Answer("one two three four\n\n", error=UpstreamError("gone"), error_after=2)
    base = ThinkingModel(
        lambda text: " three four. Answer: 4\n\n" if text == "one two" else "Answer: 9\n\n", capabilities=abilities
    )
    settings = having(SpeculativeThinkingSettings, answer_marks=("Answer:",))(**NAMED)
    found = thinks(settings, base=base, small=ThinkingModel(lambda thinking: broken, capabilities=abilities))
    assert found.text == "one two three four. Answer: 4\n\n" and found.figures.degraded == {"small": "gone"}
    assert found.kept == ["s one two", "b  three four. Answer: 4\n\n"] and found.steps[0]["tokens"] == 2


@pytest.mark.parametrize("settings", [specreason(), LookaheadSettings(**NAMED), SpeculativeThinkingSettings(**NAMED)])
def test_a_failing_base_model_ends_the_answer(settings: Any) -> None:
    base = ThinkingModel(lambda thinking: UpstreamError("base is gone"), score=lambda step: "1")
    with pytest.raises(UpstreamError, match="base is gone"):
        thinks(settings, base=base, small=ThinkingModel(lambda thinking: "wait no\n\n" if thinking else "one\n\n"))


def test_an_answer_that_breaks_off_has_what_was_decided_before() -> None:
    said: list[Delta] = []

    async def run() -> None:
        small = ThinkingModel(lambda thinking: "The box holds \\boxed{4}.\n\n" if thinking else "One.\n\n")
        base = ThinkingModel(lambda thinking: "Two.\n\n", answer=UpstreamError("gone"))
        asked = replace(ASK, token_sources=True)
        async for delta in delegating(specreason(), base=base, small=small).generate(asked):
            said.append(delta)

    with pytest.raises(UpstreamError, match="gone"):
        anyio.run(run)
    decided = [one["event"] for delta in said for one in delta.decisions]
    assert decided == 2 * ["proposed", "scored", "accepted"]


def test_pipelining_drafts_while_it_scores_and_cancels_what_is_rejected(measured: Any) -> None:
    def slow(word: str) -> Callable[[str], Script]:
        return lambda thinking: Answer(str(numbered(word, 4)(thinking)), first_latency=0.05)

    small = ThinkingModel(slow("small"))
    base = ThinkingModel(slow("base"), score=lambda step: Answer("1" if "2" in step else "9", first_latency=0.02))
    found = measured(thought(delegating(specreason(), base=base, small=small)))
    assert [step["author"] for step in found.steps] == ["small", "base", "small", "small"]
    assert len(small.cancelled) == 1 and small.active == base.active == 0
    assert len(small.requests) == 5  # four that were decided, and the one after the rejected step


def test_lookaheads_own_steps_run_together_and_a_mismatch_cancels_the_rest(measured: Any) -> None:
    drafts, own, active = ("s1", "other", "s3", "s4 Answer: 4"), ("s1", "s2", "s3", "s4 Answer: 4"), list[int]()

    def slow(thinking: str) -> Script:
        """After the draft that is not accepted it would write for long."""
        active.append(base.active)
        return Answer(
            f"{own[min(3, thinking.count(chr(10) * 2))]}\n\n", first_latency=3600.0 if "other" in thinking else 0.15
        )

    small, base = ThinkingModel(lambda text: drafts[min(3, text.count("\n\n"))] + "\n\n"), ThinkingModel(slow)
    settings = ANSWERS(**NAMED, depth=4, call_timeout=9999)
    found = measured(thought(delegating(settings, base=base, small=small, judge=ThinkingModel(numbered("judge")))))
    assert [step["author"] for step in found.steps] == ["small", "base", "small", "small"]
    assert base.cancelled and max(active) >= 3 and small.active == base.active == 0


@pytest.mark.parametrize("settings", [specreason(), LookaheadSettings(**NAMED), SpeculativeThinkingSettings(**NAMED)])
@pytest.mark.parametrize("after", [0, 1, 2, 4, 7])
async def test_closing_the_answer_cancels_the_work_of_all_models(settings: Any, after: int) -> None:
    """Within the thinking, between its steps and within the answer; nothing runs ahead of its reader, either."""
    models = {
        name: ThinkingModel(numbered(name, 9), answer=Answer("so it is four", latency=0.001))
        for name in ("base", "small")
    }
    deltas = delegating(settings, **models).generate(ASK)
    for _ in range(after):
        await anext(deltas)
    reading = asyncio.ensure_future(anext(deltas)) if after % 2 else None
    await asyncio.sleep(0)
    if reading is not None:
        reading.cancel()
        await asyncio.wait([reading])
    await deltas.aclose()
    asked = sum(len(model.requests) for model in models.values())
    assert not any(model.active for model in models.values())
    await anyio.sleep(0.01)
    assert sum(len(model.requests) for model in models.values()) == asked


class Forgetful(ThinkingModel):
    """As the templates of some reasoning models: closed thinking is deleted from a message."""

    def prompt_text(self, request: GenerateRequest) -> str:
        head, _, rest = super().prompt_text(request).rpartition("<think>")
        return head + rest.rpartition("</think>")[2] if "</think>" in rest else head + "<think>" + rest


class Refusing(ThinkingModel):
    """As vLLM: what the template does not show as it is, is not continued."""

    def _respond(self, request: GenerateRequest) -> Script:
        closed = request.continue_final and "</think>" in self.prompt_text(request)
        return InvalidRequestError("cannot continue") if closed else super()._respond(request)


class Uncounted(ThinkingModel):
    """Reports no usage."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async for delta in super().generate(request):
            yield replace(delta, usage=None)


def one(thinking: str) -> Script:
    return "one Answer: 4\n\n"


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("kind", [ThinkingModel, Forgetful, Refusing, Uncounted])
@pytest.mark.parametrize("ids", [True, False])
async def test_thinking_that_a_template_deletes_is_sent_as_plain_text(
    kind: Callable[..., ThinkingModel], prepared: bool, ids: bool
) -> None:
    """That is found out once: also of an endpoint that did not answer at the start, and of one that is asked in
    messages for tools alone.
    """
    base = kind(one, capabilities=Capabilities(continue_final=True, logprobs=True, token_ids=ids))
    backend = delegating(specreason(), base=base, small=ThinkingModel(one, capabilities=MESSAGES))
    if prepared:
        await prepare(backend)
    request = replace(ASK, tools=(TOOL,))
    assert (await thought(backend, request)).deltas[-1].finish_reason == "stop"
    asked, messages = len(base.requests), base.requests[-1].messages or ()
    keeps = "<think>\none Answer: 4\n</think>\n\n"
    assert messages[-1]["content"] == (keeps if kind is ThinkingModel else "one Answer: 4\n\n")
    await thought(backend, request)
    assert len(base.requests) == asked + 2  # a score and the answer


class Rewriting(ThinkingModel):
    """A chat template that shouts."""

    async def render(self, messages: Sequence[Message], *shown: Any) -> str:
        return (await super().render(messages, *shown)).upper()


async def test_a_template_that_changes_messages_is_refused() -> None:
    backend = delegating(specreason(), base=Rewriting(one), small=ThinkingModel(one))
    with pytest.raises(ConfigurationError, match="name another model as base"):
        await thought(backend)
    with pytest.raises(ConfigurationError, match="name another model as base"):
        await prepare(backend)


BEGUN = [{"role": "assistant", "content": "So"}]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("fast", text="two"), "takes messages"),
        (GenerateRequest("fast", messages=BEGUN, continue_final=True), "does not continue"),
        (GenerateRequest("fast", messages=BEGUN, extra={"n": 2}), "without n"),
        (replace(ASK, extra={"tools": [TOOL]}), "'base' cannot continue messages, which tools needs"),
        (replace(ASK, extra={"response_format": {"type": "json_object"}}), "which response_format needs"),
    ],
)
def test_requests_that_no_strategy_can_honour_are_refused_before_the_thinking(
    request_: GenerateRequest, message: str
) -> None:
    models = pair()
    with pytest.raises(InvalidRequestError, match=message):
        thinks(specreason(), request_, **models)
    assert not models["base"].requests and not models["small"].requests
