"""The hot path: one request for text, from bytes to bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import Backend
from agentspec.backends.openai import OpenAIBackend
from agentspec.errors import AgentSpecError, InvalidRequestError, NotReadyError
from agentspec.proxy import chat, completions
from agentspec.proxy.auth import Caller, read_caller
from agentspec.proxy.body import parse_object, read_body
from agentspec.proxy.concurrency_limiter import Gate
from agentspec.proxy.deadlines import Deadline, until_disconnect
from agentspec.proxy.errors import event_body, log_unexpected, outcome
from agentspec.proxy.passthrough import check_upstream_fields, labelled, pass_through
from agentspec.proxy.request_record import Exchange
from agentspec.proxy.responses import DONE, Gathered, Writer, encode, event
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.strategy import Strategy
from agentspec.runtime import Runtime
from agentspec.settings.load import ServerSettings
from agentspec.telemetry.metrics import OTHER
from agentspec.types import Delta, GenerateRequest

Path = Literal["/chat/completions", "/completions", "/embeddings"]
MAX_MODEL_NAME = 256
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
EVENT_STREAM += [(b"x-accel-buffering", b"no")]


@dataclass(frozen=True, slots=True)
class Generation:
    """`POST` to one of the generating routes, as an ASGI application. Errors are raised to the door around it."""

    path: Path
    runtime: Runtime
    settings: ServerSettings
    gate: Gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, headers = Exchange.of(scope), Headers(scope=scope)
        with self.gate.enter():
            deadline = Deadline(self.settings.request_timeout)
            body = await read_body(headers, receive, self.settings.max_body_bytes)
            fields = parse_object(body)
            model = self._model(fields)
            route = self._ready().route(model)
            exchange.model = model if model in self.runtime.models() else OTHER
            caller = read_caller(headers, exchange.tenant or "")
            async with until_disconnect(receive) as client:
                if isinstance(route.backend, OpenAIBackend):
                    check_upstream_fields(fields, self.settings.max_messages)
                    async with deadline.limit():
                        body = await labelled(route.backend, self.path, body, fields, caller.labels)
                    await pass_through(scope, send, route, self.path, body, model, deadline)
                else:
                    request, writer = self._parse(fields, caller, exchange, route.backend)
                    deltas = deadline.within(self.runtime.generate(request))
                    await (stream if exchange.stream else whole)(deltas, writer, exchange, send)
            if client.cancelled_caught and not exchange.body_ended:
                exchange.outcome = "cancelled"

    def _parse(
        self, fields: Mapping[str, Any], caller: Caller, exchange: Exchange, backend: Backend
    ) -> tuple[GenerateRequest, Writer]:
        speculation = self.settings.speculation_object
        if isinstance(backend, DelegationBackend) and self.path != "/chat/completions":
            raise InvalidRequestError(f"the model {exchange.model!r} answers chat completions only", param="model")
        if self.path == "/chat/completions":
            request, exchange.stream, usage = chat.parse(fields, caller, max_messages=self.settings.max_messages)
            exchange.strategy = strategy_header(backend, request)
            return request, chat.ChatWriter(
                request.model,
                usage,
                speculation,
                request.sampling.logprobs,
                token_ids=request.return_prompt,
                choices=request.sampling.n,
            )
        if self.path == "/completions":
            request, exchange.stream, usage = completions.parse(fields, caller)
            exchange.strategy = strategy_header(backend, request)
            return request, completions.CompletionWriter(
                request.model,
                usage,
                speculation,
                request.sampling.logprobs,
                token_ids=fields.get("return_token_ids") is True,
                echo=fields.get("echo") is True,
                prompt_logprobs=fields.get("prompt_logprobs") is not None,
                choices=request.sampling.n,
            )
        raise InvalidRequestError(f"the model {exchange.model!r} does not answer {self.path}", param="model")

    def _ready(self) -> Runtime:
        if not self.runtime.ready:
            raise NotReadyError("the models are still loading; try again soon")
        return self.runtime

    def _model(self, fields: Mapping[str, Any]) -> str:
        model = fields.get("model")
        if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_NAME:
            raise InvalidRequestError(f"model must be a string of 1 to {MAX_MODEL_NAME} characters", param="model")
        return model


def strategy_header(backend: Backend, request: GenerateRequest) -> tuple[bytes, str] | None:
    """What tells a client that a strategy answers, and whether its answer may be another than without it."""
    headers = backend.response_headers(request) if isinstance(backend, Strategy) else {}
    return next(((name.encode(), value) for name, value in headers.items()), None)


async def whole(deltas: AsyncGenerator[Delta], writer: Writer, exchange: Exchange, send: Send) -> None:
    """Answer with one JSON object."""
    answer = Gathered()
    async with aclosing(deltas):
        async for delta in deltas:
            note(exchange, delta)
            answer.add(delta)
    body = encode(writer.body(answer))
    await respond(send, Response(body, media_type="application/json"))


async def stream(deltas: AsyncGenerator[Delta], writer: Writer, exchange: Exchange, send: Send) -> None:
    """Answer with server-sent events. What fails before the first delta is raised and gets its own status."""
    async with aclosing(deltas):
        first = await anext(deltas, Delta(finish_reason="stop"))
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            await _send_chunks(first, writer, exchange, send)
            async for delta in deltas:
                await _send_chunks(delta, writer, exchange, send)
        except Exception as error:
            broke_off(exchange, error)
            await _send(send, b"data: " + event_body(error, exchange.request_id) + b"\n\n")
        await _send(send, DONE)
    await send({"type": "http.response.body", "body": b""})


async def _send_chunks(delta: Delta, writer: Writer, exchange: Exchange, send: Send) -> None:
    note(exchange, delta)
    for chunk in writer.chunks(delta):
        await _send(send, event(chunk))


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def respond(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def note(exchange: Exchange, delta: Delta) -> None:
    if delta.text or delta.token_ids or delta.extra:
        exchange.token_arrived()
    exchange.usage = delta.usage or exchange.usage
    exchange.speculation = delta.speculation or exchange.speculation


def broke_off(exchange: Exchange, error: Exception) -> None:
    exchange.outcome = outcome(error)
    exchange.error = error.code if isinstance(error, AgentSpecError) else type(error).__name__
    log_unexpected(error, exchange.request_id)
