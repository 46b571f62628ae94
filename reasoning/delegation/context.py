"""What one model was shown of a problem and of the thinking so far. It grows at its end only: caches stay warm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentspec.backends.base import Tokenization
from agentspec.reasoning.delegation.templates import escape_markers
from agentspec.types import GenerateRequest, Message, SamplingParams


@dataclass(frozen=True, slots=True)
class TurnMarkup:
    """How a model's prompts go from an open answer to a question and into its answer: the text around the question."""

    before: str
    after: str

    def wrap(self, question: str, prefill: str) -> str:
        return f"{self.before}{question}{self.after}{prefill}"


class Context(ABC):
    """An open answer. Copies are cheap and independent; only `fork` copies."""

    @property
    def room(self) -> int | None:
        """Tokens that still fit the model; None where that is not known."""
        return None

    @abstractmethod
    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Go on with `text`, whose ids in this model are `token_ids` if they are known."""

    @abstractmethod
    def fork(self) -> Self:
        """The same context, to be extended on its own."""

    @abstractmethod
    def request(self, sampling: SamplingParams) -> GenerateRequest:
        """What makes the model go on from here."""

    @abstractmethod
    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        """What makes the model answer `question` about all this, its answer beginning with `prefill`."""


@dataclass(slots=True)
class TokenContext(Context):
    """As token ids: text of others is encoded piece by piece behind them, so that earlier ids never change."""

    base: GenerateRequest
    tokenization: Tokenization
    turn: TurnMarkup
    token_ids: list[int]
    length: int | None = None  # of the model's context

    @property
    def room(self) -> int | None:
        return None if self.length is None else self.length - len(self.token_ids)

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.token_ids.extend(token_ids or (await self.tokenization.tokenize(escape_markers(text)) if text else ()))

    def fork(self) -> TokenContext:
        return replace(self, token_ids=list(self.token_ids))

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        return replace(self.base, messages=None, token_ids=tuple(self.token_ids), sampling=sampling)

    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        asked = self.fork()
        asked.token_ids.extend(await self.tokenization.tokenize(self.turn.wrap(question, prefill)))
        return asked.request(sampling)


@dataclass(slots=True)
class TextContext(Context):
    """As one text, for raw completions with a chat template of ours."""

    base: GenerateRequest
    turn: TurnMarkup
    text: str

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.text += escape_markers(text)

    def fork(self) -> TextContext:
        return replace(self)

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        return replace(self.base, messages=None, text=self.text, sampling=sampling)

    async def ask(self, question: str, prefill: str, sampling: SamplingParams) -> GenerateRequest:
        asked = self.text + self.turn.wrap(question, prefill)
        return replace(self.base, messages=None, text=asked, sampling=sampling)


@dataclass(slots=True)
class MessageContext(Context):
    """As a conversation whose last message, the assistant's, is left open and continued by the endpoint."""

    base: GenerateRequest
    text: str

    async def extend(self, text: str, token_ids: Sequence[int] = ()) -> None:
        self.text += escape_markers(text)

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
