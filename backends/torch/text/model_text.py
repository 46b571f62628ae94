"""A model's text side as it is loaded: its tokenizer, end tokens, and the hashes of its namespace."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from agentspec.backends.base import NONE
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError, ModelUnavailableError
from agentspec.types import Message, Namespace


def load_tokenizer(model: str) -> tuple[Any, str]:
    """The tokenizer of a model, and its hash for namespaces. Raises `ModelUnavailableError`."""
    from agentspec.backends.model_store import resolve

    tokenizer = read_tokenizer(resolve(model).folder)
    return tokenizer, hashes(tokenizer)[0]


def read_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the tokenizer in {str(folder)!r}: {error}") from error


def hashes(tokenizer: Any) -> tuple[str, str]:
    """The hashes of the tokenizer and of its chat template, for namespaces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return _hash(text), _hash(str(getattr(tokenizer, "chat_template", None) or ""))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ModelTokens:
    """`Tokenization` of a backend that has a tokenizer in this process."""

    _tokenizer: TokenizerAdapter

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as a completion prompt."""
        return self._tokenizer.encode(text, special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` through the chat template, ready for the assistant's answer."""
        return self._tokenizer.encode(self._tokenizer.render(messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt text that the chat template makes of `messages`, ready for the assistant's answer."""
        shown = partial(self._tokenizer.render, messages, tools=tools, template_arguments=template_arguments)
        return await asyncio.to_thread(shown)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids of `text` as the continuation of a prompt or, with `begins`, as its beginning."""
        return await asyncio.to_thread(self._tokenizer.encode, text, special=begins)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self._tokenizer.decode, token_ids)

    async def spell(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` with special tokens by their names."""
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, special=True)


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer, chat template and end tokens, with the hashes that make up its namespace."""

    tokenizer: TokenizerAdapter
    fingerprint: str
    tokenizer_hash: str
    template_hash: str
    end_ids: frozenset[int]

    @classmethod
    def load(cls, model: str) -> ModelText:
        """Load from a model reference. Raises `ModelUnavailableError`."""
        from agentspec.backends.model_store import resolve

        files = resolve(model)
        tokenizer = read_tokenizer(files.folder)
        tokenizer_hash, template_hash = hashes(tokenizer)
        ends = ids_of_end(_generation_config(files.folder), tokenizer)
        return cls(TokenizerAdapter(tokenizer), files.fingerprint, tokenizer_hash, template_hash, ends)

    def namespace(self, tenant: str) -> Namespace:
        """The namespace in which the engine caches this model's tokens for a tenant."""
        return Namespace(tenant, self.fingerprint, self.tokenizer_hash, self.template_hash)

    def encode(
        self, messages: Sequence[Message], answer: Message, *, prompt: str | None = None, finished: bool = True
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, which is `prompt` or `messages`, and of the answer with its end token.

        With `messages`, the chat template renders the answer, including its tool calls. An answer that is not
        `finished` gets no end token. Raises `InvalidRequestError` for messages that the template refuses and for an
        answer without tokens.
        """
        if prompt is not None or not messages:
            before, answered = [] if prompt is None else self.tokenizer.encode(prompt, special=True), _content(answer)
        else:
            text = self.tokenizer.render(messages, start=True)
            whole = self.tokenizer.render([*messages, answer], start=False)
            before = self.tokenizer.encode(text)
            answered = whole.removeprefix(text) if whole.startswith(text) else _content(answer)
        if not (ids := self._ended(self.tokenizer.encode(answered), finished)):
            raise InvalidRequestError("the answer holds no tokens", param="messages")
        return before, ids

    def _ended(self, ids: list[int], finished: bool) -> list[int]:
        """Cut `ids` after the first end token, or add one if there is none; without end token if not `finished`."""
        end = next((at for at, token in enumerate(ids) if token in self.end_ids), len(ids))
        if not finished:
            return ids[:end]
        own = getattr(self.tokenizer.tokenizer, "eos_token_id", None)
        return ids[: end + 1] if end < len(ids) or own is None else [*ids, int(own)]


def ids_of_end(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end an answer, according to the model's generation settings and its tokenizer."""
    configured = getattr(generation_config, "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*ids, own] if token is not None)


def _generation_config(folder: Path) -> Any:
    """The model's generation settings, or those that its configuration implies, as transformers finds them."""
    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the configuration in {str(folder)!r}: {error}") from error


def _content(answer: Message) -> str:
    content = answer.get("content")
    if not isinstance(content, str) or not content:
        raise InvalidRequestError("the answer holds no text", param="messages")
    return content
