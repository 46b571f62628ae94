"""The pipeline of a request for a model: read it, admit it, then forward it or have it answered here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import contains
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.pool import Attempts, Pool
from agentspec.errors import InvalidRequestError, NotReadyError, RequestTimeoutError, SlowClientError
from agentspec.placement import prompt_blocks, scoped_call
from agentspec.protocol.headers import read_early_tools, read_policy
from agentspec.proxy.admission import Deadline, Slots, until_disconnect
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.answering import answer_here
from agentspec.proxy.api import Api
from agentspec.proxy.body.amounts import check_amounts
from agentspec.proxy.body.budget import BodyBudget, RequestBody
from agentspec.proxy.body.changing_prefix import CHANGING, leave_out_changing_prefix
from agentspec.proxy.body.reading import parse_object, read_body
from agentspec.proxy.body.stored_names import refuse_stored_names
from agentspec.proxy.body.upstream_fields import UpstreamFields
from agentspec.proxy.forwarding import Inspector, StreamInspector, expected_choices, forward, upstream_body
from agentspec.proxy.metering import Metering
from agentspec.proxy.request_context import RequestContext, first_lines
from agentspec.runtime import Route, Runtime
from agentspec.settings.server import ServerSettings
from agentspec.telemetry import tracing
from agentspec.telemetry.gen_ai import OPERATIONS, describe
from agentspec.telemetry.metrics import OTHER

if TYPE_CHECKING:
    from agentspec.proxy.responses.stored import Keeper
    from agentspec.proxy.ui.runs import Runs

MAX_MODEL_NAME = 256


@dataclass(frozen=True, slots=True)
class Services:
    """The runtime, the limits and the stored answers of one gateway. `metering` is None without keys; with
    `several_tenants` their stored objects at a shared upstream must stay apart. `runs` is None where none are kept.
    """

    runtime: Runtime
    settings: ServerSettings
    slots: Slots
    budget: BodyBudget
    deadlines: WeakSet[Deadline]
    metering: Metering | None
    keeper: Keeper
    several_tenants: bool
    runs: Runs | None = None

    def ready(self) -> Runtime:
        if not self.runtime.ready:
            raise NotReadyError("the models are still loading; try again soon")
        return self.runtime


@dataclass(slots=True)
class GatewayEndpoint:
    """`POST` to one route, as an ASGI application; `respond` answers an admitted request."""

    root: ClassVar[str] = "/v1"  # what stands before `path` in the gateway's routes
    generates: ClassVar[bool] = True  # else the limits of keys do not count it
    path: str
    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = RequestAnswer.of(scope)
        if "opentelemetry.trace" in sys.modules and (operation := OPERATIONS.get(self.path)):
            answer.span = tracing.start(operation, kind="server", headers=Headers(scope=scope))
        with nullcontext() if answer.span is None else answer.span.current():
            await self._answer(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, answer: RequestAnswer) -> None:
        services = self.services
        deadline = Deadline(services.settings.request_timeout, services.deadlines)
        with services.budget.body(answer.tenant) as body:
            await self._read(Headers(scope=scope), body.counting(receive), body, deadline)
            headers = first_lines(scope)
            policy = read_policy(headers)
            # A client that sends slowly takes no slot from others: its body is here.
            slot = services.slots.enter(answer.tenant, policy.deadline_s)
            read = answer.seconds
            async with until_disconnect(receive), slot as answer.release_slot:
                answer.queued = answer.seconds - read
                body.fields = await body.work(parse_object, body.data)
                route = self._route(body.fields, answer)
                if await body.work(contains, body.data, CHANGING):
                    await body.work(leave_out_changing_prefix, body, route.backend)
                cached = services.runtime.settings.cache.store
                context = RequestContext.of(
                    scope, headers, body.fields, answer, self.path, deadline, route, policy, cached
                )
                if self.generates and (context.labels.workflow or context.labels.step):
                    answer.step = (context.labels.workflow, context.labels.step)
                answer.early_tools = read_early_tools(headers)
                if answer.span is not None and describe(answer.span, body.fields, context, answer.model):
                    answer.sent = bytearray()
                if services.metering is not None and self.generates:
                    await services.metering.admit(answer, self.path, body)
                if isinstance(route.backend, PoolBackend):
                    await self._try(context, body, answer, route.backend.pool)
                else:
                    await self.respond(context, body, answer)

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        """Answer a request, once its body is read and its server chosen: by default, pass it on to an upstream."""
        await self.check(context, body)
        inspector = StreamInspector(expected_choices(self.path, body.fields))
        await self.pass_on(context, body, answer, inspector)

    async def _read(self, headers: Headers, receive: Receive, body: RequestBody, deadline: Deadline) -> None:
        try:
            async with deadline.limit():
                body.data = await read_body(headers, receive, self.services.settings.max_body_bytes)
        except RequestTimeoutError:
            seconds = f"{self.services.settings.request_timeout:g} s (server.request_timeout)"
            raise SlowClientError(f"the body did not arrive within {seconds}") from None

    def _route(self, fields: Mapping[str, Any], answer: RequestAnswer) -> Route:
        """The route of the model that is asked for. The model's name is recorded in `answer`."""
        route = self.services.ready().route(_model(fields))
        answer.model = route.model or OTHER
        return route

    async def _try(self, context: RequestContext, body: RequestBody, answer: RequestAnswer, pool: Pool) -> None:
        """Answer by a server of `pool`, or another one as long as nothing has come back."""
        blocks: Sequence[int] = ()
        if pool.reads_prompts:
            blocks = await body.work(prompt_blocks, context.tenant, body.fields)
        until, patience = context.deadline.at, context.policy.deadline_s
        if patience is not None:
            until = min(until, asyncio.get_running_loop().time() + patience)
        read = body.held
        tries = Attempts(pool, scoped_call(context.tenant, context.labels.session, blocks), until)
        while True:
            async with context.deadline.limit():
                attempt = await anext(tries, None)
            if attempt is None:
                return
            async with attempt:
                body.hold(read - body.held)  # without the history that a failed try read
                attempt.when_answered = body.release
                answer.attempt, answer.response_headers = attempt, {}
                model = attempt.model or context.route.upstream_model
                route = replace(
                    context.route, backend_name=attempt.group, backend=attempt.backend, upstream_model=model
                )
                await self.respond(replace(context, route=route), body, answer)

    async def check(self, context: RequestContext, body: RequestBody) -> None:
        """Raise `InvalidRequestError` for what the upstream of the route may not get."""
        await body.work(self._check, body.fields, context.upstream)

    def _check(self, fields: Mapping[str, Any], backend: OpenAIBackend) -> None:
        if self.services.several_tenants:
            refuse_stored_names(fields)
        check_amounts(fields, self.path, self.services.settings)
        UpstreamFields(backend.settings).check(fields, self.path)

    async def pass_on(
        self,
        context: RequestContext,
        body: RequestBody,
        answer: RequestAnswer,
        inspector: Inspector,
        *,
        above: bool = False,
    ) -> None:
        """Pass the bytes of the request to the upstream, and those of its answer back."""
        async with context.deadline.limit():
            data = await upstream_body(body, context)
        await forward(context, body, answer, inspector, data, above=above)


@dataclass(slots=True)
class GenerationEndpoint(GatewayEndpoint):
    """Answers requests of `api`: by a backend of this process, or by an upstream, if need be with a chat."""

    api: Api

    async def respond(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        if isinstance(context.route.backend, OpenAIBackend):
            await self.check(context, body)
            if await self.is_forwarded(context, answer):
                if self.api.keeps_answers:
                    await self.services.keeper.follow(context, body, answer, several=self.services.several_tenants)
                if (runs := self.services.runs) is not None:
                    runs.watch(context, answer, body.fields)
                made = self.api.inspector
                inspector = made() if made else StreamInspector(expected_choices(self.path, body.fields))
                await self.pass_on(context, body, answer, inspector)
                return
        await self.answer_itself(context, body, answer)

    async def answer_itself(self, context: RequestContext, body: RequestBody, answer: RequestAnswer) -> None:
        await answer_here(self.api, self.services, context, body, answer)

    async def is_forwarded(self, context: RequestContext, answer: RequestAnswer) -> bool:
        """Whether the upstream answers this API itself. In a pool the gateway stores answers, since a server does not
        have what another one stored.
        """
        if self.api.translate is None:
            return True
        if self.api.keeps_answers and answer.attempt is not None:
            return False
        async with context.deadline.limit():
            return await context.upstream.has_route(self.path, context.headers, context.off)


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_NAME:
        raise InvalidRequestError(f"model must be a string of 1 to {MAX_MODEL_NAME} characters", param="model")
    return model
