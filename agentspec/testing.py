"""A fake for tests of code that uses agentspec: a backend that answers from a script."""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import anyio

from agentspec.backends.base import NONE, Capabilities
from agentspec.errors import ContextLengthError
from agentspec.types import Delta, FinishReason, GenerateRequest, Message, Speculation, TokenLogprob, Usage

_WORD = re.compile(r"\n\n|(?:(?!\n\n)\s)*\S+|(?:(?!\n\n)\s)+")


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted generation: `text`, split into one token per word, or `token_ids`.

    `latency` is the delay before each token in seconds, `first_latency` an additional delay before the first token.
    With `error`, the generation raises it after `error_after` deltas (0: before the first). `extra` is sent on a
    separate delta before the end (an upstream's `tool_calls`, say). `usage` replaces the counts that the fake computes.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    latency: float = 0.0
    first_latency: float = 0.0
    error: Exception | None = None
    error_after: int = 0
    finish_reason: FinishReason = "stop"
    usage: Usage | None = None
    speculation: Speculation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


Script = str | Sequence[int] | Exception | Answer
Scripted = Script | Callable[[GenerateRequest], Script]


class FakeBackend:
    """A `Backend` that answers from a script, `FakeBackend("first answer", "second")`, and repeats it when it ends.

    A script entry is a text, token ids, an exception to raise, an `Answer`, or a function from the request to one of
    these. `max_tokens`, `stop`, `stop_token_ids` and `logprobs` act as on a real backend; other options do nothing,
    since the script decides.

    `requests` lists all requests, `cancelled` the requests cancelled before their end; `active` counts running ones.
    """

    def __init__(
        self,
        *script: Scripted,
        latency: float = 0.0,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._script = script or ("ok",)
        self._latency = latency
        self._capabilities = capabilities or Capabilities(token_ids=True, logprobs=True, speculation=True)
        self._ids: dict[str, int] = {}  # of words, in the order in which they were first seen
        self._words: dict[int, str] = {}
        self._lock = threading.Lock()
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[GenerateRequest] = []
        self.active = 0
        self.closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def encode(self, text: str) -> list[int]:
        """The ids of the words of `text`; a word includes the blanks before it."""
        words = _WORD.findall(text)
        with self._lock:
            ids = [self._ids.setdefault(word, len(self._ids)) for word in words]
            self._words.update(zip(ids, words, strict=True))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; an id that `encode` never returned becomes ` <id>`."""
        return "".join(map(self._word_of, token_ids))

    def prompt_text(self, request: GenerateRequest) -> str:
        """The prompt of `request` as the text that a model would read, whatever form the request has."""
        if request.messages is not None:
            tools = request.tools or request.extra.get("tools") or ()
            return _rendered(request.messages, tools, start=not request.continue_final)
        return request.text if request.text is not None else self.decode(request.token_ids or ())

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt that `messages` become."""
        return _rendered(messages, tools, start=True)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        return self.encode(text)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        answer = self._enter(request)
        finished = False
        try:
            for position, delta in enumerate(self._deltas(request, answer)):
                if answer.error is not None and position == answer.error_after:
                    break
                await anyio.sleep((answer.latency or self._latency) + (answer.first_latency if position == 0 else 0.0))
                finished = delta.finish_reason is not None
                yield delta
            if answer.error is not None:
                finished = True
                raise answer.error
        finally:
            self._leave(request, finished)

    async def aclose(self) -> None:
        self.closed = True

    def _enter(self, request: GenerateRequest) -> Answer:
        with self._lock:
            entry = self._script[len(self.requests) % len(self._script)]
            self.requests.append(request)
            self.active += 1
        try:
            if not isinstance(entry, (str, Sequence, Exception, Answer)):
                entry = entry(request)
            return _answer(entry)
        except BaseException:
            self._leave(request, finished=True)
            raise

    def _leave(self, request: GenerateRequest, finished: bool) -> None:
        with self._lock:
            self.active -= 1
            if not finished:
                self.cancelled.append(request)

    def _word_of(self, token_id: int) -> str:
        return self._words.get(token_id, f" <{token_id}>")

    def _deltas(self, request: GenerateRequest, answer: Answer) -> list[Delta]:
        prompt = self._prompt(request)
        limit = self._capabilities.context_length
        if limit is not None and len(prompt) > limit:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens, the model takes {limit}", param="messages")
        given = answer.token_ids if answer.token_ids is not None else self.encode(answer.text)
        token_ids, words, reason, stop = self._cut(request, list(given), answer.finish_reason)
        deltas = [
            Delta(text=word, token_ids=(token_id,), logprobs=_logprobs(request, token_id, word))
            for token_id, word in zip(token_ids, words, strict=True)
        ]
        if answer.extra:
            deltas.append(Delta(extra=answer.extra))
        usage = answer.usage or Usage(prompt_tokens=len(prompt), completion_tokens=len(token_ids))
        speculation = answer.speculation if request.speculation else None
        return [*deltas, Delta(finish_reason=reason, stop_reason=stop, usage=usage, speculation=speculation)]

    def _prompt(self, request: GenerateRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.text is not None:
            return self.encode(request.text)
        return [token for message in request.messages or () for token in self.encode(_content(message.get("content")))]

    def _cut(
        self, request: GenerateRequest, token_ids: list[int], reason: FinishReason
    ) -> tuple[list[int], list[str], FinishReason, str | None]:
        """Apply stop ids, the length limit and stop strings. The tokens of a stop string count, without their text."""
        sampling = request.sampling
        stopped = next((at for at, token_id in enumerate(token_ids) if token_id in sampling.stop_token_ids), None)
        if stopped is not None:
            token_ids, reason = token_ids[:stopped], "stop"
        if sampling.max_tokens is not None and len(token_ids) > sampling.max_tokens:
            token_ids, reason = token_ids[: sampling.max_tokens], "length"
        words = [self._word_of(token_id) for token_id in token_ids]
        text = "".join(words)
        at, stop = min(((text.find(stop), stop) for stop in sampling.stop if stop in text), default=(0, None))
        if stop is None:
            return token_ids, words, reason, None
        begins = list(accumulate(map(len, words), initial=0))
        used = bisect_left(begins, at + len(stop))
        shown = [word[: max(0, at - begin)] for word, begin in zip(words[:used], begins, strict=False)]
        return token_ids[:used], shown, "stop", stop


def _rendered(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, start: bool) -> str:
    """A typical chat template: tools, then each message under its role. Without `start` the last message stays open."""
    text = f"<|tools|>\n{json.dumps(list(tools))}<|end|>\n" if tools else ""
    text += "".join(f"<|{message['role']}|>\n{_content(message.get('content'))}<|end|>\n" for message in messages)
    return f"{text}<|assistant|>\n" if start else text.removesuffix("<|end|>\n")


def _answer(entry: Script) -> Answer:
    if isinstance(entry, Answer):
        return entry
    if isinstance(entry, Exception):
        return Answer(error=entry)
    if isinstance(entry, str):
        return Answer(text=entry)
    return Answer(token_ids=tuple(entry))


def _logprobs(request: GenerateRequest, token_id: int, word: str) -> tuple[TokenLogprob, ...]:
    """Log-probability 0 for the token: the script leaves no alternative."""
    if not request.sampling.logprobs:
        return ()
    certain = TokenLogprob(token_id=token_id, text=word, logprob=0.0)
    return (replace(certain, top=(certain,)) if request.sampling.top_logprobs else certain,)


def _content(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    return "".join(part.get("text", "") for part in parts if isinstance(part, Mapping))
