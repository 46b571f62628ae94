"""The chat template and the tokenizer of a local model, as its backend shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentspec.backends.base import NONE
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.types import Message


class ModelTokens:
    """`Tokenization` and `SpellsTokens` of a backend that has a tokenizer in this process."""

    _tokenizer: TokenizerAdapter

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as a completion prompt."""
        return self._tokenizer.encode(text, special=True)

    def encode_chat(self, messages: Sequence[Message], *, continue_final: bool = False) -> list[int]:
        """Token ids of `messages` through the chat template, ready for the assistant's answer."""
        return self._tokenizer.encode_chat(messages, continue_final=continue_final)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
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
