"""A model in its role: it opens contexts, continues them step by step and answers questions about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentspec.backends.base import NONE, Backend, Tokenization, closing_items, tokenization_of
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidRequestError, UpstreamTimeoutError
from agentspec.reasoning.delegation.context import Context, MessageContext, TextContext, TokenContext, TurnMarkup
from agentspec.reasoning.delegation.steps import BOUNDARY, Author, Ending, Step, StepReader
from agentspec.reasoning.delegation.templates import Template
from agentspec.reasoning.delegation.timing import Stopwatch
from agentspec.text import REPLACEMENT
from agentspec.types import Delta, GenerateRequest, Message, SamplingParams

Spend = Callable[[int], None]
OnText = Callable[[str], Awaitable[None]]
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, top_logprobs=10)
_CUT_BYTES = 3  # of a character of four
_THOUGHT, _ASKED = "Thought: 7.", "Question: 7?"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How to write a step. With `across` the step continues over blank lines up to its token limit.

    `within`: the step begins in the middle of a paragraph, so that a blank line may end it at once.
    """

    sampling: SamplingParams
    closing: str
    seconds: float
    across: bool = False
    within: bool = False

    def limited(self, tokens: int, *, across: bool = False, within: bool = False) -> StepLimits:
        return replace(self, sampling=replace(self.sampling, max_tokens=tokens), across=across, within=within)

    def reader(self) -> StepReader:
        return StepReader(self.closing, across=self.across)

    def stops(self, *, ids_known: bool) -> tuple[str, ...]:
        """The stop strings for the backend: the closing mark only if token ids show later which string matched."""
        return tuple(mark for mark in ("" if self.across else BOUNDARY, self.closing if ids_known else "") if mark)


@dataclass(slots=True)
class ModelRole:
    """A backend's model that continues its own text or another model's.

    It sends token ids if the backend exposes its tokenization, else raw text if it has a `template`, else messages
    whose last one the endpoint continues. Errors and settings call the model `role`. `keeps_thinking`: whether the
    endpoint's own template keeps closed thinking; None until that is found out.
    """

    role: str
    backend: Backend
    model: str
    template: Template | None = None
    keeps_thinking: bool | None = None
    _turn: TurnMarkup | None = field(default=None, init=False)
    _names_stops: bool = field(default=False, init=False)

    @property
    def tokenization(self) -> Tokenization | None:
        """The backend's tokenization, if the backend accepts token ids as prompts."""
        return tokenization_of(self.backend)

    @property
    def continues_messages(self) -> bool:
        return self.tokenization is None and self.template is None

    @property
    def tells_ends(self) -> bool:
        """Whether a blank line can be told from the model's own end: by token ids, or by stop strings that the
        endpoint names. That it names them is known from the first one on.
        """
        return self.tokenization is not None or self._names_stops

    @property
    def description(self) -> str:
        """Describes in words how this model continues an answer."""
        if self.continues_messages:
            return "continues messages"
        how = "token ids" if self.tokenization is not None else "raw completions"
        return how if self.template is None else f"{how} under {self.template.name}"

    async def check(self, think_start: str) -> None:
        """Raises `ConfigurationError` if this model cannot continue an open answer."""
        advice = f"give {self.role}_template (plain, chatml or a Jinja file), or another model as {self.role}"
        if self.continues_messages:
            if not self.backend.capabilities.continue_final:
                raise ConfigurationError(f"the {self.role} model {self.model!r} cannot continue an answer: {advice}")
            return
        try:
            await self.turn_markup(think_start)
        except InvalidRequestError as error:
            raise ConfigurationError(f"the {self.role} model {self.model!r}: {error}; {advice}") from None

    async def open(self, request: GenerateRequest, think_start: str) -> Context:
        """A context with `request`'s messages and the start of the thinking. Raises what the backend raises."""
        base = replace(request, model=self.model)
        if self.continues_messages:
            return MessageContext(base, think_start)
        prompt = await self._render(request.messages or (), *_shown(request))
        base = _bare(base)
        if think_start.strip() and not prompt.rstrip().endswith(think_start.strip()):
            prompt += think_start
        return await self._rendered(base, await self.turn_markup(think_start), prompt)

    async def _rendered(self, base: GenerateRequest, turn: TurnMarkup, prompt: str) -> TextContext | TokenContext:
        if self.tokenization is None:
            return TextContext(base, turn, prompt)
        ids = await self.tokenization.tokenize(prompt, begins=self.template is not None)
        return TokenContext(base, self.tokenization, turn, ids, self.backend.capabilities.context_length)

    async def turn_markup(self, think_start: str) -> TurnMarkup:
        """The text between an open answer, a question and the next answer, found by rendering the template."""
        if self._turn is None:
            shown = [_message("user", _ASKED), _message("assistant", _THOUGHT), _message("user", _ASKED)]
            _, found, rest = (await self._render(shown)).rpartition(_THOUGHT)
            before, asked, after = rest.rpartition(_ASKED)
            if not (found and asked):
                raise ConfigurationError(
                    f"the chat template of the {self.role} model {self.model!r} changes the messages it is given:"
                    f" set {self.role}_template to one that does not"
                )
            self._turn = TurnMarkup(before, _unopened(after, think_start))
        return self._turn

    async def write(
        self, context: Context, author: Author, limits: StepLimits, spend: Spend, on_text: OnText | None = None
    ) -> Step:
        """Write one step after `context`, which stays unchanged; `on_text` receives text once it surely belongs to it.

        `spend` receives token counts as tokens arrive, so that a cancelled step is counted too. Raises what the backend
        raises, and `UpstreamTimeoutError` after `limits.seconds`.
        """
        watch, reader = Stopwatch(), limits.reader()
        request = context.request(replace(limits.sampling, stop=limits.stops(ids_known=self.tokenization is not None)))
        ids: list[int] = []
        counted, last, held = 0, Delta(), ""
        async with aclosing(self.deltas(request, limits.seconds, watch)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
                arrived = _arrived(delta)
                counted += arrived
                spend(arrived)
                text = held + _text_of(delta)
                held = text[len(text.rstrip(REPLACEMENT)) :]  # perhaps a character that the token limit cuts
                if (piece := reader.feed(text.removesuffix(held))) and on_text is not None:
                    await on_text(piece)
                last = delta
                if reader.ended:
                    break
        if last.usage is not None and not ids:
            told = max(last.usage.completion_tokens, min(counted, 1))  # text that costs nothing would use up no budget
            spend(told - counted)
            counted = told
        cut = last.finish_reason == "length" and await self._drop_cut(held, ids, reader)
        end = "" if cut else reader.feed(held)
        if (end := end + await self._unsent_end(reader, ids, last, limits)) and on_text is not None:
            await on_text(end)
        ending = _ending_of(reader, last)
        # At an end of the model's own, `ids` include the token that ended the answer.
        exact = self.tokenization is not None and not reader.rest and ending not in ("closed", "stop")
        prompt = 0 if last.usage is None else last.usage.prompt_tokens
        return Step(reader.text, author, ending, counted, watch.seconds, tuple(ids) if exact else (), prompt)

    async def ask(
        self, context: Context, question: str, prefill: str, seconds: float, spend: Spend
    ) -> tuple[str, dict[str, float]]:
        """The first token of the answer to `question`, and the log-probabilities of the ten likeliest tokens.

        The token is as the log-probabilities name it; without them it is the text, also if sent as reasoning.
        """
        return await self._first_token(await context.ask(question, prefill, _ONE_TOKEN), seconds, spend)

    async def ask_alone(
        self, request: GenerateRequest, prefill: str, think_start: str, seconds: float, spend: Spend
    ) -> tuple[str, dict[str, float]]:
        """`ask` in a conversation of its own: the messages of `request`, whose answer begins with `prefill`."""
        base = replace(request, model=self.model)
        context: Context
        if self.continues_messages:
            context = MessageContext(base, prefill)
        else:
            prompt = _unopened(await self._render(base.messages or ()), think_start)
            context = await self._rendered(_bare(base), TurnMarkup("", ""), prompt + prefill)
        return await self._first_token(context.request(_ONE_TOKEN), seconds, spend)

    async def _first_token(
        self, request: GenerateRequest, seconds: float, spend: Spend
    ) -> tuple[str, dict[str, float]]:
        text, first = "", None
        if not self.backend.capabilities.logprobs:  # an endpoint may refuse what it cannot tell
            request = replace(request, sampling=replace(request.sampling, logprobs=False, top_logprobs=0))
        async with aclosing(self.deltas(request, seconds)) as deltas:
            async for delta in deltas:
                text += _text_of(delta)
                spend(_arrived(delta))
                first = first or next(iter(delta.logprobs), None)
        if first is None:
            return text, {}
        return first.text, {top.text: top.logprob for top in (first, *first.top)}

    async def deltas(
        self, request: GenerateRequest, seconds: float, watch: Stopwatch | None = None
    ) -> AsyncGenerator[Delta]:
        """Yield the backend's deltas, waiting `seconds` in all; closing the iterator cancels the backend's work."""
        watch, answer = watch or Stopwatch(), self.backend.generate(request)
        async with closing_items(answer):
            while True:
                try:
                    delta = await watch.limited(seconds, anext(answer))
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise UpstreamTimeoutError(f"the {self.role} model took more than {seconds:g} seconds") from None
                yield delta

    async def _drop_cut(self, held: str, ids: list[int], reader: StepReader) -> bool:
        """Take the tokens of a character that was cut, shown as `held`, off the end of `ids`: it is written again.

        False if there is none, or nothing before it that would remain.
        """
        if not held or len(held) > _CUT_BYTES or not reader.fed or reader.ended:
            return False
        if self.tokenization is None or not ids:
            return True
        for cut in range(1, _CUT_BYTES + 1):
            if not (await self.tokenization.detokenize(ids[:-cut])).endswith(REPLACEMENT):
                del ids[-cut:]
                return True
        return False

    async def _unsent_end(self, reader: StepReader, ids: Sequence[int], last: Delta, limits: StepLimits) -> str:
        """The end of the step, which the backend did not send: stop strings are not part of its text."""
        end = ""
        self._names_stops = self._names_stops or last.stop_reason is not None
        if reader.ended is None and last.finish_reason == "stop":
            if self.tokenization is not None and ids:
                whole = await self.tokenization.detokenize(ids)
                if any(mark in whole for mark in reader.marks):  # else the model ended the answer by itself
                    end = reader.feed(_behind(whole, reader.fed))
            elif last.stop_reason in reader.marks:
                end = reader.feed(last.stop_reason or "")
            elif not (self._names_stops or reader.across) and (reader.fed.strip() or limits.within):
                # It is unknown whether a blank line or the end of the answer stopped the backend.
                # After the end of the answer the next step will be blank.
                end = reader.feed(BOUNDARY)
        return end + reader.finish()

    async def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        if self.template is not None:
            return await asyncio.to_thread(self.template.render, messages, tools, template_arguments)
        assert self.tokenization is not None
        return await self.tokenization.render(messages, tools, template_arguments)


def is_model_failure(error: Exception) -> bool:
    """Whether `error` means that a model cannot be used, not that agentspec has a bug."""
    return isinstance(error, (AgentSpecError, OSError))


def _shown(request: GenerateRequest) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """The tools and the template arguments of `request`, from its own fields or from `extra`."""
    arguments = request.template_arguments or request.extra.get("chat_template_kwargs") or NONE
    return request.tools or cast(Any, request.extra.get("tools")) or (), cast(Any, arguments)


def _bare(request: GenerateRequest) -> GenerateRequest:
    """`request` without the fields of chat requests, for a prompt that is already rendered."""
    kept = {name: value for name, value in request.extra.items() if name not in ("tools", "chat_template_kwargs")}
    return replace(request, tools=(), template_arguments={}, extra=kept)


def _text_of(delta: Delta) -> str:
    """The text of a delta, including text that the endpoint sends as reasoning instead of content."""
    thought = delta.extra.get("reasoning_content") or delta.extra.get("reasoning")
    return (thought if isinstance(thought, str) else "") + delta.text


def _arrived(delta: Delta) -> int:
    """The number of tokens in a delta; text without token ids counts as one token until the usage is known."""
    return len(delta.token_ids) or (1 if _text_of(delta) else 0)


def _ending_of(reader: StepReader, last: Delta) -> Ending:
    """What ended the step. Only a step with text that its token limit cut is gone on with: a call that adds nothing,
    or that the endpoint ended for reasons of its own, would be answered likewise for ever.
    """
    return reader.ended or ("length" if last.finish_reason == "length" and reader.text else "stop")


def _behind(whole: str, known: str) -> str:
    """The text of `whole` after `known`. Decoding may have dropped a space at the start of `whole`."""
    for begun in (known, known.lstrip(" ")):
        if whole.startswith(begun):
            return whole[len(begun) :]
    return ""


def _unopened(prompt: str, think_start: str) -> str:
    """`prompt` without the start of a thinking at its end, which some templates add to every prompt."""
    return prompt.removesuffix(think_start).removesuffix(think_start.rstrip())


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
