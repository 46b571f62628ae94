"""A model in its role: it opens contexts, continues them step by step and answers questions about them.

A context is the problem and the thinking so far as one model was shown them. It only grows at its end, for caches.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from agentspec.backends.base import NONE, Backend, Tokenization, closing_items, tokenization_of
from agentspec.backends.chat_templates import escape_markers
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamTimeoutError
from agentspec.reasoning.delegation.steps import BOUNDARY, Author, Ending, Step, StepReader
from agentspec.reasoning.strategy import whole_text
from agentspec.text import REPLACEMENT
from agentspec.types import Delta, GenerateRequest, SamplingParams

T = TypeVar("T")
Spend = Callable[[int], None]
OnText = Callable[[str], Awaitable[None]]
_CUT_BYTES = 3  # of a character of four
_THOUGHT, _ASKED = "Thought: 7.", "Question: 7?"


@dataclass(slots=True)
class Stopwatch:
    """Runs while a model's work is awaited, and stops while its results are passed on."""

    seconds: float = 0.0

    async def timed(self, work: Awaitable[T], limit: float | None = None) -> T:
        """Await `work` and return its result. Raises `TimeoutError` once the watch has run `limit` seconds in all."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(None if limit is None else limit - self.seconds):
                return await work
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(slots=True)
class TokenContext:
    """A context of token ids. Text of other models is encoded piece by piece and appended: earlier ids never change.

    `turn` is the template's text around a question: before it, and from it to the start of the answer. `asked` holds
    the ids of the model's questions, and forks share the ids of steps: a server tokenizes each once. `alike` holds for
    each author the ids that both models use for the same text: steps of such ids need not be tokenized.
    """

    base: GenerateRequest
    tokenization: Tokenization
    turn: tuple[str, str]
    token_ids: list[int]
    asked: dict[str, Sequence[int]]
    alike: defaultdict[str, set[int]]
    length: int | None = None  # of the model's context
    _steps: dict[str, Sequence[int]] = field(default_factory=dict)

    @property
    def room(self) -> int | None:
        """Tokens that still fit into the model's context; None if unknown."""
        return None if self.length is None else self.length - len(self.token_ids)

    async def extend(self, text: str, token_ids: Sequence[int] = (), author: str | None = None) -> None:
        """Append `text`; `token_ids` are its ids, if they are known, in this model or in that of another `author`."""
        known = author is None or (escape_markers(text) == text and self.alike[author].issuperset(token_ids))
        ids = token_ids if known else ()
        if text and not ids:
            ids = await self._encode(escape_markers(text), self._steps)
            if author is not None and list(ids) == list(token_ids):
                self.alike[author].update(ids)
        self.token_ids.extend(ids)

    def fork(self) -> TokenContext:
        """A copy of this context that can be extended independently; copies are cheap."""
        return replace(self, token_ids=list(self.token_ids))

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        """The request that makes the model continue this context."""
        return replace(self.base, messages=None, token_ids=tuple(self.token_ids), sampling=sampling)

    async def asking(self, question: str, prefill: str) -> TokenContext:
        """This context and `question`; the model's answer begins with `prefill`."""
        asked, (before, after) = self.fork(), self.turn
        asked.token_ids.extend(await self._encode(f"{before}{question}{after}{prefill}", self.asked))
        return asked

    async def _encode(self, text: str, known: dict[str, Sequence[int]]) -> Sequence[int]:
        if text not in known:
            known[text] = await self.tokenization.tokenize(text)
        return known[text]


@dataclass(slots=True)
class MessageContext:
    """A `TokenContext` in messages, the last of which is the assistant's: the endpoint continues it."""

    base: GenerateRequest
    text: str
    room: int | None = None

    async def extend(self, text: str, token_ids: Sequence[int] = (), author: str | None = None) -> None:
        self.text += escape_markers(text, self.text)

    def fork(self) -> MessageContext:
        return replace(self)

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        messages = [*(self.base.messages or ()), message("assistant", self.text)]
        return replace(self.base, messages=messages, sampling=sampling, continue_final=True)

    async def asking(self, question: str, prefill: str) -> MessageContext:
        asked = [*(self.base.messages or ()), message("assistant", self.text), message("user", question)]
        return MessageContext(replace(self.base, messages=asked), prefill)


Context = TokenContext | MessageContext


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

    It sends token ids if the backend exposes its tokenization, else messages whose last one the endpoint continues.
    Errors and settings call the model `role`. `keeps_thinking`: whether the endpoint's template keeps closed thinking;
    None until that is found out.
    """

    role: str
    backend: Backend
    model: str
    keeps_thinking: bool | None = None
    _turn: tuple[str, str] | None = field(default=None, init=False)
    _asked: dict[str, Sequence[int]] = field(default_factory=dict, init=False)
    _alike: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set), init=False)
    _last_tokens: dict[int, str] = field(default_factory=dict, init=False)  # texts of the tokens that ended steps
    _names_stops: bool = field(default=False, init=False)

    @property
    def tokenization(self) -> Tokenization | None:
        """The backend's tokenization, if the backend accepts token ids as prompts."""
        return tokenization_of(self.backend)

    @property
    def continues_messages(self) -> bool:
        return self.tokenization is None

    @property
    def knows_ends(self) -> bool:
        """Whether a blank line differs from the model's own end: by token ids, or by stop strings that are named."""
        return self.tokenization is not None or self._names_stops

    async def check(self, think_start: str) -> None:
        """Raises `ConfigurationError` if this model cannot continue an open answer."""
        advice = f"name another model as {self.role}: a local one, or one of vLLM, SGLang or llama.cpp"
        if self.continues_messages:
            if not self.backend.capabilities.continue_final:
                raise ConfigurationError(f"the {self.role} model {self.model!r} cannot continue an answer; {advice}")
            return
        try:
            await self.turn_markup(think_start)
        except InvalidRequestError as error:
            raise ConfigurationError(f"the {self.role} model {self.model!r}: {error}; {advice}") from None

    async def open(self, request: GenerateRequest, think_start: str, prefill: str | None = None) -> Context:
        """A context with `request`'s messages and the start of the thinking, or `prefill` instead."""
        base = replace(request, model=self.model)
        if (tokenization := self.tokenization) is None:
            return MessageContext(base, think_start if prefill is None else prefill)
        prompt = await tokenization.render(request.messages or (), *_shown(request))
        if prefill is not None:
            prompt = _unopened(prompt, think_start) + prefill
        elif think_start.strip() and not prompt.rstrip().endswith(think_start.strip()):
            prompt += think_start
        turn, ids = await self.turn_markup(think_start), await tokenization.tokenize(prompt)
        length = self.backend.capabilities.context_length
        return TokenContext(_bare(base), tokenization, turn, ids, self._asked, self._alike, length)

    async def turn_markup(self, think_start: str) -> tuple[str, str]:
        """The text between an open answer, a question and the next answer, found by rendering the template."""
        if self._turn is None:
            assert self.tokenization is not None
            shown = [message("user", _ASKED), message("assistant", _THOUGHT), message("user", _ASKED)]
            _, found, rest = (await self.tokenization.render(shown)).rpartition(_THOUGHT)
            before, asked, after = rest.rpartition(_ASKED)
            if not (found and asked):
                raise ConfigurationError(
                    f"the chat template of the {self.role} model {self.model!r} changes the messages it is given:"
                    f" name another model as {self.role}, or give that one another template"
                )
            self._turn = before, _unopened(after, think_start)
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
                text = held + whole_text(delta)
                held = text[len(text.rstrip(REPLACEMENT)) :]  # perhaps a character that the token limit cuts
                if (piece := reader.feed(text.removesuffix(held))) and on_text is not None:
                    await on_text(piece)
                last = delta
                if reader.ended:
                    break
        if last.usage is not None and not ids:
            reported = max(last.usage.completion_tokens, min(counted, 1))  # text without a cost would use up no budget
            spend(reported - counted)
            counted = reported
        cut = last.finish_reason == "length" and await self._drop_cut(held, ids, reader)
        end = "" if cut else reader.feed(held)
        if (end := end + await self._unsent_end(reader, ids, last, limits)) and on_text is not None:
            await on_text(end)
        # A step that was cut goes on only if it has text: a call that adds nothing would be answered likewise for ever.
        ending: Ending = reader.ended or ("length" if last.finish_reason == "length" and reader.text else "stop")
        # At an end of the model's own, `ids` include the token that ended the answer.
        exact = self.tokenization is not None and not reader.rest and ending not in ("closed", "stop")
        prompt = 0 if last.usage is None else last.usage.prompt_tokens
        return Step(reader.text, author, ending, counted, watch.seconds, tuple(ids) if exact else (), prompt)

    async def first_token(self, context: Context, seconds: float, spend: Spend) -> str:
        """The first token after `context`, as the log-probabilities name it; without them the text."""
        text, first = "", None
        logprobs = self.backend.capabilities.logprobs  # some endpoints refuse to return them
        request = context.request(SamplingParams(temperature=0.0, max_tokens=1, logprobs=logprobs))
        async with aclosing(self.deltas(request, seconds)) as deltas:
            async for delta in deltas:
                text += whole_text(delta)
                spend(_arrived(delta))
                first = first or next(iter(delta.logprobs), None)
        return text if first is None else first.text

    async def deltas(
        self, request: GenerateRequest, seconds: float, watch: Stopwatch | None = None
    ) -> AsyncGenerator[Delta]:
        """Yield the backend's deltas, waiting `seconds` in all; closing the iterator cancels the backend's work."""
        watch, answer = watch or Stopwatch(), self.backend.generate(request)
        async with closing_items(answer):
            while True:
                try:
                    delta = await watch.timed(anext(answer), seconds)
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
            if last.stop_reason in reader.marks:
                end = reader.feed(await self._stopped_by(last.stop_reason or "", reader.fed, ids))
            elif self.tokenization is not None and ids:
                whole = "" if self._names_stops else await self.tokenization.detokenize(ids)
                if any(mark in whole for mark in reader.marks):  # else the model ended the answer by itself
                    end = reader.feed(_behind(whole, reader.fed))
            elif not (self._names_stops or reader.across) and (reader.fed.strip() or limits.within):
                # It is unknown whether a blank line or the end of the answer stopped the backend.
                # After the end of the answer the next step will be blank.
                end = reader.feed(BOUNDARY)
        return end + reader.finish()

    async def _stopped_by(self, mark: str, fed: str, ids: Sequence[int]) -> str:
        """`mark`, which the backend named, and what its last token holds behind it. Few tokens end most steps: each is
        decoded once. If an earlier token may have begun the mark's line ends, the least that the last one can hold.
        """
        if self.tokenization is None or not ids:
            return mark
        if ids[-1] not in self._last_tokens:
            self._last_tokens[ids[-1]] = await self.tokenization.detokenize(ids[-1:])
        end = self._last_tokens[ids[-1]]
        behind = (end[at:] for at in range(len(end), 0, -1))
        return next((mark + rest for rest in behind if (fed + mark + rest).endswith(end)), mark)


def _shown(request: GenerateRequest) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """The tools and the template arguments of `request`, from its own fields or from `extra`."""
    arguments = request.template_arguments or request.extra.get("chat_template_kwargs") or NONE
    return request.tools or cast(Any, request.extra.get("tools")) or (), cast(Any, arguments)


def _bare(request: GenerateRequest) -> GenerateRequest:
    """`request` without the fields of chat requests, for a prompt that is already rendered."""
    kept = {name: value for name, value in request.extra.items() if name not in ("tools", "chat_template_kwargs")}
    return replace(request, tools=(), template_arguments={}, extra=kept)


def _arrived(delta: Delta) -> int:
    """The number of tokens in a delta; text without token ids counts as one token until the usage is known."""
    return len(delta.token_ids) or (1 if whole_text(delta) else 0)


def _behind(whole: str, known: str) -> str:
    """The text of `whole` after `known`. Decoding may have dropped a space at the start of `whole`."""
    for begun in (known, known.lstrip(" ")):
        if whole.startswith(begun):
            return whole[len(begun) :]
    return ""


def _unopened(prompt: str, think_start: str) -> str:
    """`prompt` without the start of a thinking at its end, which some templates add to every prompt."""
    return prompt.removesuffix(think_start).removesuffix(think_start.rstrip())


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
