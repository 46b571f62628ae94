"""Tokenization by a server's endpoints: vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.backends.base import NONE
from agentspec.backends.http import Endpoint, decode_json
from agentspec.errors import UpstreamError
from agentspec.types import Message


class ServerTokenization:
    """A server's tokenizer and chat template. Raises `UpstreamError`s.

    `detokenize` includes the turn markers, so that rendered prompts can be tokenized again.
    """

    def __init__(self, endpoint: Endpoint, model: str, timeout: float | None = None) -> None:
        self._endpoint = endpoint
        self._model = model
        self._timeout = timeout

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt that the chat template makes of `messages`, ready for the assistant's answer."""
        return await self.detokenize(await self.rendered_ids(messages, tools, template_arguments))

    async def rendered_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> list[int]:
        """The token ids of what `render` returns."""
        given: dict[str, Any] = {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
        given |= {"tools": [dict(tool) for tool in tools]} if tools else {}
        given |= {"chat_template_kwargs": dict(template_arguments)} if template_arguments else {}
        return await self._tokens(given)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        return await self._tokens({"prompt": text, "add_special_tokens": begins})

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        answer = await self._post("/detokenize", {"tokens": list(token_ids)})
        if not isinstance(answer.get("prompt"), str):
            raise self._wrong("/detokenize")
        return str(answer["prompt"])

    async def _tokens(self, given: dict[str, Any]) -> list[int]:
        tokens = (await self._post("/tokenize", given)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise self._wrong("/tokenize")
        return tokens

    async def _post(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"model": self._model, **given}).encode()
        content = await self._endpoint.fetch("POST", path, body=body, above=True, timeout=self._timeout)
        answer = decode_json(content, self._endpoint.name)
        return answer if isinstance(answer, dict) else {}

    def _wrong(self, path: str) -> UpstreamError:
        return UpstreamError(f"upstream {self._endpoint.name} answered {path} in a form that is not known")
