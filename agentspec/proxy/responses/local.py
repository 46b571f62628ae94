"""Answers of local models and strategies to requests of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.conversation import Conversation
from agentspec.protocol.openai_responses.items import Item
from agentspec.protocol.openai_responses.request import ResponsesRequest
from agentspec.protocol.requests import parse_chat
from agentspec.proxy.admission.auth import Caller
from agentspec.runtime import Runtime
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class LocalAnswer:
    """Makes the answer to `request`, which continues the items of `history`."""

    runtime: Runtime
    request: ResponsesRequest
    caller: Caller
    history: Sequence[Item]
    max_messages: int
    _made: Conversation | None = None

    def whole(self) -> GenerateRequest:
        """The request for a backend, with the whole conversation. Raises `InvalidRequestError` with our own `param`."""
        self._made = self.request.conversation(self.history)
        return self._generate_request(self._made.messages)

    async def deltas(self, first: GenerateRequest) -> AsyncGenerator[Delta]:
        """The answer to `first`. Raises what the backend raises, with our own `param`."""
        try:
            async with aclosing(self.runtime.generate(first)) as deltas:
                async for delta in deltas:
                    yield delta
        except InvalidRequestError as error:
            raise self._renamed(error) from None

    def _generate_request(self, messages: list[dict[str, Any]]) -> GenerateRequest:
        try:
            parsed, _ = parse_chat({**self.request.chat, "messages": messages}, max_messages=self.max_messages)
        except InvalidRequestError as error:
            raise self._renamed(error) from None
        return self.caller.sign(parsed)

    def _renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        origins = self._made.origins if self._made else ()
        error.param = self.request.own_name(error.param, origins, len(self.history))
        return error
