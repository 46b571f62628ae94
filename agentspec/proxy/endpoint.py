"""The generation endpoints: read a request, generate the answer or forward the request, and send the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import CHAT, AddsHeaders, Backend
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.pool import Attempt, Attempts, Pool
from agentspec.errors import InvalidRequestError, NotReadyError, RequestTimeoutError, SlowClientError
from agentspec.placement import prompt_blocks, scoped_call
from agentspec.protocol.completions import CompletionWriter, parse_completion
from agentspec.protocol.headers import STRATEGY_HEADER
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.responses import ChatWriter, ResponseWriter
from agentspec.proxy.admission import Deadline, Deadlines, Slots, until_disconnect
from agentspec.proxy.auth import Caller, read_caller
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.body.kept_names import refuse_kept_names
from agentspec.proxy.body.reading import parse_object, read_body
from agentspec.proxy.body.upstream_fields import UpstreamFields, check_head
from agentspec.proxy.forwarding import (
    Arrival,
    Inspector,
    StreamInspector,
    expected_choices,
    pass_through,
    upstream_body,
)
from agentspec.proxy.metering import Metering
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.streaming import CHUNKS, Framing, send_json, send_sse
from agentspec.reasoning.strategy import Strategy
from agentspec.runtime import Route, Runtime
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import OTHER
from agentspec.types import Delta, GenerateRequest

T = TypeVar("T")

MAX_MODEL_NAME = 256


@dataclass(slots=True)
class Exchange(Arrival):
    """One admitted request, whose body was read as `fields`, and the ways to answer it."""

    record: RequestRecord
    caller: Caller
    route: Route
    body: bytes
    fields: Mapping[str, Any]

    def release(self) -> None:
        """Drop the body, which is not needed any more: an answer can take minutes."""
        self.body, self.fields = b"", {}

    def tries(self, pool: Pool, blocks: Sequence[int]) -> Attempts:
        """The tries at the servers of `pool`, as far as the client's patience goes."""
        until, policy = self.deadline.at, self.caller.policy
        if policy.deadline_s is not None:
            until = min(until, asyncio.get_running_loop().time() + policy.deadline_s)
        call = scoped_call(self.caller.tenant, self.caller.labels.session, blocks)
        return Attempts(pool, call, until)

    def at(self, attempt: Attempt, asked: Route, body: bytes, fields: Mapping[str, Any]) -> None:
        """Send `body`, which holds `fields`, to the server of `attempt`, one of the pool that `asked` leads to."""
        self.record.attempt, self.record.response_headers = attempt, {}
        self.body, self.fields = body, fields
        self.route = Route(attempt.group, attempt.backend, attempt.model or asked.upstream_model)


@dataclass(slots=True)
class GenerationEndpoint:
    """`POST` to one of the generation routes, as an ASGI application. The middleware turns errors into responses."""

    root: ClassVar[str] = "/v1"  # what stands before `path` in the gateway's routes
    framing: ClassVar[Framing] = CHUNKS
    generates: ClassVar[bool] = True  # else the limits of keys do not count it
    path: str
    runtime: Runtime
    settings: ServerSettings
    limiter: Slots
    budget: BodyBudget
    deadlines: Deadlines
    metering: Metering | None  # None without keys
    several_tenants: bool = field(init=False)  # whose stored objects at a shared upstream must stay apart

    def __post_init__(self) -> None:
        self.several_tenants = len(self.settings.tenant_names) > 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        deadline = self.deadlines.start(self.settings.request_timeout)
        with self.budget.account(record.tenant) as account:
            reading = self._read_body(Headers(scope=scope), account.counting(receive), deadline)
            await self._answer_to(await reading, receive, Arrival(scope, send, deadline, account))

    async def _answer_to(self, body: bytes, receive: Receive, arrival: Arrival) -> None:
        """Answer a request whose body was read: a client that sends slowly takes no slot from others."""
        record = RequestRecord.of(arrival.scope)
        headers = dict(reversed(Headers(scope=arrival.scope).items()))  # the first line of a name counts
        caller = read_caller(headers, record.tenant, cached=self.runtime.settings.cache.store)
        async with (
            until_disconnect(receive),
            self.limiter.enter(record.tenant, caller.policy.deadline_s) as record.slot,
        ):
            fields = await self.budget.run(record.tenant, len(body), parse_object, body)
            route = self._route(fields, caller, record)
            caller = caller.asking(fields)
            record.labels = caller.labels
            send, deadline, account = arrival.send, arrival.deadline, arrival.account
            exchange = Exchange(arrival.scope, send, deadline, account, record, caller, route, body, fields)
            async with self._within_limits(record, body, fields):
                del body, fields  # an answer can take minutes
                if isinstance(route.backend, PoolBackend):
                    await self._try(exchange, route.backend.pool)
                else:
                    await self._respond(exchange)

    def _route(self, fields: Mapping[str, Any], caller: Caller, record: RequestRecord) -> Route:
        """The way to the model that is asked for, whose name `record` gets."""
        try:
            route = self.ready().route(_model(fields), caller.policy.strategy)
        except InvalidRequestError as error:
            error.param = STRATEGY_HEADER if error.param == "strategy" else error.param
            raise
        record.model = route.model or OTHER
        return route

    async def _try(self, exchange: Exchange, pool: Pool) -> None:
        """Answer by a server of `pool`, or another one as long as nothing has come back."""
        blocks: Sequence[int] = ()
        if pool.reads_prompts:
            blocks = await self._run(exchange, prompt_blocks, exchange.caller.tenant, exchange.fields)
        kept, tries = [(exchange.route, exchange.body, exchange.fields)], exchange.tries(pool, blocks)
        while (attempt := await self._next(tries, exchange.deadline)) is not None:
            async with attempt:
                exchange.at(attempt, *kept[0])
                attempt.when_answered = kept.clear
                await self._respond(exchange)

    async def _next(self, tries: Attempts, deadline: Deadline) -> Attempt | None:
        async with deadline.limit():
            return await anext(tries, None)

    async def _read_body(self, headers: Headers, receive: Receive, deadline: Deadline) -> bytes:
        """The body. Raises `SlowClientError` if it has not arrived at the deadline."""
        try:
            async with deadline.limit():
                return await read_body(headers, receive, self.settings.max_body_bytes)
        except RequestTimeoutError:
            seconds = f"{self.settings.request_timeout:g} s (server.request_timeout)"
            raise SlowClientError(f"the body did not arrive within {seconds}") from None

    async def _base_of(self, model: str) -> Route:
        """The route of a plain model, or of a strategy's base model; of a pool, that of one of its servers."""
        route = self.runtime.base_of(model)
        if not isinstance(route.backend, PoolBackend):
            return route
        backend, known = await route.backend.any_server()
        return Route(route.backend_name, backend, known or route.upstream_model)

    def _within_limits(
        self, record: RequestRecord, body: bytes, fields: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[Any]:
        """What counts the request for its key, and may refuse it."""
        if self.metering is None or not self.generates:
            return nullcontext()
        return self.metering.within_limits(record, self.path, body, fields)

    async def _respond(self, exchange: Exchange) -> None:
        """Answer a request whose body is read and whose model is known."""
        backend, record = exchange.route.backend, exchange.record
        if isinstance(backend, OpenAIBackend):
            await self._forward(exchange, backend)
            return
        request, writer = await self._run(exchange, self._parse, exchange.fields, exchange.caller, backend, record)
        exchange.release()
        await self._answer(self.runtime.answer(request, exchange.route), writer, exchange)

    async def _forward(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        inspector = StreamInspector(expected_choices(self.path, exchange.fields))
        await self._pass_on(exchange, backend, exchange.route.upstream_model, inspector)

    async def _pass_on(
        self, exchange: Exchange, backend: OpenAIBackend, model: str, inspector: Inspector, *, above: bool = False
    ) -> None:
        """Pass the bytes of the request to the upstream, and those of its answer back."""
        async with exchange.deadline.limit():
            body = await upstream_body(backend, self.path, exchange.body, exchange.fields, exchange.caller, model)
        exchange.release()
        await pass_through(exchange, backend, self.path, body, inspector, above=above)

    async def _run(self, exchange: Exchange, function: Callable[..., T], *arguments: Any) -> T:
        """The result of work on the exchange's body, in a thread if the body is large."""
        return await self.budget.run(exchange.record.tenant, len(exchange.body), function, *arguments)

    def _check(self, fields: Mapping[str, Any], backend: OpenAIBackend) -> None:
        """Raise `InvalidRequestError` for what the upstream may not get."""
        if self.several_tenants:
            refuse_kept_names(fields)
        check_amounts(fields, self.path, self.settings)
        UpstreamFields(backend.settings).check(fields, self.path)

    def _check_roles(self, fields: Mapping[str, Any], backend: Backend) -> None:
        """Raise `InvalidRequestError` for what the upstreams of a strategy may not be asked for."""
        for upstream in _strategy_upstreams(backend):
            check_amounts(fields, self.path, self.settings)
            UpstreamFields(upstream.settings).check_template_arguments(fields.get("chat_template_kwargs"))

    def _parse(
        self, fields: Mapping[str, Any], caller: Caller, backend: Backend, record: RequestRecord
    ) -> tuple[GenerateRequest, ResponseWriter]:
        """The request for `backend`, and the writer of its answer."""
        if self.path not in (routes := backend.capabilities.routes):
            refused = "answers chat completions only" if routes == (CHAT,) else f"does not answer {self.path}"
            raise InvalidRequestError(f"the model {record.model!r} {refused}", param="model")
        self._check_roles(fields, backend)
        kind: type[ChatWriter | CompletionWriter]
        if self.path == CHAT:
            (request, form), kind = parse_chat(fields), ChatWriter
        else:
            (request, form), kind = parse_completion(fields), CompletionWriter
        request, record.stream = caller.sign(request), form.stream
        if isinstance(backend, AddsHeaders):
            record.response_headers = backend.response_headers(request)
        return request, kind(request, form)

    async def _answer(self, deltas: AsyncGenerator[Delta], writer: ResponseWriter, exchange: Exchange) -> None:
        if not exchange.record.stream:
            await send_json(deltas, writer, exchange)
            return
        await send_sse(deltas, writer, exchange, obfuscate=bool(writer.format.obfuscation), framing=self.framing)

    def ready(self) -> Runtime:
        """The runtime. Raises `NotReadyError` while its backends are not built."""
        if not self.runtime.ready:
            raise NotReadyError("the models are still loading; try again soon")
        return self.runtime


def _strategy_upstreams(backend: Backend) -> list[OpenAIBackend]:
    """The upstreams that a strategy asks with what a request wants of it; none for another backend."""
    roles = backend.roles.values() if isinstance(backend, Strategy) else ()
    found = [role.backend for role in roles if isinstance(role.backend, OpenAIBackend)]
    pools = [role.backend.pool for role in roles if isinstance(role.backend, PoolBackend)]
    return [*found, *(member.backend for pool in pools for member, _ in pool.members())]


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_NAME:
        raise InvalidRequestError(f"model must be a string of 1 to {MAX_MODEL_NAME} characters", param="model")
    return model
