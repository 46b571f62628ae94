"""The state of one answer while it is thought out: the steps so far, what each model was shown, what it has cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.reasoning.delegation.context import Context
from agentspec.reasoning.delegation.events import Accepted, Event, Failed, Rewritten, ThinkingText
from agentspec.reasoning.delegation.model_role import ModelRole, Spend, StepLimits, failing
from agentspec.reasoning.delegation.steps import BOUNDARY, Author, Step
from agentspec.reasoning.settings import DelegationSettings
from agentspec.types import GenerateRequest, SamplingParams

RESERVED = 4  # of a model's context, one part in so many is left for the answer
_DEFAULTS = SamplingParams()


@dataclass(slots=True)
class Counts:
    """Tokens of the thinking: `kept` by author, and everything generated for it by role, dropped tokens included."""

    kept: dict[str, int] = field(default_factory=lambda: {"small": 0, "base": 0})
    spent: dict[str, int] = field(default_factory=dict)

    def spend(self, role: str, tokens: int) -> None:
        self.spent[role] = self.spent.get(role, 0) + tokens

    @property
    def all_kept(self) -> int:
        return sum(self.kept.values())

    @property
    def all_spent(self) -> int:
        return sum(self.spent.values())


class Thinking:
    """What a strategy reads and changes. `over` says why the thinking has ended; None while it goes on.

    Models of the roles small and judge may fail: they are given up, in `failed`, and the base model goes on alone.
    What the base model raises ends the answer.
    """

    def __init__(self, request: GenerateRequest, settings: DelegationSettings, writers: dict[str, ModelRole]) -> None:
        self.request = request
        self.settings = settings
        self.writers = writers
        self.steps: list[Step] = []
        self.counts = Counts()
        self.failed: dict[str, str] = {}
        self.over: str | None = None
        self.pen = StepLimits(_sampling(request, settings), settings.think_end, settings.call_timeout)
        self._contexts: dict[str, Context] = {}

    async def open(self) -> list[Failed]:
        """Show every model the problem. Raises what the base model raises."""
        asked = self.request
        thought = GenerateRequest(  # of the request only what concerns the thinking too: the rest is the answer's
            asked.model,
            messages=asked.messages,
            labels=asked.labels,
            tenant=asked.tenant,
            speculation=asked.speculation,
            store=asked.store,
            priority=asked.priority,
            tools=asked.tools,
            template_arguments=asked.template_arguments,
            split_reasoning=False,
            extra=_thinking_fields(asked),
        )
        lost = []
        for role, writer in self.writers.items():
            if role != "base" and writer is self.writers["base"]:
                continue
            try:
                self._contexts[role] = await writer.open(thought, self.settings.think_start)
            except Exception as error:
                if role == "base" or not failing(error):
                    raise
                lost.append(self.give_up(role, error))
        return lost

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    def has(self, role: str) -> bool:
        return role in self.writers and role not in self.failed

    def context(self, role: str) -> Context:
        """What the model in `role` was shown; a judge that is the base model shares its context."""
        return self._contexts[role] if role in self._contexts else self._contexts["base"]

    def writer(self, role: str) -> ModelRole:
        return self.writers[role]

    def give_up(self, role: str, error: Exception) -> Failed:
        """Go on without the model in `role`."""
        self.failed[role] = str(error)
        return Failed(role, str(error))

    def room(self, role: str, pending: int = 0) -> int:
        """Tokens that the next step of `role` may have: 0 once a budget or the model's context is used up.

        `pending` tokens stand before it that are not kept yet.
        """
        settings, asked = self.settings, self.request.sampling.max_tokens
        limits = [settings.step_tokens, settings.budget_tokens - self.counts.all_kept - pending]
        limits.append(settings.spend_tokens - self.counts.all_spent)
        if asked is not None:
            limits.append(asked - self.counts.all_kept - pending)
        if (left := self.context(role).room) is not None:
            limits.append(left - pending - (self.writers[role].backend.capabilities.context_length or 0) // RESERVED)
        return max(0, min(limits))

    def ration(self, role: str, tokens: int | None = None, *, across: bool = False, pending: int = 0) -> StepLimits:
        """The pen for the next step of `role`: its room, or `tokens` of it."""
        room = self.room(role, pending)
        limit = max(1, room if tokens is None else min(tokens, room))
        return self.pen.limited(limit, across=across, within=not pending and self._within())

    async def draft(self, context: Context, pen: StepLimits | None = None, role: Author = "small") -> Step:
        """A step of `role` from `context`, undecided. Raises what its backend raises."""
        pen = pen or self.ration(role)
        async with aclosing(self.writers[role].write(context, role, pen, self._spend(role))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Step):
                    return piece
        raise AssertionError("a writer ends with its step")

    async def write(
        self, author: Author, pen: StepLimits | None = None, *, rejected: Step | None = None
    ) -> AsyncGenerator[Event]:
        """Let `author` write on, its words final as they come. Raises what its backend raises."""
        pen = pen or self.ration(author)
        writing = self.writers[author].write(self.context(author), author, pen, self._spend(author))
        async with aclosing(writing) as pieces:
            async for piece in pieces:
                if isinstance(piece, Step):
                    async for event in self.keep(piece, said=True, rejected=rejected):
                        yield event
                elif piece:
                    yield ThinkingText(author, piece)

    async def keep(self, step: Step, *, said: bool = False, rejected: Step | None = None) -> AsyncGenerator[Event]:
        """Make `step` part of the thinking, and tell every model. `said` if its text went out already."""
        for role, context in list(self._contexts.items()):
            if role in self.failed:
                continue
            try:
                await context.extend(step.text, step.token_ids if role == step.author else ())
            except Exception as error:
                if role == "base" or not failing(error):
                    raise
                yield self.give_up(role, error)
        self.steps.append(step)
        self.counts.kept[step.author] += step.tokens
        self.over = self.over or self._reason()
        if step.text and not said:
            yield ThinkingText(step.author, step.text)
        yield Rewritten(step, rejected) if rejected is not None else Accepted(step)

    def _within(self, back: int = 0) -> bool:
        """Whether the thinking, but for its last `back` steps, stands in the middle of a paragraph."""
        before = self.steps[: len(self.steps) - back]
        return bool(before) and not before[-1].text.endswith(BOUNDARY)

    def _spend(self, role: str) -> Spend:
        return lambda tokens: self.counts.spend(role, tokens)

    def _reason(self) -> str | None:
        """Why the thinking is over with the last step, if it is (SpecReason, section 3 of its code's loop)."""
        last = self.steps[-1]
        if last.ending == "closed":
            return "closed"
        if last.ending == "stop" or (last.blank and last.ending == "boundary" and not self._within(1)):
            return "silent"
        if any(mark in last.text for mark in self.settings.answer_marks):
            return "answered"
        if len(self.steps) > 2 and last.text.strip() == self.steps[-2].text.strip():
            return "repeated"
        return None if self.room("base") else "budget"


# What says how an answer ends or looks, and nothing about its thinking.
_OF_ANSWERS = (
    *("stop", "stop_token_ids", "logprobs", "top_logprobs", "max_tokens", "min_tokens", "ignore_eos"),
    *("structured_outputs", "prompt_logprobs"),
)


def _sampling(request: GenerateRequest, settings: DelegationSettings) -> SamplingParams:
    """The request's sampling for the thinking; what it leaves at OpenAI's default is the strategy's to choose."""
    given = request.sampling
    chosen: dict[str, Any] = {}
    if given.temperature == _DEFAULTS.temperature and given.top_p == _DEFAULTS.top_p:
        chosen = {"temperature": settings.temperature, "top_p": settings.top_p}
    whole: dict[str, Any] = {name: getattr(_DEFAULTS, name) for name in _OF_ANSWERS}
    return replace(given, **whole, **chosen)


def _thinking_fields(request: GenerateRequest) -> dict[str, object]:
    """What of a request's further fields concerns the thinking too: its shape does not, the answer's alone has one."""
    shape = ("response_format", "tool_choice", "structured_outputs", "parallel_tool_calls", "n")
    return {name: value for name, value in request.extra.items() if name not in shape}
