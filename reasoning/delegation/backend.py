"""A strategy behind the `Backend` protocol: its events become deltas, counts and a trace; the answer follows."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.backends.base import Backend, Capabilities
from agentspec.errors import InvalidRequestError
from agentspec.reasoning.delegation.base_only import base_only
from agentspec.reasoning.delegation.events import Accepted, Ended, Event, Proposed, Rewritten, ThinkingText
from agentspec.reasoning.delegation.lookahead import lookahead
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.delegation.spec_reason import spec_reason
from agentspec.reasoning.delegation.speculative_thinking import speculative_thinking
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.delegation.timing import BaseThroughput, Stopwatch
from agentspec.reasoning.delegation.trace import TraceFolder, Tracer
from agentspec.reasoning.settings import (
    Delegation,
    SpecReasonSettings,
    SpeculativeThinkingSettings,
)
from agentspec.types import Delta, GenerateRequest, Message, StepSpeculation, Usage

Run = Callable[[Thinking], AsyncGenerator[Event]]


@dataclass(slots=True)
class StepCounters:
    """What an answer's events come to. A step that the small model wrote as final counts as proposed too.

    `base_tokens` in `base_seconds` is what the base model wrote of it.
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
                self.base_wrote(step.tokens, step.seconds)

    def base_wrote(self, tokens: int, seconds: float) -> None:
        self.base_tokens += tokens
        self.base_seconds += seconds

    def _propose(self, step: Step) -> None:
        self._open = step
        self.proposed += 1
        self.proposed_tokens += step.tokens


@dataclass(slots=True)
class DelegationBackend:
    """A model that thinks by a strategy. `writers` has the roles base and small, and judge where one is asked.

    The models stay their owners' to close. Answers carry a `StepSpeculation`; with `traces` every decision is kept.
    """

    name: str
    settings: Delegation
    writers: dict[str, ModelRole]
    traces: TraceFolder | None = None
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(logprobs=True))
    pace: BaseThroughput = field(default_factory=BaseThroughput)

    @classmethod
    def of(
        cls, settings: Delegation, *, base: Backend, small: Backend, judge: Backend | None = None, name: str = "fast"
    ) -> DelegationBackend:
        """A strategy over backends that are there already; its settings' names serve as the models' names."""
        writers = {"base": ModelRole("base", base, settings.base), "small": ModelRole("small", small, settings.small)}
        writers["judge"] = ModelRole("judge", judge, "judge") if judge is not None else writers["base"]
        return cls(name, settings, writers)

    async def aclose(self) -> None:
        """The backends behind are closed by who built them."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The thinking as `reasoning` deltas while it becomes final, then the answer.

        Closing the iterator cancels the work of all models. Raises `InvalidRequestError` for a request without
        messages, and what the base model raises.
        """
        thinking = Thinking(_checked(request), self.settings, self.writers)
        tally, tracer = StepCounters(), self._tracer(request)
        thought, answered = Stopwatch(), Stopwatch()
        try:
            async with aclosing(thought.over(self.think(thinking))) as events:
                async for event in events:
                    tally.add(event)
                    tracer.add(event)
                    if isinstance(event, ThinkingText):
                        yield reasoning(event.text)
            async with aclosing(answered.over(self._answer(thinking))) as deltas:
                async for delta in deltas:
                    tracer.say(delta.text)
                    if delta.finish_reason is not None:
                        used = delta.usage or Usage()
                        if self._answerer(thinking) == "base":
                            tally.base_wrote(used.completion_tokens, answered.seconds)
                        told = self._sum(thinking, tally, tracer, thought.seconds)
                        delta = replace(delta, usage=_usage(thinking, used), speculation=told)
                        tracer.close()
                    yield delta
        finally:
            tracer.close()

    async def think(self, thinking: Thinking) -> AsyncGenerator[Event]:
        """Every event of the thinking. Without `speculation` the base model thinks alone."""
        for lost in await thinking.open():
            yield lost
        run = self._run() if thinking.request.speculation else base_only
        async with aclosing(run(thinking)) as events:
            async for event in events:
                yield event
        yield Ended(thinking.over or "")

    def _run(self) -> Run:
        settings = self.settings
        if isinstance(settings, SpecReasonSettings):
            return lambda thinking: spec_reason(thinking, settings)
        if isinstance(settings, SpeculativeThinkingSettings):
            return lambda thinking: speculative_thinking(thinking, settings)
        return lambda thinking: lookahead(thinking, settings)

    async def _answer(self, thinking: Thinking) -> AsyncGenerator[Delta]:
        """What the model that answers writes behind the closed thinking."""
        request, role = thinking.request, self._answerer(thinking)
        left = request.sampling.max_tokens
        if left is not None and (left := left - thinking.counts.all_kept) < 1:
            yield Delta(finish_reason="length")
            return
        writer, sampling = self.writers[role], replace(request.sampling, max_tokens=left)
        prompt = await self._answering(thinking, writer, role, sampling)
        seconds = thinking.pen.seconds * ANSWER_PATIENCE
        async with aclosing(writer.deltas(prompt, seconds)) as deltas:
            first = True
            async for delta in deltas:
                if first and delta.text:
                    delta = replace(delta, text=delta.text.lstrip("\n"))
                    first = not delta.text
                yield delta

    def _answerer(self, thinking: Thinking) -> str:
        role = self.settings.answer_by
        return role if thinking.has(role) else "base"

    async def _answering(self, thinking: Thinking, writer: ModelRole, role: str, sampling: Any) -> GenerateRequest:
        """The request for the answer. Tools stand in the prompt, so that a model that has some gets messages."""
        request = thinking.request
        shaped = bool(request.tools) or any(name in request.extra for name in SHAPED)
        if shaped and not writer.backend.capabilities.continue_final:
            raise InvalidRequestError(
                f"the model {writer.model!r} continues no messages, which tools need", param="tools"
            )
        if writer.continues_messages or shaped:
            content = self._closed(thinking, writer)
            messages: list[Message] = [*(request.messages or ()), {"role": "assistant", "content": content}]
            return replace(request, model=writer.model, messages=messages, sampling=sampling, continue_final=True)
        context = thinking.context(role)
        await context.extend(self._end())
        prompt = context.request(sampling)
        return replace(
            request,
            model=writer.model,
            messages=None,
            text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=sampling,
        )

    def _closed(self, thinking: Thinking, writer: ModelRole) -> str:
        """The thinking as the beginning of a message. As plain text where a template would delete closed thinking."""
        if writer.keeps_thinking:
            return self.settings.think_start + thinking.text + self._end()
        return thinking.text.rstrip() + "\n\n"

    def _end(self) -> str:
        return f"\n{self.settings.think_end}\n\n" if self.settings.think_end else ""

    def _tracer(self, request: GenerateRequest) -> Tracer:
        folder = self.traces if request.store else None
        return Tracer(folder, uuid.uuid4().hex[:16], self.name, self.settings, request)

    def _sum(self, thinking: Thinking, tally: StepCounters, tracer: Tracer, seconds: float) -> StepSpeculation:
        """The account of an answer whose thinking took `seconds`. At the base model's own pace nothing is saved."""
        self.pace.wrote(tally.base_tokens, tally.base_seconds)
        delegates = thinking.request.speculation
        return StepSpeculation(
            estimated_seconds_saved=self.pace.saved(thinking.counts.all_kept, seconds) if delegates else 0.0,
            drafted=tally.proposed_tokens,
            accepted=tally.accepted_tokens,
            steps=len(thinking.steps),
            lossy=delegates,
            strategy=self.settings.strategy,
            knobs=self.settings.knobs,
            proposed_steps=tally.proposed,
            accepted_steps=tally.accepted,
            kept_tokens=dict(thinking.counts.kept),
            spent_tokens=dict(thinking.counts.spent),
            ended=thinking.over or "",
            degraded=dict(thinking.failed),
            trace=tracer.id if tracer.kept else None,
        )


ANSWER_PATIENCE = 5  # an answer is many steps long
SHAPED = ("tools", "tool_choice", "response_format", "functions")


def reasoning(text: str) -> Delta:
    """Thinking as clients expect it, under both names that are in use."""
    return Delta(extra={"reasoning": text, "reasoning_content": text})


def _checked(request: GenerateRequest) -> GenerateRequest:
    if request.messages is None:
        raise InvalidRequestError("a strategy's model takes messages: use chat completions", param="prompt")
    if request.continue_final:
        raise InvalidRequestError("a strategy's model does not continue messages", param="continue_final_message")
    for name, least in (("n", 1), ("prompt_logprobs", None)):
        given = getattr(request.sampling, name)
        if given != least or request.extra.get(name) not in (None, least):
            raise InvalidRequestError(f"a strategy's model answers without {name}", param=name)
    return request


def _usage(thinking: Thinking, answer: Usage) -> Usage:
    """The prompt as the answering model saw it, less the thinking, which counts as completion."""
    kept = thinking.counts.all_kept
    return replace(
        answer,
        prompt_tokens=max(0, answer.prompt_tokens - kept),
        completion_tokens=answer.completion_tokens + kept,
        cached_tokens=0,
    )
