"""A delegating strategy as a `Backend`: turns its events into deltas, counts and a trace, then requests the answer."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from agentspec.backends.base import CHAT, Capabilities
from agentspec.backends.chat_templates import escape_markers
from agentspec.errors import AgentSpecError, InvalidRequestError
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.delegation.model_role import ModelRole, Stopwatch
from agentspec.reasoning.delegation.steps import Accepted, Ended, Event, Proposed, Rewritten, Step, ThinkingText
from agentspec.reasoning.delegation.thinking import Thinking, base_only
from agentspec.reasoning.delegation.trace import TraceFolder, Tracer
from agentspec.reasoning.settings import DelegationSettings
from agentspec.reasoning.strategy import PROBE_SECONDS, Dependencies, Strategy, answers
from agentspec.types import Delta, GenerateRequest, Message, SamplingParams, Usage


@dataclass(slots=True)
class StepCounters:
    """Totals of one answer's events. A step that the small model writes without being judged also counts as proposed.

    The base model wrote `base_tokens` of the answer in `base_seconds`.
    """

    proposed: int = 0
    proposed_tokens: int = 0
    accepted: int = 0
    accepted_tokens: int = 0
    base_tokens: int = 0
    base_seconds: float = 0.0
    _open: Step | None = None

    def add(self, event: Event) -> None:
        match event:
            case Proposed(step):
                self._propose(step)
            case Accepted(step) if step.author == "small":
                if step is not self._open:
                    self._propose(step)
                self.accepted += 1
                self.accepted_tokens += step.tokens
            case Accepted(step) | Rewritten(step):
                self.add_base(step.tokens, step.seconds)

    def add_base(self, tokens: int, seconds: float) -> None:
        self.base_tokens += tokens
        self.base_seconds += seconds

    def _propose(self, step: Step) -> None:
        self._open = step
        self.proposed += 1
        self.proposed_tokens += step.tokens


FADING = 0.9  # factor by which each answer reduces the weight of older figures


@dataclass(slots=True)
class BaseThroughput:
    """How fast the base model writes, measured on its own steps and answers; newer figures count more."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Record that the base model wrote `tokens` of one answer in `seconds`."""
        if tokens:
            self.tokens = FADING * self.tokens + tokens
            self.seconds = FADING * self.seconds + seconds

    def seconds_saved(self, tokens: int, seconds: float) -> float:
        """How many more seconds than `seconds` the base model would need for `tokens`; 0 before it wrote anything."""
        return tokens * self.seconds / self.tokens - seconds if self.tokens else 0.0


@dataclass(slots=True)
class DelegationBackend(Strategy[DelegationSettings]):
    """A model that thinks by a strategy. `roles` holds base and small, and judge if the strategy asks a judge.

    Their owners close the models. Answers carry a `StepSpeculation`; with `traces` every decision is recorded.
    """

    name: str
    settings: DelegationSettings
    roles: dict[str, ModelRole] = field()  # pyright: ignore[reportIncompatibleMethodOverride]
    traces: TraceFolder | None = None
    capabilities: Capabilities = field(  # pyright: ignore[reportIncompatibleMethodOverride]
        default_factory=lambda: Capabilities(logprobs=True, routes=(CHAT,))
    )
    throughput: BaseThroughput = field(default_factory=BaseThroughput)

    @classmethod
    def open(cls, name: str, settings: DelegationSettings, dependencies: Dependencies) -> DelegationBackend:
        """Open the strategy. Raises `ConfigurationError`."""
        found = {role: dependencies.find(named) for role, named in settings.models.items()}
        roles = {role: ModelRole(role, model.backend, model.model) for role, model in found.items()}
        if "judge" in type(settings).model_fields:
            roles.setdefault("judge", roles["base"])
        return cls(name, settings, roles, dependencies.traces)

    async def prepare(self) -> list[str]:
        """As `Strategy.prepare`. Raises `ConfigurationError` for a model that neither continues messages nor takes
        token ids.
        """
        answering: dict[int, bool] = {}
        for model in self.roles.values():
            if id(model) not in answering:  # a judge may be the base model
                answering[id(model)] = await answers(model.backend)
                if answering[id(model)]:
                    await model.check(self.settings.think_start)
                    if model.continues_messages:
                        await find_keeps_thinking(model, self.settings)
        return [role for role, model in self.roles.items() if not answering[id(model)]]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield each part of the thinking as a `reasoning` delta once it is final, then the answer.

        Closing the iterator cancels the work of all models. Raises `InvalidRequestError` for a request without
        messages or with tools or a form that the answering model cannot be given, and what the base model raises.
        """
        thinking = Thinking(_checked(request), self.settings, self.roles)
        _shaped(request, self.roles["base"])  # refused before the thinking is paid for
        counters, tracer = StepCounters(), self._tracer(request)
        thought, answered = Stopwatch(), Stopwatch()
        try:
            async with aclosing(thought.timed(self.think(thinking))) as events:
                async for event in events:
                    counters.add(event)
                    tracer.add(event)
                    if isinstance(event, ThinkingText):
                        yield reasoning(event.text)
            async with aclosing(answered.timed(self._answer(thinking))) as deltas:
                async for delta in deltas:
                    tracer.add_answer(delta.text)
                    if delta.finish_reason is not None:
                        used = delta.usage or Usage()
                        counters.add_base(used.completion_tokens, answered.seconds)
                        speculation = self._summary(thinking, counters, tracer, thought.seconds)
                        delta = replace(delta, usage=_usage(thinking, used), speculation=speculation)
                        tracer.close()
                    yield delta
        finally:
            tracer.close()

    def think(self, thinking: Thinking) -> AsyncGenerator[Event]:
        """Yield every event of the thinking. If the request sets no `speculation`, the base model thinks alone."""
        return thinking.events.stream(lambda: self._think(thinking))

    def _algorithm(self) -> Callable[[Thinking, Any], Coroutine[Any, Any, None]]:
        module, _, function = self.settings.algorithm.partition(":")
        algorithm: Callable[[Thinking, Any], Coroutine[Any, Any, None]] = getattr(import_module(module), function)
        return algorithm

    async def _think(self, thinking: Thinking) -> None:
        await thinking.open()
        if thinking.over is not None:
            pass  # the request leaves no room for thoughts
        elif thinking.request.speculation:
            await self._algorithm()(thinking, self.settings)
        else:
            await base_only(thinking)
        await thinking.emit(Ended(thinking.over or ""))

    async def _answer(self, thinking: Thinking) -> AsyncGenerator[Delta]:
        """The deltas that the base model writes after the closed thinking."""
        request = thinking.request
        left = request.sampling.max_tokens
        least, thought = request.sampling.min_tokens, thinking.counts.all_kept  # both limits count the thinking
        if left is not None and (left := left - thought) < 1:
            yield Delta(finish_reason="length", usage=Usage(thinking.steps[0].prompt_tokens + thought))
            return
        model = self.roles["base"]
        sampling = replace(request.sampling, max_tokens=left, min_tokens=max(0, least - thought))
        prompt = await self._answering(thinking, model, sampling)
        seconds = thinking.step_limits.seconds * ANSWER_PATIENCE
        async with aclosing(model.deltas(prompt, seconds)) as deltas:
            first = True
            async for delta in deltas:
                if first and delta.text:
                    delta = replace(delta, text=delta.text.lstrip("\n"))
                    first = not delta.text
                yield delta

    async def _answering(self, thinking: Thinking, model: ModelRole, sampling: Any) -> GenerateRequest:
        """The request for the answer. A request with tools is sent as messages: the template renders the tools."""
        request = thinking.request
        if model.continues_messages or _shaped(request, model):
            await find_keeps_thinking(model, self.settings)  # unknown where the endpoint did not answer at the start
            content = self._closed(thinking, model)
            messages: list[Message] = [*(request.messages or ()), {"role": "assistant", "content": content}]
            return replace(request, model=model.model, messages=messages, sampling=sampling, continue_final=True)
        context = thinking.context("base")
        await context.extend(self._end())
        prompt = context.request(sampling)
        return replace(
            request,
            model=model.model,
            messages=None,
            text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=sampling,
        )

    def _closed(self, thinking: Thinking, model: ModelRole) -> str:
        """The thinking as the start of a message; without its marks if the template would delete closed thinking.

        Templates that keep it strip its line ends, and what a template changes cannot be continued.
        """
        text = escape_markers(thinking.text)  # as the models were shown it
        if model.keeps_thinking is not False:
            return self.settings.think_start + (text.strip("\n") if self.settings.think_end else text) + self._end()
        return text.rstrip() + "\n\n"

    def _end(self) -> str:
        return f"\n{self.settings.think_end}\n\n" if self.settings.think_end else ""

    def _tracer(self, request: GenerateRequest) -> Tracer:
        folder = self.traces if request.store else None
        return Tracer(folder, uuid.uuid4().hex[:16], self.name, self.settings, request)

    def _summary(self, thinking: Thinking, counters: StepCounters, tracer: Tracer, seconds: float) -> StepSpeculation:
        """The figures of an answer whose thinking took `seconds`. Without speculation the saved time is 0."""
        self.throughput.add(counters.base_tokens, counters.base_seconds)
        saved = self.throughput.seconds_saved(thinking.counts.all_kept, seconds)
        delegates = thinking.request.speculation
        return StepSpeculation(
            estimated_seconds_saved=saved if delegates else 0.0,
            drafted=counters.proposed_tokens,
            accepted=counters.accepted_tokens,
            steps=len(thinking.steps),
            lossy=delegates,
            strategy=self.settings.strategy,
            knobs=self.settings.answer_settings,
            proposed_steps=counters.proposed,
            accepted_steps=counters.accepted,
            kept_tokens=dict(thinking.counts.kept),
            spent_tokens=dict(thinking.counts.spent),
            ended=thinking.over or "",
            degraded=dict(thinking.failed),
            trace=tracer.id if tracer.kept else None,
        )


ANSWER_PATIENCE = 5  # steps of time for the answer, which is much longer than a step
SHAPED = ("tools", "tool_choice", "response_format", "functions")


def reasoning(text: str) -> Delta:
    """A delta of thinking, under both field names that clients read."""
    return Delta(extra={"reasoning": text, "reasoning_content": text})


def _checked(request: GenerateRequest) -> GenerateRequest:
    if request.messages is None:
        raise InvalidRequestError("a strategy's model takes messages: use chat completions", param="prompt")
    if request.continue_final:
        raise InvalidRequestError("a strategy's model does not continue messages", param="continue_final_message")
    if request.sampling.n != 1 or request.extra.get("n") not in (None, 1):
        raise InvalidRequestError("a strategy's model answers without n", param="n")
    if request.extra.get("prompt_logprobs") is not None:
        raise InvalidRequestError("a strategy's model answers without prompt_logprobs", param="prompt_logprobs")
    return request


def _shaped(request: GenerateRequest, model: ModelRole) -> bool:
    """Whether the answer has to be asked for in messages. Raises `InvalidRequestError` if `model` continues none."""
    name = "tools" if request.tools else next((name for name in SHAPED if name in request.extra), None)
    if name is not None and not model.backend.capabilities.continue_final:
        raise InvalidRequestError(f"the model {model.model!r} continues no messages, which {name} needs", param=name)
    return name is not None


def _usage(thinking: Thinking, answer: Usage) -> Usage:
    """The answering model's usage, with the thinking counted as completion tokens instead of prompt tokens."""
    kept = thinking.counts.all_kept
    return replace(
        answer,
        prompt_tokens=max(0, answer.prompt_tokens - kept),
        completion_tokens=answer.completion_tokens + kept,
        cached_tokens=0,
        reasoning_tokens=kept + (answer.reasoning_tokens or 0),
    )


_REFUSED = (400, 422)
_LONG = "One and one is two, and two and one is three. " * 4


async def find_keeps_thinking(model: ModelRole, settings: DelegationSettings) -> None:
    """Find out, unless that is known, whether the endpoint's template keeps closed thinking in a message that the
    endpoint continues. It stays unknown where the endpoint does not answer; one that counts no tokens may not.

    Templates of reasoning models delete closed thinking: with the closing mark the prompt then gets shorter, or the
    endpoint refuses to continue what its template does not show.
    """
    start, end = settings.think_start, settings.think_end
    if model.keeps_thinking is not None or not end:
        return
    try:
        opened = await _prompt_tokens(model, f"{start}{_LONG}\n\nHello")
    except AgentSpecError:
        return
    try:
        closed = await _prompt_tokens(model, f"{start}{_LONG}\n{end}\n\nHello")
        model.keeps_thinking = 0 < opened <= closed
    except AgentSpecError as error:
        model.keeps_thinking = False if error.status in _REFUSED else None


async def _prompt_tokens(model: ModelRole, begun: str) -> int:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    request = GenerateRequest(model.model, messages=messages, continue_final=True, store=False)
    request = replace(request, sampling=SamplingParams(max_tokens=1))
    counted = 0
    async for delta in model.deltas(request, PROBE_SECONDS):
        counted = delta.usage.prompt_tokens if delta.usage is not None else counted
    return counted
