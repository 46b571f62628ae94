"""A prompt into which a document is inserted: before the last user message's text, or before a text prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec.backends.base import Tokenization
from agentspec.backends.chat_templates import escape_markers, plain
from agentspec.errors import ContextLengthError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.types import GenerateRequest, Message

SEPARATOR = "\n\n"  # between the document and the question


@dataclass(slots=True)
class DocumentPrompt:
    """The question's tokens before (`head`) and after (`tail`) the document. The first query is made of `asked`.

    If the document does not fit into the model's context of `length` tokens, the document is cut, never the question.
    """

    tokenization: Tokenization
    head: tuple[int, ...]
    tail: tuple[int, ...]
    asked: tuple[int, ...]
    document_tokens: int
    length: int | None = None
    _gap: tuple[int, ...] = ()
    _read: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    async def of(
        cls, request: GenerateRequest, tokenization: Tokenization, document_tokens: int, length: int | None
    ) -> DocumentPrompt:
        """Raises `InvalidRequestError` for messages that are not text or that the template refuses."""
        gap = tuple(await tokenization.tokenize(SEPARATOR))
        if request.messages is not None:
            head, tail, asked = await _of_messages(request, request.messages, tokenization)
        else:
            head, tail = await _of_text(request, tokenization)
            asked = tail
        return cls(tokenization, head, tail, asked, document_tokens, length, gap)

    @property
    def tokens(self) -> int:
        """The number of tokens in the question."""
        return len(self.head) + len(self.tail)

    def room(self, answer: int = 0) -> int | None:
        """Tokens left in the model's context after the question and `answer` tokens of answer; None if unknown."""
        return None if self.length is None else self.length - self.tokens - answer

    def require(self, tokens: int) -> None:
        """Raises `ContextLengthError` if the question and `tokens` of answer do not fit, even without a document."""
        room = self.room()
        if room is not None and tokens > max(room, 0):
            raise ContextLengthError(
                f"the prompt has {self.tokens} tokens and max_tokens is {tokens}; the model takes {self.length}",
                param="messages",
            )

    async def with_document(self, document: Document | None, tokens: int) -> tuple[int, ...]:
        """The prompt of an answer of `tokens` tokens, with as much of the document as fits."""
        return (*self.head, *await self._document(document, tokens), *self.tail)

    async def _document(self, document: Document | None, taken: int) -> tuple[int, ...]:
        if document is None:
            return ()
        written = f"{document.title}\n{document.text}" if document.title else document.text
        if written not in self._read:
            tokens = await self.tokenization.tokenize(escape_markers(written))
            self._read[written] = tuple(tokens)[: self.document_tokens]
        room = self.room(taken)
        fits = self.document_tokens if room is None else max(0, room - len(self._gap))
        kept = self._read[written][:fits]
        return (*kept, *self._gap) if kept else ()


async def _of_messages(
    request: GenerateRequest, messages: Sequence[Message], tokenization: Tokenization
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens of the rendered messages before and from the last user message's text on, and of that text."""
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    place = users[-1] if users else len(messages) - 1
    mark = f"document-{secrets.token_hex(8)}"
    asked = str(plain(messages[place]).get("content", ""))
    marked = [{**message, "content": mark + asked} if at == place else message for at, message in enumerate(messages)]
    rendered = await tokenization.render(marked, request.tools, request.template_arguments)
    head, _, tail = rendered.partition(mark)
    return (
        tuple(await tokenization.tokenize(head)),
        tuple(await tokenization.tokenize(tail)),
        tuple(await tokenization.tokenize(asked)),
    )


async def _of_text(request: GenerateRequest, tokenization: Tokenization) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after the document, which comes after the model's begin-of-text tokens."""
    begin = tuple(await tokenization.tokenize("", begins=True))
    ids = tuple(request.token_ids or ()) if request.text is None else tuple(await tokenization.tokenize(request.text))
    if request.text is None and begin and ids[: len(begin)] != begin:
        return (), ids
    return begin, ids[len(begin) :] if request.text is None else ids
