"""Answers of local models and strategies to requests of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentspec.backends.base import Backend
from agentspec.backends.local_abilities import holds_calls
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.protocol.openai_responses.conversation import Conversation
from agentspec.protocol.openai_responses.items import Item
from agentspec.protocol.openai_responses.request import ResponsesRequest
from agentspec.protocol.requests import parse_chat
from agentspec.proxy.admission.auth import Caller
from agentspec.runtime import Runtime
from agentspec.types import Delta, GenerateRequest


@dataclass(slots=True)
class LocalAnswer:
    """Makes the answer of `backend` to `request`, which continues the items of `history`.

    `whole` takes the forms of tools' inputs out of `request` if the backend cannot hold calls to them.
    """

    runtime: Runtime
    backend: Backend
    request: ResponsesRequest
    caller: Caller
    history: Sequence[Item]
    max_messages: int
    _made: Conversation | None = None

    def whole(self) -> GenerateRequest:
        """The request for a backend, with the whole conversation. Raises `InvalidRequestError` with our own `param`."""
        self._made = self.request.conversation(self.history)
        first = self._generate_request(self._made.messages)
        if any(tool.formed for tool in self.request.tools) and not holds_calls(self.backend, first):
            self.request = self.request.without_forms()
            first = self._generate_request(self._made.messages)
        return first

    async def deltas(self, first: GenerateRequest) -> AsyncGenerator[Delta]:
        """The answer to `first`; where it does not fit the model and that is wished, to its newest messages.

        Raises what the backend raises, of several refusals the last one.
        """
        try:
            async for delta in fitting(self.runtime.generate(one) for one in self._attempts(first)):
                yield delta
        except InvalidRequestError as error:
            raise self._renamed(error) from None

    def _attempts(self, first: GenerateRequest) -> Iterator[GenerateRequest]:
        yield first
        if self.request.truncation == "auto" and self._made is not None:
            yield from map(self._generate_request, shortened(self._made.messages))

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


async def fitting(attempts: Iterator[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """The first of the answers whose prompt fits the model. Raises the last one's `ContextLengthError` if none does."""
    refused: ContextLengthError | None = None
    for deltas in attempts:
        async with aclosing(deltas):
            try:
                first = await anext(deltas, None)
            except ContextLengthError as error:
                refused = error
                continue
            if first is not None:
                yield first
            async for delta in deltas:
                yield delta
            return
    if refused is not None:
        raise refused


def shortened(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation without its oldest messages: ever fewer of them, at last the newest alone.

    A system message at the beginning stays. What is left never begins with the result of a call that it lacks.
    """
    kept = 1 if messages and messages[0]["role"] == "system" else 0
    longest = len(messages) - kept - 1
    dropped = 0
    while dropped < longest:
        dropped = min(longest, dropped + max(1, dropped // 2))
        rest = list(messages[kept + dropped :])
        while len(rest) > 1 and rest[0]["role"] == "tool":
            rest.pop(0)
        if rest[0]["role"] != "tool":
            yield [*messages[:kept], *rest]
