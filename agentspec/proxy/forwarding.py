"""Forwards requests to upstream models, and sends the upstream's answers back byte for byte.

Answers are not parsed for what the gateway must know of them (whether one is whole, its counts, a reported error). Only
events that can tell something are, and they are found by a search for names."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from agentspec.backends.base import CHAT, COMPLETIONS, RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.fields import GOAL, PRIORITY, takes_switches
from agentspec.errors import AgentSpecError, UpstreamError
from agentspec.protocol.deltas import read_usage
from agentspec.protocol.errors import anthropic_error, error_object, without_account
from agentspec.protocol.headers import PREFIX, label_headers
from agentspec.protocol.speculation import read_speculation
from agentspec.protocol.wire import MAX_HELD, EventSplitter, SseDecoder, object_in, reported
from agentspec.proxy.admission import Deadline
from agentspec.proxy.auth import Caller
from agentspec.proxy.body.budget import INLINE_BYTES, BodyAccount
from agentspec.proxy.body.reading import set_values
from agentspec.proxy.errors import error_event, outcome, refused_key
from agentspec.proxy.request_record import RequestRecord
from agentspec.types import Delta, Speculation, Usage

if TYPE_CHECKING:
    from agentspec.backends.http import UpstreamResponse


logger = logging.getLogger(__name__)


async def with_policy(
    backend: OpenAIBackend, path: str, fields: Mapping[str, Any], caller: Caller
) -> Mapping[str, Any]:
    """The `fields` of a body for `path` with what the `caller`'s policy says and the body does not: the priority, if
    the upstream schedules by it, and the latency goal, if its drafts serve one first.

    The headers go on as they are, since another gateway may follow them; what no other upstream does is logged once.
    """
    policy = caller.policy
    goal = policy.latency_ms_per_token
    heeded = {
        PRIORITY: policy.priority if backend.settings.priority != "off" else None,
        GOAL: goal if goal is not None and await backend.keeps_latency(path) else None,
    }
    told = bool(caller.off) and takes_switches(await backend.server_kind(), path)
    unheeded = {
        "deadline-s": policy.deadline_s,
        "latency-ms-per-token": goal if heeded[GOAL] is None else None,
        "priority": policy.priority if heeded[PRIORITY] is None else None,
        "strategy": policy.strategy,
        "speculation": None if caller.speculation or told else "off",
        "store": None if caller.store or told or path == RESPONSES else "off",  # a field of theirs says it
    }
    for name, value in unheeded.items():
        if value is not None:
            _say_once(str(backend.settings.url), name)
    added = {name: value for name, value in heeded.items() if value is not None and fields.get(name) is None}
    return {**fields, **added} if added else fields


@lru_cache(maxsize=1024)
def _say_once(upstream: str, name: str) -> None:
    logger.warning("upstream %s: only an agentspec gateway would follow x-agentspec-%s there", upstream, name)


PARSED_BYTES = 64 << 10
"""A whole answer up to this size is parsed; in a longer one the counts are looked for among its last members."""
TAIL_BYTES = 256 << 10
# A field of these names that is not null. The text of an answer is JSON too: its quotes are escaped and match nothing.
_NAMES = rb'"(?:finish_reason|usage|speculation|error)"\s*:\s*[^n\s]|"object"\s*:\s*"error"'
_TELLING_TEXT = re.compile(_NAMES.decode())
_COUNTS = ("usage", "speculation")


def expected_choices(path: str, fields: Mapping[str, Any]) -> int:
    """How many choices the answer to a request with these `fields` has: `n` for each prompt."""
    n, prompt = fields.get("n"), fields.get("prompt")
    prompts = 1
    if path == COMPLETIONS and isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompts = len(prompt)
    return prompts * (n if isinstance(n, int) and n > 1 else 1)


class Inspector(ABC):
    """Follows a stream that is passed on. Only events that `telling` matches are parsed: text of an answer is JSON too,
    but its quotes are escaped and match nothing.

    `done`: the upstream said that the stream is complete. `error`: what it reported in place of the rest, if it did.
    """

    telling: ClassVar[re.Pattern[bytes]]

    def __init__(self) -> None:
        self.done = False
        self.error: Any = None

    @property
    def finished(self) -> bool:
        """Whether nothing is missing if the stream ends here."""
        return self.done or self.error is not None

    @property
    @abstractmethod
    def counts(self) -> Delta: ...

    def read(self, events: bytes) -> None:
        """Look at the next whole events."""
        if self.telling.search(events) is not None:
            with suppress(UpstreamError):
                for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                    self.read_event(object_in(data))

    @abstractmethod
    def read_event(self, event: Mapping[str, Any]) -> None:
        """Take the counts, an error or the end from one of the events that are parsed."""

    def failure(self, error: Exception, request_id: str) -> bytes:
        """The event that tells the client of an `error` that broke the stream off."""
        return error_event(error, request_id)


class StreamInspector(Inspector):
    """Follows a stream of chunks whose answer has `choices` choices; it is whole once each has its finish reason."""

    telling = re.compile(_NAMES)

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()
        self._counts: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        return super().finished or len(self._finished) >= self._choices

    @property
    def counts(self) -> Delta:
        return read_counts(self._counts)

    def read(self, events: bytes) -> None:
        if b"[DONE]" not in events and self.telling.search(events) is None:  # one pattern for both takes twice as long
            return
        with suppress(UpstreamError):
            for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                if data.strip() == "[DONE]":
                    self.done = True
                elif _TELLING_TEXT.search(data) is not None:
                    self.read_event(object_in(data))

    def read_event(self, event: Mapping[str, Any]) -> None:
        self.error = self.error or reported(event)
        self._counts |= {name: event[name] for name in _COUNTS if event.get(name)}
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)


def read_answer(content: bytes) -> tuple[Delta, Any]:
    """The counts of a whole answer, and the error that it reports, if any. What cannot be read is left out."""
    if len(content) <= PARSED_BYTES:
        answer = object_in(content)
        return read_counts(answer), reported(answer)
    return read_counts(_last_members(content)), None


def _last_members(content: bytes) -> dict[str, Any]:
    """The top-level members of a long answer from the first of its counts on, if they are at its end."""
    tail = content[-TAIL_BYTES:]
    for name in _COUNTS:
        start = tail.rfind(b'"%s"' % name.encode())
        if start >= 0 and (members := object_in(b"{" + tail[start:])):
            return members
    return {}


def read_counts(counts: Mapping[str, Any]) -> Delta:
    """The `usage` and the `speculation` in an answer, each left out if it cannot be read."""
    usage: Usage | None = None
    speculation: Speculation | None = None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        usage = read_usage(given) if (given := counts.get("usage")) else None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        speculation = read_speculation(given) if (given := counts.get("speculation")) else None
    return Delta(usage=usage, speculation=speculation)


_KEYS = ("authorization", "x-api-key")
_NO_CONTENT = 204  # has no body and tells no length of one (RFC 9110, sections 8.6 and 15.3.5)


async def upstream_body(
    backend: OpenAIBackend, path: str, body: bytes, fields: Mapping[str, Any], caller: Caller, model: str
) -> bytes:
    """`body`, which holds `fields`, with the upstream's model name, and with what the backend tells about the caller.

    Every other byte is kept. Token ids are not requested on behalf of a client, which would otherwise get events and
    fields that it did not request.
    """
    return await with_fields(body, fields, await added_fields(backend, path, fields, caller, model))


async def added_fields(
    backend: OpenAIBackend, path: str, fields: Mapping[str, Any], caller: Caller, model: str
) -> dict[str, Any]:
    """What a body with `fields` gets on its way to the upstream: see `upstream_body`."""
    asked = await with_policy(backend, path, fields, caller)
    added = await backend.body_fields(path, caller.tenant, caller.labels, asked, caller.off)
    if path == CHAT and fields.get("store") and not caller.store:  # off holds wherever it stands
        added = {**added, "store": False}
    return added if model == fields["model"] else {**added, "model": model}


async def with_fields(body: bytes, fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """`body`, which holds `fields`, with the values `added`: without any, byte for byte as it is."""
    if not added:
        return body
    if len(body) <= INLINE_BYTES:
        return set_values(body, fields, added)
    return await asyncio.to_thread(set_values, body, fields, added)


@dataclass(slots=True)
class Arrival:
    """One request and the way of its answer. What it holds in memory besides its body is reported to `account`."""

    scope: Scope
    send: Send
    deadline: Deadline
    account: BodyAccount


async def pass_through(
    arrival: Arrival,
    backend: OpenAIBackend,
    path: str,
    body: bytes,
    inspector: Inspector,
    *,
    method: str = "POST",
    above: bool = False,
) -> None:
    """Forward `body` to the upstream and send its answer back: streamed, followed by `inspector`, or whole.

    `above`: `path` stands beside the upstream's /v1. A large whole answer waits until the account has room for it, and
    its upstream meanwhile. Raises `UpstreamError` and `AnswerMemoryError` before anything is sent; a stream that fails
    later ends with an error event.
    """
    record, query = RequestRecord.of(arrival.scope), arrival.scope.get("query_string", b"").decode("latin-1")
    forward = partial(backend.forward, method, path, query=query, tenant=record.tenant, above=above)
    headers = request_headers(arrival.scope, record)
    async with AsyncExitStack() as stack:
        async with arrival.deadline.limit():
            response = await stack.enter_async_context(forward(headers=headers, body=body))
            content = await _content(response, record, arrival.account)
        if record.stream:
            await _send_stream(response, record, arrival, inspector)
        else:
            await _send_whole(response, content, record, arrival)


async def _content(response: UpstreamResponse, record: RequestRecord, account: BodyAccount) -> bytes:
    """All of an answer that is no stream. Raises `UpstreamAuthenticationError` where our key was refused."""
    record.stream = response.is_stream and response.status < 400 and response.status != _NO_CONTENT
    failed = response.status >= 400
    content = await response.aread(room=account.wait_for) if failed else b""
    record.answer_arrived(response.status, response.headers, content)
    if response.status in (401, 403) and (response.own_key or record.has_gateway_key):
        raise refused_key(f"upstream {response.name}")
    if record.stream and response.is_encoded:
        raise UpstreamError(f"upstream {response.name} sent a compressed stream, which was not asked for")
    return content if failed or record.stream else await response.aread(room=account.wait_for)


def request_headers(scope: Scope, record: RequestRecord) -> dict[str, str]:
    """The client's headers with the request's labels, without those that hold a key for this gateway.

    A header that comes in several lines is one list (RFC 9110, section 5.3); of our own the first line counts.
    """
    given = Headers(scope=scope)
    headers = {name: given[name] if name.startswith(PREFIX) else ", ".join(given.getlist(name)) for name in given}
    headers |= label_headers(record.labels) | {"x-request-id": record.request_id}
    if record.has_gateway_key:
        headers = {name: value for name, value in headers.items() if name not in _KEYS}
    return headers


async def _send_whole(response: UpstreamResponse, content: bytes, record: RequestRecord, arrival: Arrival) -> None:
    if response.status >= 400:
        record.fail("client_error" if response.status < 500 else "server_error", "upstream_status")
        content = _error_body(response, content)
        if record.anthropic:
            content = anthropic_error(content, response.status, record.request_id)
    elif not response.is_encoded:
        counts, error = await arrival.account.run(len(content), read_answer, content)
        record.read(counts)
        record.whole_arrived(len(content))
        _note_error(record, error)
        content = without_account(content) if error and response.own_key else content
    length = [(b"content-length", str(len(content)).encode())] if response.status != _NO_CONTENT else []
    headers = [*_headers(response), *length]
    await arrival.send({"type": "http.response.start", "status": response.status, "headers": headers})
    await arrival.send({"type": "http.response.body", "body": content})


async def _send_stream(
    response: UpstreamResponse, record: RequestRecord, arrival: Arrival, inspector: Inspector
) -> None:
    """Send whole events, byte for byte. If the upstream stops before its answer is complete, an error event follows."""
    send = arrival.send
    await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
    splitter = EventSplitter()
    try:
        async with arrival.deadline.limit(), aclosing(response.aiter_raw()) as pieces:
            async for piece in pieces:
                if events := splitter.feed(piece):
                    inspector.read(events[splitter.whole_from :])
                    events = _redacted(events, response, inspector)
                    record.token_arrived(events.count(b"data:"))
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        rest = splitter.rest()
        inspector.read(rest + b"\n\n")
        rest = _redacted(rest, response, inspector)
        if not inspector.finished:
            raise UpstreamError("the upstream ended the answer before it was finished")
    except AgentSpecError as error:
        rest = b""
        if not (inspector.done or inspector.error):
            record.fail(outcome(error), error.code)
            if isinstance(error, UpstreamError):
                record.answer_broke()
            rest = splitter.separator() + inspector.failure(error, record.request_id)
    record.read(inspector.counts)
    _note_error(record, inspector.error)
    await send({"type": "http.response.body", "body": rest})


def _redacted(events: bytes, response: UpstreamResponse, inspector: Inspector) -> bytes:
    """`events`; if they report an error under the operator's key, without the account's names."""
    return without_account(events) if inspector.error and response.own_key else events


def _error_body(response: UpstreamResponse, content: bytes) -> bytes:
    """The body of an error answer in OpenAI's form; with the operator's key, without what tells about the account."""
    if response.is_encoded:
        content = b""
        del response.headers["content-encoding"]
    body = error_object(content, response.status, f"upstream {response.name} answered {response.status}")
    if body is not content:
        response.headers["content-type"] = "application/json"
    return without_account(body) if response.own_key else body


def _note_error(record: RequestRecord, error: Any) -> None:
    """Count an answer of status 200 that reports `error` as the failure that it is."""
    if error:
        code = error.get("code") if isinstance(error, Mapping) else None
        refused = isinstance(code, int) and 400 <= code < 500
        record.fail("client_error" if refused else "server_error", "upstream_error")
        if not refused:
            record.answer_broke()


def _headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    renamed = {"x-request-id": "x-upstream-request-id"}
    headers = {renamed.get(name, name): value for name, value in response.headers.items()}
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
