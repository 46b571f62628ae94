"""The state of one answer's thinking: the steps so far, the context that each model was shown, the tokens spent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentspec.errors import AgentSpecError
from agentspec.protocol.forms import FORM_FIELDS
from agentspec.reasoning.delegation.model_role import Context, ModelRole, Spend, StepLimits, Stopwatch
from agentspec.reasoning.delegation.steps import BOUNDARY, Author, Step
from agentspec.reasoning.settings import DelegationSettings
from agentspec.reasoning.tasks import cancel_tasks
from agentspec.text import partial_end
from agentspec.types import GenerateRequest, Message, SamplingParams

RESERVED = 4  # a quarter of a model's context is left for the answer
TEMPERATURE, TOP_P = 0.6, 0.95  # of the thinking, as published
MODEL_FAILURES = (AgentSpecError, OSError)  # all other errors are bugs of agentspec
_DEFAULTS = SamplingParams()
_OF_EVERY_CALL = ("labels", "tenant", "speculation", "store", "priority")


@dataclass(slots=True)
class Decisions:
    """What was decided for one answer, each with its seconds since the beginning; nothing unless they are `asked` for.
    They hold the text of steps.
    """

    asked: bool
    _new: list[dict[str, Any]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def add(self, event: str, **fields: Any) -> None:
        if self.asked:
            seconds = round(time.perf_counter() - self._began, 6)
            self._new.append({"event": event, "at": seconds, **{name: _plain(one) for name, one in fields.items()}})

    def take(self) -> tuple[dict[str, Any], ...]:
        """What was decided since the last call."""
        taken, self._new = tuple(self._new), []
        return taken


def _plain(value: Any) -> Any:
    if not isinstance(value, Step):
        return value
    return {name: one for name, one in asdict(value).items() if name != "token_ids"}


class Thinking:
    """The state that a strategy reads and changes. `over` says why the thinking has ended; None while it goes on.

    `proposed` lists the small model's steps, with those that were dropped; `kept` counts the tokens that stayed by
    author, `spent` all generated tokens by role. If the small model or the judge fails, `failed` holds the reason, and
    the base model continues alone. An error of the base model ends the answer. `decisions` are recorded for a request
    that asks where its tokens come from.
    """

    def __init__(self, request: GenerateRequest, settings: DelegationSettings, roles: dict[str, ModelRole]) -> None:
        self.request = request
        self.settings = settings
        self.roles = roles
        self.decisions = Decisions(request.token_sources)
        self.steps: list[Step] = []
        self.proposed: list[Step] = []
        self.kept = Counter(small=0, base=0)
        self.spent: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.over: str | None = None
        self.watch = Stopwatch()
        self.step_limits = StepLimits(_sampling(request), settings.think_end, settings.call_timeout)
        self._ignored = ""
        self._contexts: dict[str, Context] = {}
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()

    async def texts(self, run: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[str]:
        """Call `run` and yield the text that it emits; `watch` measures its time.

        Closing the iterator cancels `run`. Raises what `run` raises.
        """
        task = asyncio.create_task(self._run(run))
        try:
            while (text := await self.watch.timed(self._texts.get())) is not None:
                yield text
                self._texts.task_done()
            await task
        finally:
            await cancel_tasks(task)

    async def _run(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await run()
        finally:
            self._texts.put_nowait(None)

    async def emit(self, text: str) -> None:
        """Send final text to the client. Returns once the reader asks for more, so that thinking keeps its pace."""
        if text:
            self._texts.put_nowait(text)
            await self._texts.join()

    def ignore_closing(self) -> None:
        """From now on the mark that closes the thinking ends no step, and is removed from what `write` keeps."""
        self.step_limits, self._ignored = replace(self.step_limits, closing=""), self.settings.think_end

    async def open(self, *, alone: bool) -> None:
        """Show every model the problem, or if the base model thinks `alone` this one. Raises what that model raises."""
        asked = self.request
        thought = replace(
            self.request_for(asked.messages or ()),
            tools=asked.tools,
            template_arguments=asked.template_arguments,
            extra=_thinking_fields(asked),
        )
        for role, model in self.roles.items():
            helps = not alone and model is not self.roles["base"] and role not in self.settings.shown_nothing
            if role == "base" or helps:
                async with self.degrading(role):
                    self._contexts[role] = await model.open(thought, self.settings.think_start)
        self.over = None if self.room("base") else "budget"

    def request_for(self, messages: Sequence[Message]) -> GenerateRequest:
        """A request with `messages` and the fields that concern every call made for this answer."""
        given: dict[str, Any] = {name: getattr(self.request, name) for name in _OF_EVERY_CALL}
        return GenerateRequest(self.request.model, messages=messages, split_reasoning=False, **given)

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    def has(self, role: str) -> bool:
        return role in self.roles and role not in self.failed

    def context(self, role: str) -> Context:
        """The context of the model in `role`; a judge that is the base model shares the base model's context."""
        return self._contexts[role] if role in self._contexts else self._contexts["base"]

    @asynccontextmanager
    async def degrading(self, role: str) -> AsyncGenerator[None]:
        """If the model in `role` fails in this block, continue without it. Errors of the base model are raised."""
        try:
            yield
        except MODEL_FAILURES as error:
            if role == "base":
                raise
            self.degrade(role, error)

    def degrade(self, role: str, error: Exception) -> None:
        """Continue without the model in `role`, which failed with `error`."""
        self.failed[role] = error.message if isinstance(error, AgentSpecError) else type(error).__name__
        self.decisions.add("failed", role=role, reason=self.failed[role])

    def room(self, role: str, pending: int = 0) -> int:
        """Tokens that the next step of `role` may have: 0 once a budget or the model's context is used up.

        `pending` counts drafted tokens before that step that are not accepted yet. `spend_tokens` limits the small
        model alone: once it is used up, the base model thinks on without drafts, up to the other limits.
        """
        settings, asked = self.settings, self.request
        limits = [settings.step_tokens]
        if role == "small":
            limits.append(settings.spend_tokens - self.spent.total())
        for most in (settings.budget_tokens, asked.thinking_budget, asked.sampling.max_tokens):
            if most is not None:
                limits.append(most - self.kept.total() - pending)
        if (left := self.context(role).room) is not None:
            limits.append(left - pending - (self.roles[role].backend.capabilities.context_length or 0) // RESERVED)
        return max(0, min(limits))

    def limits(
        self,
        role: str,
        tokens: int | None = None,
        *,
        across: bool = False,
        pending: int = 0,
        within: bool | None = None,
    ) -> StepLimits:
        """The limits of the next step of `role`: at most `tokens` tokens, and never more than its room.

        `within`: whether it begins inside a paragraph; None: as the thinking ends, with `pending` at its beginning.
        """
        room = self.room(role, pending)
        limit = max(1, room if tokens is None else min(tokens, room))
        if within is None:
            within = not pending and self.inside_paragraph
        return self.step_limits.limited(limit, across=across, within=within)

    async def draft(self, context: Context, limits: StepLimits | None = None, role: Author = "small") -> Step:
        """Let `role` write a step after `context` without keeping it. Raises what its backend raises."""
        return await self.roles[role].write(context, role, limits or self.limits(role), self.spend(role))

    def propose(self, step: Step) -> None:
        """Record a step of the small model that is neither accepted nor rejected yet."""
        self.proposed.append(step)
        self.decisions.add("proposed", step=step)

    async def write(self, author: Author, limits: StepLimits | None = None, *, rejected: Step | None = None) -> None:
        """Let `author` write a step that is final at once, and emit its text. Raises what its backend raises.

        If the small model fails within the step, what was emitted stays, and the base model continues after it.
        """
        sent, held, before = "", "", self.spent[author]

        async def on_text(text: str) -> None:
            nonlocal sent, held
            text = (held + text).replace(self._ignored, "") if self._ignored else text
            cut = len(text) - partial_end(text, self._ignored)
            text, held = text[:cut], text[cut:]
            sent += text
            await self.emit(text)

        limits = limits or self.limits(author)
        try:
            step = await self.roles[author].write(self.context(author), author, limits, self.spend(author), on_text)
        except MODEL_FAILURES as error:
            if author == "base" or not sent:
                raise
            self.degrade(author, error)
            step = Step(sent + held, author, "length", self.spent[author] - before)
        if step.text != sent + held:
            step = replace(step, text=sent + held, token_ids=())
        await self._add(step, rejected, text=held)

    async def keep(self, step: Step, *, rejected: Step | None = None) -> None:
        """Add `step` to the thinking and to every model's context."""
        await self._add(step, rejected, text=step.text)

    async def _add(self, step: Step, rejected: Step | None, text: str) -> None:
        """`text` is the part of the step that was not emitted yet."""
        for role, context in list(self._contexts.items()):
            if role not in self.failed:
                async with self.degrading(role):
                    await context.extend(step.text, step.token_ids, None if role == step.author else step.author)
        if step.author == "small" and not (self.proposed and self.proposed[-1] is step):
            self.proposed.append(step)  # it was written without being judged
        self.steps.append(step)
        self.kept[step.author] += step.tokens
        self.over = self.over or self._why_over()
        if rejected is None:
            self.decisions.add("accepted", step=step)
        else:
            self.decisions.add("rewritten", step=step, rejected=rejected)
        await self.emit(text)

    @property
    def inside_paragraph(self) -> bool:
        """Whether the thinking ends in the middle of a paragraph, because its last step was cut."""
        return bool(self.steps) and not self.steps[-1].text.endswith(BOUNDARY)

    def spend(self, role: str) -> Spend:
        return lambda tokens: self.spent.update({role: tokens})

    def _why_over(self) -> str | None:
        """Why the thinking ends with the last step, by the rules of SpecReason's program; None if it goes on."""
        last = self.steps[-1]
        if last.ending == "closed":
            return "closed"
        was_inside = len(self.steps) > 1 and not self.steps[-2].text.endswith(BOUNDARY)
        if last.ending == "stop" or (last.blank and last.ending == "boundary" and not was_inside):
            return "silent"
        if any(mark in last.text for mark in self.settings.answer_marks):
            return "answered"
        texts = [step.text.removesuffix(BOUNDARY) for step in self.steps[-2:]]  # as SpecReason compares them
        if self.settings.ends_on_repeat and len(self.steps) > 2 and texts[0] == texts[1]:
            return "repeated"
        return None if self.room("base") else "budget"


async def base_only(thinking: Thinking) -> None:
    """Let the base model write every step: the baseline that strategies are compared with."""
    while thinking.over is None:
        await thinking.write("base")


# Sampling fields, and others, that apply to the answer and not to the thinking.
_OF_ANSWERS = (
    *("stop", "stop_token_ids", "logprobs", "top_logprobs", "max_tokens", "min_tokens", "ignore_eos"),
    "structured_outputs",
)
_ANSWER_FIELDS = ("tool_choice", "parallel_tool_calls", "n", "prediction", "return_token_ids", "include_reasoning")


def _sampling(request: GenerateRequest) -> SamplingParams:
    """Sampling of the thinking: the request's, or the papers' if neither temperature nor top_p is given."""
    given = request.sampling
    chosen: dict[str, Any] = {name: getattr(_DEFAULTS, name) for name in _OF_ANSWERS}
    if not (given.is_given("temperature") or given.is_given("top_p")):
        chosen |= {"temperature": TEMPERATURE, "top_p": TOP_P}
    return replace(given, **chosen)


def _thinking_fields(request: GenerateRequest) -> dict[str, object]:
    """The extra fields of a request that also apply to the thinking: all but the fields that shape the answer."""
    shape = {*FORM_FIELDS, *_OF_ANSWERS, *_ANSWER_FIELDS}
    return {name: value for name, value in request.extra.items() if name not in shape}
