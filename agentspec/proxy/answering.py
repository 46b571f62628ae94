"""Answers that the gateway writes itself: by a backend of this process, or by a chat that an upstream is asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentspec.backends.base import CHAT, AddsHeaders, Backend
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.errors import InvalidRequestError
from agentspec.protocol.responses import ApiWriter
from agentspec.protocol.wire import encode, event, named_event, object_in
from agentspec.proxy.answer import EVENT_STREAM, RequestAnswer, piece
from agentspec.proxy.api import Api, History, json_response, respond
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.body.hosted_tools import without_hosted_tools
from agentspec.proxy.body.upstream_fields import UpstreamFields
from agentspec.proxy.completions.prompts import merged
from agentspec.proxy.completions.translation import TRANSLATED, chat_deltas, chat_request
from agentspec.proxy.errors import error_response
from agentspec.proxy.request_context import RequestContext
from agentspec.reasoning.strategy import Strategy
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.proxy.endpoint import Services
    from agentspec.proxy.responses.stored import Keeper
    from agentspec.settings.server import ServerSettings


async def answer_here(
    api: Api, services: Services, context: RequestContext, body: RequestBody, answer: RequestAnswer
) -> None:
    """Answer a request of `api` by the model of its route. An upstream, whose body was checked, is asked for a chat."""
    backend, runtime = context.route.backend, services.runtime
    if not isinstance(backend, OpenAIBackend):
        require_route(api, backend, answer)
    history = await read_history(api, services.keeper, context, body)
    fields = asked_fields(body, answer, services.settings)
    if isinstance(backend, OpenAIBackend):
        async with context.deadline.limit():
            data, writer = await chat_request(api, backend, fields, body, context, history)
        answer.response_headers = {**answer.response_headers, **TRANSLATED}
        deltas = chat_deltas(backend, data, context, answer, body.wait_for)
    else:
        requests, writer = await body.work(parse_here, api, fields, context, history, services.settings)
        if isinstance(backend, AddsHeaders):
            answer.response_headers = {**answer.response_headers, **backend.response_headers(requests[0])}
        requests = requests if services.runs is None else services.runs.asking(requests)
        each = [partial(runtime.answer, request, context.route) for request in requests]
        deltas = each[0]() if len(each) == 1 else merged(each, requests[0].sampling.n)
    if answer.attempt is None:
        body.release()
    if services.runs is not None:
        deltas = services.runs.follow(context, answer, fields, deltas)
    await Sending(writer, context, body, answer, services.keeper).send(deltas)


def asked_fields(body: RequestBody, answer: RequestAnswer, settings: ServerSettings) -> Mapping[str, Any]:
    """The fields of the body; if the settings say so, without what only a hosted service can do: a header names it."""
    if settings.hosted_tools == "refuse":
        return body.fields
    fields, dropped = without_hosted_tools(body.fields)
    if dropped:
        answer.response_headers = {**answer.response_headers, "x-agentspec-dropped": ", ".join(dropped)}
    return fields


def require_route(api: Api, backend: Backend, answer: RequestAnswer) -> None:
    """Raise `InvalidRequestError` if the model does not answer requests of `api`."""
    if api.needs not in (routes := backend.capabilities.routes):
        refused = "answers chat completions only" if routes == (CHAT,) else f"does not answer {api.path}"
        raise InvalidRequestError(f"the model {answer.model!r} {refused}", param="model")


def check_roles(fields: Mapping[str, Any], path: str, backend: Backend, limits: ServerSettings) -> None:
    """Raise `InvalidRequestError` for what the upstreams of a strategy may not be asked for."""
    roles = backend.roles.values() if isinstance(backend, Strategy) else ()
    upstreams = [role.backend for role in roles if isinstance(role.backend, OpenAIBackend)]
    pools = [role.backend.pool for role in roles if isinstance(role.backend, PoolBackend)]
    for upstream in (*upstreams, *(member.backend for pool in pools for member, _ in pool.members())):
        check_amounts(fields, path, limits)
        UpstreamFields(upstream.settings).check_template_arguments(fields.get("chat_template_kwargs"))


def parse_here(
    api: Api, fields: Mapping[str, Any], context: RequestContext, history: History, limits: ServerSettings
) -> tuple[Sequence[GenerateRequest], ApiWriter]:
    """The requests for a backend of this process, and what writes their answer."""
    check_roles(fields, api.path, context.route.backend, limits)
    requests, writer = api.parse(fields, context, history)
    return [context.complete(request) for request in requests], writer


async def read_history(api: Api, keeper: Keeper, context: RequestContext, body: RequestBody) -> History:
    """The items of the stored answers that the request continues."""
    previous = body.fields.get("previous_response_id") if api.keeps_answers else None
    if not isinstance(previous, str):  # another value is refused where the fields are read
        return ()
    async with context.deadline.limit():
        items, size = await keeper.history(context.tenant, previous)
    body.take(size)
    return items


@dataclass(frozen=True, slots=True)
class Sending:
    """Sends the answer to one request in the form that `writer` gives it, and stores it if it is to be."""

    writer: ApiWriter
    context: RequestContext
    body: RequestBody
    answer: RequestAnswer
    keeper: Keeper

    async def send(self, deltas: AsyncGenerator[Delta]) -> None:
        """Send the answer that `deltas` are.

        An error before the first delta is raised and gets its own HTTP status; a later one ends a stream with an event.
        """
        writer = self.writer
        self.answer.stream = self.context.stream
        try:
            async with aclosing(deltas):
                await (self._send_events(deltas) if self.context.stream else self._send_whole(deltas))
        except InvalidRequestError as error:
            error.param = error.param and writer.own_name(error.param)
            raise

    async def _send_whole(self, deltas: AsyncGenerator[Delta]) -> None:
        body, writer = self.body, self.writer
        async with self.context.deadline.limit():
            async for delta in deltas:
                await body.grow(delta.size)
                self.answer.add(delta)
                writer.add(delta)
        for _ in writer.close():
            pass
        await self._store()
        await respond(self.answer, await body.work(lambda: json_response(writer.body()), size=body.answer))

    async def _send_events(self, deltas: AsyncGenerator[Delta]) -> None:
        answer, writer, limit = self.answer, self.writer, self.context.deadline.limit
        async with limit():
            delta: Delta | None = await anext(deltas, Delta(finish_reason="stop"))
        await answer.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            async with limit():
                while delta is not None:
                    if writer.holds_answer:
                        await self.body.grow(delta.size)
                    answer.add(delta)
                    await self._send_chunks(writer.chunks(delta))
                    delta = await anext(deltas, None)
            closing = [*writer.close()]
            await self._store()
            await self._send_chunks([*closing, *writer.last()])
        except Exception as error:
            answer.interrupt(error)
            known = error_response(error, answer.request_id)
            message = object_in(known.body)["error"]
            await self._send_chunks([writer.failed(message, known.status, answer.request_id)])
        await answer.send({"type": "http.response.body", "body": writer.end})

    async def _send_chunks(self, chunks: Iterable[dict[str, Any]]) -> None:
        for chunk in chunks:
            data = encode(chunk)
            await self.answer.send(piece(named_event(chunk["type"], data) if self.writer.named else event(data)))

    async def _store(self) -> None:
        if self.writer.stored:
            await self.keeper.store(self.writer, self.context, self.answer.seconds)
