"""A delegating strategy as a `Backend`: streams the thinking, then requests the answer; returns counts and a trace."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from agentspec.backends.base import CHAT, Capabilities
from agentspec.backends.chat_templates import escape_markers
from agentspec.errors import AgentSpecError, InvalidRequestError
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.delegation.model_role import ModelRole, Stopwatch, message
from agentspec.reasoning.delegation.thinking import Thinking, base_only
from agentspec.reasoning.settings import DelegationSettings
from agentspec.reasoning.strategy import PROBE_SECONDS, Dependencies, Strategy, answers, imported
from agentspec.speculation.stride import RunningMean
from agentspec.types import Delta, GenerateRequest, SamplingParams, Usage


@dataclass(slots=True)
class DelegationBackend(Strategy[DelegationSettings]):
    """A model that thinks by a strategy. `roles` holds base and small, and judge if the strategy asks a judge.

    Their owners close the models. Answers carry a `StepSpeculation`, and decisions if tokens' sources are asked for.
    """

    name: str
    settings: DelegationSettings
    roles: dict[str, ModelRole] = field()  # pyright: ignore[reportIncompatibleMethodOverride]
    capabilities: Capabilities = field(  # pyright: ignore[reportIncompatibleMethodOverride]
        default_factory=lambda: Capabilities(logprobs=True, routes=(CHAT,))
    )
    pace: RunningMean = field(default_factory=RunningMean)  # seconds a token of the base model, measured as it writes

    @classmethod
    def open(cls, name: str, settings: DelegationSettings, dependencies: Dependencies) -> DelegationBackend:
        """Open the strategy. Raises `ConfigurationError`."""
        found = {role: dependencies.find(named) for role, named in settings.models.items()}
        roles = {role: ModelRole(role, model.backend, model.model) for role, model in found.items()}
        if "judge" in type(settings).model_fields:
            roles.setdefault("judge", roles["base"])
        return cls(name, settings, roles)

    async def prepare(self) -> list[str]:
        silent = []
        for role, model in self.roles.items():
            if role == "judge" and model is self.roles["base"]:
                continue
            if not await answers(model.backend):
                silent.append(role)
                continue
            await model.check(self.settings.think_start)
            if model.continues_messages:
                await find_keeps_thinking(model, self.settings)
        return silent

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield each part of the thinking as a `reasoning` delta once it is final, then the answer.

        Closing the iterator cancels the work of all models. Raises `InvalidRequestError` for a request without
        messages or with tools or a form that the answering model cannot be given, and what the base model raises.
        """
        thinking = Thinking(_checked(request), self.settings, self.roles)
        _shaped(request, self.roles["base"])  # refused before the thinking is paid for
        watch = Stopwatch()
        async with aclosing(thinking.texts(lambda: self._think(thinking))) as texts:
            async for text in texts:
                named = {"reasoning": text, "reasoning_content": text}  # the names that clients read
                yield Delta(extra=named, decisions=thinking.decisions.take())
        async with aclosing(self._answer(thinking, watch)) as deltas:
            async for delta in deltas:
                yield delta if delta.finish_reason is None else self._finished(delta, thinking, watch.seconds)

    async def _think(self, thinking: Thinking) -> None:
        """Run the strategy. If the request switches speculation off, the base model thinks alone."""
        alone = self.settings.drafts_nothing or not thinking.request.speculation
        await thinking.open(alone=alone)
        if alone or thinking.over is not None:
            await base_only(thinking)
        else:
            await imported(self.settings.algorithm)(thinking, self.settings)
        thinking.decisions.add("ended", reason=thinking.over or "")

    async def _answer(self, thinking: Thinking, watch: Stopwatch) -> AsyncGenerator[Delta]:
        """The deltas that the base model writes after the closed thinking; `watch` measures its time."""
        request = thinking.request
        left = request.sampling.max_tokens
        least, thought = request.sampling.min_tokens, thinking.kept.total()  # both limits count the thinking
        if left is not None and (left := left - thought) < 1:
            yield Delta(finish_reason="length", usage=Usage(thinking.steps[0].prompt_tokens + thought))
            return
        model = self.roles["base"]
        sampling = replace(request.sampling, max_tokens=left, min_tokens=max(0, least - thought))
        prompt = await self._answering(thinking, model, sampling)
        seconds = thinking.step_limits.seconds * ANSWER_PATIENCE
        async with aclosing(model.deltas(prompt, seconds, watch)) as deltas:
            first = True
            async for delta in deltas:
                if first and delta.text:
                    delta = replace(delta, text=delta.text.lstrip("\n"))
                    first = not delta.text
                yield delta

    async def _answering(self, thinking: Thinking, model: ModelRole, sampling: SamplingParams) -> GenerateRequest:
        """The request for the answer. A request with tools is sent as messages: the template renders the tools."""
        request = thinking.request
        if model.continues_messages or _shaped(request, model):
            await find_keeps_thinking(model, self.settings)  # unknown where the endpoint did not answer at the start
            content = self._closed(thinking, model)
            messages = [*(request.messages or ()), message("assistant", content)]
            return replace(request, model=model.model, messages=messages, sampling=sampling, continue_final=True)
        context = thinking.context("base")
        await context.extend(self._end())
        ids = context.request(sampling).token_ids
        return replace(request, model=model.model, messages=None, token_ids=ids, sampling=sampling)

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

    def _finished(self, last: Delta, thinking: Thinking, seconds: float) -> Delta:
        """The last delta of an answer, which took `seconds`, with usage and figures of thinking and answer together."""
        used, kept, delegates = last.usage or Usage(), thinking.kept.total(), thinking.request.speculation
        written = [step for step in thinking.steps if step.author == "base"]
        if tokens := used.completion_tokens + thinking.kept["base"]:
            self.pace.add((seconds + sum(step.seconds for step in written)) / tokens)
        saved = kept * self.pace.value - thinking.watch.seconds if delegates and self.pace.value else 0.0
        figures = StepSpeculation(
            estimated_seconds_saved=saved,
            drafted=sum(step.tokens for step in thinking.proposed),
            accepted=thinking.kept["small"],
            steps=len(thinking.steps),
            lossy=delegates,
            strategy=self.settings.strategy,
            knobs=self.settings.answer_settings,
            proposed_steps=len(thinking.proposed),
            accepted_steps=len(thinking.steps) - len(written),
            kept_tokens=dict(thinking.kept),
            spent_tokens=dict(thinking.spent),
            ended=thinking.over or "",
            degraded=dict(thinking.failed),
        )
        usage = replace(  # the thinking counts as completion, not as the prompt of the answer
            used,
            prompt_tokens=max(0, used.prompt_tokens - kept),
            completion_tokens=used.completion_tokens + kept,
            cached_tokens=0,
            reasoning_tokens=kept + (used.reasoning_tokens or 0),
        )
        return replace(last, usage=usage, speculation=figures, decisions=thinking.decisions.take())


ANSWER_PATIENCE = 5  # steps of time for the answer, which is much longer than a step
SHAPED = ("tools", "tool_choice", "response_format", "functions")


def _checked(request: GenerateRequest) -> GenerateRequest:
    for refused, reason, param in (
        (request.messages is None, "takes messages: use chat completions", "prompt"),
        (request.continue_final, "does not continue messages", "continue_final_message"),
        (request.sampling.n != 1 or request.extra.get("n") not in (None, 1), "answers without n", "n"),
        (request.extra.get("prompt_logprobs") is not None, "answers without prompt_logprobs", "prompt_logprobs"),
    ):
        if refused:
            raise InvalidRequestError(f"a strategy's model {reason}", param=param)
    return request


def _shaped(request: GenerateRequest, model: ModelRole) -> bool:
    """Whether the answer has to be asked for in messages. Raises `InvalidRequestError` if `model` continues none."""
    name = "tools" if request.tools else next((name for name in SHAPED if name in request.extra), None)
    if name is not None and not model.backend.capabilities.continue_final:
        raise InvalidRequestError(f"the model {model.model!r} cannot continue messages, which {name} needs", param=name)
    return name is not None


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
    messages, one = [message("user", "Count."), message("assistant", begun)], SamplingParams(max_tokens=1)
    request = GenerateRequest(model.model, messages=messages, sampling=one, continue_final=True, store=False)
    counted = 0
    async for delta in model.deltas(request, PROBE_SECONDS):
        counted = delta.usage.prompt_tokens if delta.usage is not None else counted
    return counted
