"""The problem and the thinking so far as one model was shown them. Contexts only grow at the end: caches stay warm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agentspec.backends.base import Tokenization
from agentspec.backends.chat_templates import escape_markers
from agentspec.types import GenerateRequest, Message, SamplingParams

ENCODED = 4  # texts: one is enough for a question, and one for the step


@dataclass(frozen=True, slots=True)
class TurnMarkup:
    """The template's text around a question: `before` closes an open answer, `after` opens the question's answer."""

    before: str
    after: str

    def wrap(self, question: str, prefill: str) -> str:
        return f"{self.before}{question}{self.after}{prefill}"


class Context(ABC):
    """An answer that a model can continue. Only `fork` copies it; copies are cheap and independent."""

    @property
    def room(self) -> int | None:
        """Tokens that still fit into the model's context; None if unknown."""
        return None

    @abstractmethod
    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Append `text`; `token_ids` are its ids in this model, if they are known."""

    @abstractmethod
    def fork(self) -> Self:
        """A copy of this context that can be extended independently."""

    @abstractmethod
    def request(self, sampling: SamplingParams) -> GenerateRequest:
        """The request that makes the model continue this context."""

    @abstractmethod
    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        """The request that asks `question` about this context; the model's answer begins with `prefill`."""


@dataclass(slots=True)
class TokenContext(Context):
    """A context of token ids. Text of other models is encoded piece by piece and appended: earlier ids never change.

    Forks share the ids of the last texts, since a step is judged and kept, and a question is asked again.
    """

    base: GenerateRequest
    tokenization: Tokenization
    turn: TurnMarkup
    token_ids: list[int]
    length: int | None = None  # of the model's context
    _encoded: dict[str, Sequence[int]] = field(default_factory=dict)

    @property
    def room(self) -> int | None:
        return None if self.length is None else self.length - len(self.token_ids)

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.token_ids.extend(token_ids or (await self._encode(escape_markers(text)) if text else ()))

    def fork(self) -> TokenContext:
        return replace(self, token_ids=list(self.token_ids))

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        return replace(self.base, messages=None, token_ids=tuple(self.token_ids), sampling=sampling)

    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        asked = self.fork()
        asked.token_ids.extend(await self._encode(self.turn.wrap(question, prefill)))
        return asked.request(sampling)

    async def _encode(self, text: str) -> Sequence[int]:
        ids = self._encoded.pop(text, None) or await self.tokenization.tokenize(text)
        self._encoded[text] = ids
        if len(self._encoded) > ENCODED:
            del self._encoded[next(iter(self._encoded))]
        return ids


@dataclass(slots=True)
class TextContext(Context):
    """A context of one text, for raw completions with a chat template that agentspec applies."""

    base: GenerateRequest
    turn: TurnMarkup
    text: str

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.text += escape_markers(text, self.text)

    def fork(self) -> TextContext:
        return replace(self)

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        return replace(self.base, messages=None, text=self.text, sampling=sampling)

    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        asked = self.text + self.turn.wrap(question, prefill)
        return replace(self.base, messages=None, text=asked, sampling=sampling)


@dataclass(slots=True)
class MessageContext(Context):
    """A conversation whose last message is the assistant's; the endpoint leaves it open and continues it."""

    base: GenerateRequest
    text: str

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.text += escape_markers(text, self.text)

    def fork(self) -> MessageContext:
        return replace(self)

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        return self._continued([_assistant(self.text)], sampling)

    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        asked = {"role": "user", "content": question}
        return self._continued([_assistant(self.text), asked, _assistant(prefill)], sampling)

    def _continued(self, added: list[Message], sampling: SamplingParams) -> GenerateRequest:
        messages = [*(self.base.messages or ()), *added]
        return replace(self.base, messages=messages, sampling=sampling, continue_final=True)


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
