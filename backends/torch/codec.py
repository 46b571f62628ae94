"""Between text and token ids, safely from several threads: chat templates, encoding, decoding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jinja2

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, Message


class Codec:
    """A tokenizer's two directions, with special tokens skipped when decoding. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # settings baked into the file would cut prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.special_ids = _special_ids(tokenizer)

    def prompt(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises `InvalidRequestError` for messages that the chat template refuses."""
        if request.token_ids is not None:
            return [int(token) for token in request.token_ids]
        if request.text is not None:
            return self.encode(request.text, special=True)
        assert request.messages is not None
        return self.encode_chat(request.messages, continue_final=request.continue_final)

    def encode_chat(self, messages: Sequence[Message], *, continue_final: bool = False) -> list[int]:
        """Token ids of `render`."""
        return self.encode(self.render(messages, start=not continue_final, continue_final=continue_final))

    def render(self, messages: Sequence[Message], *, start: bool, continue_final: bool = False) -> str:
        """Messages through the model's own chat template (sandboxed): `start` opens an answer, `continue_final` leaves
        the last message open. Raises `InvalidRequestError` for what the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            message = "this model has no chat template: use completions with a plain prompt instead of messages"
            raise InvalidRequestError(message, param="messages")
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tokenize=False,
                add_generation_prompt=start,
                continue_final_message=continue_final,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return text

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds what the model wants around a prompt (a beginning-of-text token)."""
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=True))
        with self._lock:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def spell(self, token_id: int) -> str:
        """One token as text, special ones included."""
        if self._fast is not None:
            return str(self._fast.decode([token_id], skip_special_tokens=False))
        with self._lock:
            return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for no text: ends, roles and other marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marks = (token for token, added_token in added.items() if getattr(added_token, "special", False))
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *marks])


def _plain(message: Message) -> dict[str, Any]:
    """The message with a list of text parts joined to one string. Raises for parts that are not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError("message content may hold text parts only", param="messages")
    return {**message, "content": "".join(str(text) for text in texts)}
