"""Kept runs: what calls of models were asked and answered, for their tenant to see. Off unless `cache.runs_bytes` is
set, since they hold text; requests with `store` off leave none.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from agentspec.cache.stored import StoredResponse
from agentspec.errors import AgentSpecError, InvalidRequestError
from agentspec.protocol.deltas import to_delta
from agentspec.protocol.responses import Accumulator, Choice, source_object, speculation_member, usage_object
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response
from agentspec.proxy.logs import logger
from agentspec.proxy.request_context import RequestContext
from agentspec.proxy.ui.html import one_file
from agentspec.runtime import Runtime
from agentspec.telemetry.gen_ai import events_of, pieces_of
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache

T = TypeVar("T")

MOST_WAITING = 64  # calls that wait to be stored; of more, the newest are not
MOST_FOLLOWED = 4 << 20  # bytes of an upstream's answer that are read
MOST_CALLS = 200  # the newest of a tenant, or of one run
TITLE = 100  # characters


class Runs:
    """Keeps calls, and reads them. A run is the calls of one session, or one call without any."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread = ThreadPoolExecutor(1, "agentspec-runs")
        self._room = threading.BoundedSemaphore(MOST_WAITING)

    @staticmethod
    def asking(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The requests, which also ask where each token comes from, and what a strategy decides."""
        return [replace(request, token_sources=request.token_sources or request.store) for request in requests]

    async def follow(
        self, context: RequestContext, answer: RequestAnswer, asked: Mapping[str, Any], deltas: AsyncGenerator[Delta]
    ) -> AsyncGenerator[Delta]:
        """The deltas, of which the call is kept once they end, however they do."""
        kept = Accumulator()
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    kept.add(delta)
                    yield delta
        finally:
            self.keep(context, answer, asked, lambda: kept)

    def watch(self, context: RequestContext, answer: RequestAnswer, asked: Mapping[str, Any]) -> None:
        """Follow an upstream's answer, whose bytes are passed on."""
        before = answer.watch.before if isinstance(answer.watch, CallWatch) else answer.watch  # of another try
        answer.watch = CallWatch(self, context, answer, {"messages": _new_messages(asked)}, before)

    def keep(
        self, context: RequestContext, answer: RequestAnswer, asked: Mapping[str, Any], read: Callable[[], Accumulator]
    ) -> None:
        """Store the call of `answer`, which has ended: its text is what `read` returns, in a thread."""
        if not (context.store and self._room.acquire(blocking=False)):
            return
        began, usage, done, labels = time.time() - answer.seconds, answer.usage, answer.speculation, context.labels
        call = {
            "request_id": context.id,
            "model": answer.model,
            "api": context.api,
            "workflow": labels.workflow,
            "step": labels.step,
            "at": began,
            "seconds": answer.seconds,
            "first_token_seconds": answer.first_token,
            "usage": None if usage is None else usage_object(usage),
            **speculation_member(done),
        }
        head = (f"run-{uuid.uuid4().hex}", context.tenant, time.time(), labels.session)
        stored = StoredResponse(*head, response=call, items=_new_messages(asked), begun=began)
        self._thread.submit(self._store, stored, read)

    def _store(self, stored: StoredResponse, read: Callable[[], Accumulator]) -> None:
        try:
            choices = [choice for _, choice in read().all()]
            texts = {"answers": [*map(_answer, choices)], "decisions": choices[0].decisions}
            self._runtime.cache.runs.put(replace(stored, response={**stored.response, **texts}))
        except (AgentSpecError, ValueError) as error:  # also of a cache that was closed meanwhile
            logger.warning("a call was not kept", exception=type(error).__name__)
        finally:
            self._room.release()

    async def list_page(self, request: Request) -> Response:
        """`GET /ui/data/runs`: the tenant's runs, the newest first."""
        tenant = RequestAnswer.of(request.scope).tenant
        calls = await self._read(lambda: self._runtime.cache.runs.newest(tenant, MOST_CALLS))
        return json_response({"runs": listed(calls)})

    async def run_page(self, request: Request) -> Response:
        """`GET /ui/data/run?name=NAME`: that run; with `form=html` as one file."""
        tenant, query = RequestAnswer.of(request.scope).tenant, request.query_params
        run = await self._read(lambda: read_run(self._runtime.cache, tenant, query.get("name", "")))
        if query.get("form") == "html":
            return Response(await self._read(lambda: one_file(run)), media_type="text/html")
        return json_response(run)

    async def _read(self, function: Callable[[], T]) -> T:
        """Run in the thread that stores, behind what waits there."""
        return await anyio.to_thread.run_sync(lambda: self._thread.submit(function).result())

    def close(self) -> None:
        """Store what waits."""
        self._thread.shutdown()


def read_run(cache: SuffixCache, tenant: str, name: str) -> dict[str, Any]:
    """The run of that name, a session's or its only call's: its calls, the oldest first.

    Raises `InvalidRequestError` where the tenant has none.
    """
    single = cache.runs.get(tenant, name)
    calls = [single] if single is not None else cache.runs.newest(tenant, MOST_CALLS, name)[::-1]
    if not calls:
        raise InvalidRequestError(
            f"no run {name!r} is kept: see cache.runs_bytes and cache.runs_retention", param="run"
        )
    shown = [{**one.response, "messages": [*one.items]} for one in calls]
    return {"session": calls[0].session, "calls": shown}


def listed(calls: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """The runs of these calls, which come newest first."""
    runs: dict[str, dict[str, Any]] = {}
    for call in calls:
        key = call.id if call.session is None else call.session
        seen, usage = call.response, call.response.get("usage") or {}
        run = runs.setdefault(key, {"id": key, "last": call.created_at, "calls": 0, "tokens": 0, "steps": []})
        run["calls"] += 1
        run["steps"] += [named] if (named := [seen["workflow"], seen["step"]]) not in run["steps"] else []
        run["tokens"] += usage.get("completion_tokens", 0)
        run |= {"began": seen["at"], "workflow": seen["workflow"], "model": seen["model"], "title": _title(call)}
        run["saved"] = run.get("saved", 0.0) + (seen.get("speculation") or {}).get("estimated_seconds_saved", 0.0)
    return [*runs.values()]


def _title(call: StoredResponse) -> str:
    texts = (str(item.get("content") or item.get("text") or "") for item in call.items)
    return next((text[:TITLE] for text in texts if text.strip()), "")


def _answer(choice: Choice) -> dict[str, Any]:
    """A choice: its text, and where each of its tokens came from, if that is known."""
    sources = [*map(source_object, choice.token_sources)]
    return {"text": "".join(choice.text), "finish_reason": choice.finish_reason, **choice.extra, "tokens": sources}


def _new_messages(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a request says that the answer before did not know: the messages behind it, which tools may have written."""
    given = asked.get("messages") or asked.get("input") or asked.get("prompt") or ()
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = [message for message in given if isinstance(message, Mapping)]
    answers = (
        at for at, one in enumerate(messages) if one.get("role") == "assistant" or one.get("type") == "function_call"
    )
    return [dict(message) for message in messages[max(answers, default=-1) + 1 :]]


@dataclass(slots=True)
class CallWatch:
    """Reads an upstream's answer as its bytes pass, and has the call kept at its end."""

    runs: Runs
    context: RequestContext
    answer: RequestAnswer
    asked: Mapping[str, Any]
    before: Callable[[Message], Awaitable[None]] | None
    _seen: bytearray = field(default_factory=bytearray)
    _failed: bool = False

    async def __call__(self, message: Message) -> None:
        if self.before is not None:
            await self.before(message)
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._failed = message["status"] >= 400 or b"content-encoding" in headers
            return
        self._seen += message.get("body", b"")[: MOST_FOLLOWED - len(self._seen)]
        if not (message.get("more_body") or self._failed):
            self.runs.keep(self.context, self.answer, self.asked, self._read)

    def _read(self) -> Accumulator:
        kept = Accumulator()
        for event in events_of(bytes(self._seen)):
            with suppress(AgentSpecError, LookupError, TypeError, AttributeError):
                texts = "".join(text for _, text, _ in pieces_of(event) if isinstance(text, str))
                kept.add(to_delta(event) if "choices" in event else Delta(text=texts))
        return kept
