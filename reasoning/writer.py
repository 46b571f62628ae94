"""A model in its role: opens contexts, continues them step by step, answers questions about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentspec.backends.base import Backend, TextSide, text_side
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidRequestError, UpstreamTimeoutError
from agentspec.reasoning.context import Context, MessageContext, TextContext, TokenContext, Turn
from agentspec.reasoning.steps import BOUNDARY, Author, Ending, Step, StepReader
from agentspec.reasoning.templates import Template
from agentspec.types import Delta, GenerateRequest, Message, SamplingParams

Spend = Callable[[int], None]
_THOUGHT, _ASKED = "Thought: 7.", "Question: 7?"


@dataclass(frozen=True, slots=True)
class Pen:
    """How a step is to be written. `across` lets it run over blank lines, up to its limit.

    `within` says that it begins in the middle of a paragraph, which a blank line may end at once.
    """

    sampling: SamplingParams
    closing: str
    seconds: float
    across: bool = False
    within: bool = False

    def limited(self, tokens: int, *, across: bool = False, within: bool = False) -> Pen:
        return replace(self, sampling=replace(self.sampling, max_tokens=tokens), across=across, within=within)

    def reader(self) -> StepReader:
        return StepReader(self.closing, across=self.across)

    def stops(self, *, told: bool) -> tuple[str, ...]:
        """What stops the backend. The closing mark only if it is `told` afterwards which of the two it was."""
        return tuple(mark for mark in ("" if self.across else BOUNDARY, self.closing if told else "") if mark)


@dataclass(slots=True)
class Writer:
    """A backend's model that goes on where its own or another's text ends.

    It works with token ids where the backend shows its text side, with raw completions under a `template`, and
    otherwise by continuing the last message. `role` is its name in errors and settings. `keeps_thinking`: whether
    the endpoint's own template keeps thinking that is closed.
    """

    role: str
    backend: Backend
    model: str
    template: Template | None = None
    keeps_thinking: bool = True
    _turn: Turn | None = field(default=None, init=False)

    @property
    def side(self) -> TextSide | None:
        """The backend's text side, where prompts may be token ids."""
        return text_side(self.backend)

    @property
    def continues_messages(self) -> bool:
        return self.side is None and self.template is None

    async def check(self) -> None:
        """Raises `ConfigurationError` if this model cannot go on with an open answer."""
        advice = f"give {self.role}_template (plain, chatml or a Jinja file), or another model as {self.role}"
        if self.continues_messages:
            if not self.backend.capabilities.continue_final:
                raise ConfigurationError(f"the {self.role} model {self.model!r} cannot continue an answer: {advice}")
            return
        try:
            await self._render([{"role": "user", "content": _ASKED}])
        except InvalidRequestError as error:
            raise ConfigurationError(f"the {self.role} model {self.model!r}: {error}; {advice}") from None

    async def open(self, request: GenerateRequest, think_start: str) -> Context:
        """The context of `request`'s messages with the thinking begun. Raises what the backend raises."""
        base = replace(request, model=self.model)
        if self.continues_messages:
            return MessageContext(base, think_start)
        prompt = await self._render(request.messages or ())
        if think_start.strip() and not prompt.rstrip().endswith(think_start.strip()):
            prompt += think_start
        turn = await self.turn(think_start)
        if self.side is None:
            return TextContext(base, turn, prompt)
        ids = await self.side.tokenize(prompt, begins=self.template is not None)
        return TokenContext(base, self.side, turn, ids, self.backend.capabilities.context_length)

    async def turn(self, think_start: str) -> Turn:
        """The text between an open answer, a question and the next answer, learned from the template itself."""
        if self._turn is None:
            said = [_message("user", _ASKED), _message("assistant", _THOUGHT), _message("user", _ASKED)]
            _, found, rest = (await self._render(said)).rpartition(_THOUGHT)
            before, asked, after = rest.rpartition(_ASKED)
            if not (found and asked):
                raise ConfigurationError(
                    f"the chat template of the {self.role} model {self.model!r} changes the messages it is given:"
                    f" set {self.role}_template to one that does not"
                )
            self._turn = Turn(before, after.removesuffix(think_start).removesuffix(think_start.rstrip()))
        return self._turn

    async def write(self, context: Context, author: Author, pen: Pen, spend: Spend) -> AsyncGenerator[str | Step]:
        """One step from `context`, which is not changed: its text as it becomes certain, and the step at the end.

        `spend` hears of tokens as they come, so that those of a step that is given up count too. Raises what the
        backend raises, and `UpstreamTimeoutError` after `pen.seconds`.
        """
        began, reader = time.perf_counter(), pen.reader()
        request = context.request(replace(pen.sampling, stop=pen.stops(told=self.side is not None)))
        ids: list[int] = []
        counted, last = 0, Delta()
        async with aclosing(self.deltas(request, pen.seconds)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
                arrived = len(delta.token_ids) or (1 if _said(delta) else 0)
                counted += arrived
                spend(arrived)
                if piece := reader.feed(_said(delta)):
                    yield piece
                last = delta
                if reader.ended:
                    break
        if last.usage is not None and not ids:
            spend(last.usage.completion_tokens - counted)
            counted = last.usage.completion_tokens
        async for piece in self._ending(reader, ids, last, pen):
            yield piece
        exact = self.side is not None and bool(ids) and not reader.rest and reader.ended != "closed"
        if exact and reader.ended is None and last.finish_reason == "stop":
            exact = False  # the id that ended the answer is among them
        ending = _ending_of(reader, last)
        yield Step(reader.text, author, ending, counted, time.perf_counter() - began, tuple(ids) if exact else ())

    async def ask(
        self, context: Context, question: str, prefill: str, seconds: float, spend: Spend
    ) -> tuple[str, dict[str, float]]:
        """The first token of the answer to `question`, and the ten likeliest with their log-probabilities."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, top_logprobs=10)
        request = await context.ask(question, prefill, sampling)
        text = ""
        tops: dict[str, float] = {}
        async with aclosing(self.deltas(request, seconds)) as deltas:
            async for delta in deltas:
                text += delta.text
                spend(len(delta.token_ids))
                for entry in delta.logprobs[:1]:
                    tops = tops or {top.text: top.logprob for top in (entry, *entry.top)}
        return text, tops

    async def deltas(self, request: GenerateRequest, seconds: float) -> AsyncGenerator[Delta]:
        """The backend's answer within `seconds`; closing it cancels the backend's work."""
        limit = asyncio.get_running_loop().time() + seconds
        answer = self.backend.generate(request)
        async with _closing(answer):
            while True:
                try:
                    async with asyncio.timeout_at(limit):
                        delta = await anext(answer)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise UpstreamTimeoutError(f"the {self.role} model took more than {seconds:g} seconds") from None
                yield delta

    async def _ending(self, reader: StepReader, ids: Sequence[int], last: Delta, pen: Pen) -> AsyncIterator[str]:
        """The end of the step that the backend did not send: a stop string is not part of its text."""
        if reader.ended is None and last.finish_reason == "stop":
            if self.side is not None and ids:
                whole = await self.side.detokenize(ids)
                if any(mark in whole for mark in reader.marks):  # else the answer's own end stopped it
                    yield reader.feed(_behind(whole, reader.heard))
            elif not reader.across and (reader.heard.strip() or pen.within):
                # Without ids nobody knows whether a blank line or the answer's end stopped it. If it was the end, the
                # next step will be blank.
                yield reader.feed(BOUNDARY)
        yield reader.finish()

    async def _render(self, messages: Sequence[Message]) -> str:
        if self.template is not None:
            return self.template.render(messages)
        assert self.side is not None
        return await self.side.render(messages)


def failing(error: Exception) -> bool:
    """Whether `error` means that a model cannot be used, rather than that our code is wrong."""
    return isinstance(error, (AgentSpecError, OSError))


def _said(delta: Delta) -> str:
    """The text of a delta, also where an endpoint puts what it takes for thinking beside the content."""
    thought = delta.extra.get("reasoning_content") or delta.extra.get("reasoning")
    return (thought if isinstance(thought, str) else "") + delta.text


def _ending_of(reader: StepReader, last: Delta) -> Ending:
    return reader.ended or ("stop" if last.finish_reason == "stop" else "length")


def _behind(whole: str, known: str) -> str:
    """What `whole` says after `known`. A blank at its beginning may have been lost in decoding."""
    for begun in (known, known.lstrip(" ")):
        if whole.startswith(begun):
            return whole[len(begun) :]
    return ""


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _closing(iterator: AsyncIterator[Any]) -> Any:
    return aclosing(cast(Any, iterator)) if hasattr(iterator, "aclose") else AsyncExitStack()
