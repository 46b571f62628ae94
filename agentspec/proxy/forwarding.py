"""Forwards requests to upstream models, and sends their answers back byte for byte: of a stream only the events are
parsed that may hold its end, its counts or an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from agentspec.backends.base import CHAT, COMPLETIONS, RESPONSES
from agentspec.backends.http.errors import answered
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.fields import PRIORITY
from agentspec.errors import AgentSpecError, UpstreamError
from agentspec.protocol.deltas import read_usage
from agentspec.protocol.errors import anthropic_error, error_object, without_account
from agentspec.protocol.speculation import reported_speculation
from agentspec.protocol.wire import MAX_HELD, EventSplitter, SseDecoder, event, object_in, reported
from agentspec.proxy.answer import BYTES_PER_TOKEN, RequestAnswer, piece
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.body.reading import set_values
from agentspec.proxy.errors import ErrorResponse, error_response, refused_key
from agentspec.proxy.request_context import RequestContext
from agentspec.types import Delta, Speculation, Usage

if TYPE_CHECKING:
    from agentspec.backends.http import UpstreamResponse


def with_priority(backend: OpenAIBackend, fields: Mapping[str, Any], context: RequestContext) -> Mapping[str, Any]:
    """The `fields` of a body with the priority of the request's policy, if they have none and the upstream schedules by
    it. The headers of the policy go on as they are, since another gateway may follow them.
    """
    priority = context.policy.priority
    if priority is None or backend.settings.priority == "off" or fields.get(PRIORITY) is not None:
        return fields
    return {**fields, PRIORITY: priority}


PARSED_BYTES = 64 << 10
"""A whole answer up to this size is parsed; in a longer one the counts are looked for among its last members."""
TAIL_BYTES = 256 << 10
# A field of these names that is not null. The text of an answer is JSON too: its quotes are escaped and match nothing.
_NAMES = rb'"(?:finish_reason|usage|speculation|error)"\s*:\s*[^n\s]|"object"\s*:\s*"error"'
_TELLING_TEXT = re.compile(_NAMES.decode())
_COUNTS = ("usage", "speculation", "metrics")


def expected_choices(path: str, fields: Mapping[str, Any]) -> int:
    """How many choices the answer to a request with these `fields` has: `n` for each prompt."""
    n, prompt = fields.get("n"), fields.get("prompt")
    prompts = 1
    if path == COMPLETIONS and isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompts = len(prompt)
    return prompts * (n if isinstance(n, int) and n > 1 else 1)


class Inspector:
    """Follows a stream that is passed on; only events that `telling` matches are parsed.

    `done`: the upstream said that the stream is complete. `error`: what it reported in place of the rest, if it did.
    `counts`: its `usage` and `speculation` so far.
    """

    telling: ClassVar[re.Pattern[bytes]]

    def __init__(self) -> None:
        self.done = False
        self.error: Any = None
        self.counts: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        """Whether nothing is missing if the stream ends here."""
        return self.done or self.error is not None

    def read(self, events: bytes) -> None:
        if self.telling.search(events) is not None:
            with suppress(UpstreamError):
                for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                    self.read_event(object_in(data))

    def read_event(self, event: Mapping[str, Any]) -> None:
        """Take the counts, an error or the end from one of the events that are parsed."""
        raise NotImplementedError

    def failure(self, error: ErrorResponse, request_id: str) -> bytes:
        """The event for an error that broke the stream off."""
        return event(error.body)


class StreamInspector(Inspector):
    """Follows a stream of chunks with `choices` choices; it is whole once each has its finish reason."""

    telling = re.compile(_NAMES)

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()

    @property
    def finished(self) -> bool:
        return super().finished or len(self._finished) >= self._choices

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
        self.counts |= {name: event[name] for name in _COUNTS if event.get(name)}
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
    """The `usage` in an answer and what it says of speculation, each left out if it cannot be read."""
    usage: Usage | None = None
    speculation: Speculation | None = None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        usage = read_usage(given) if (given := counts.get("usage")) else None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        speculation = reported_speculation(counts, usage) if counts.keys() - {"usage"} else None
    return Delta(usage=usage, speculation=speculation)


_NO_CONTENT = 204  # has no body and no length of one (RFC 9110, sections 8.6 and 15.3.5)


async def upstream_body(body: RequestBody, context: RequestContext) -> bytes:
    """The body with the upstream's model name, and with what the backend sends about the client; else unchanged."""
    path, fields, model, backend = context.api, body.fields, context.route.upstream_model, context.upstream
    asked = with_priority(backend, fields, context)
    added = await backend.body_fields(path, context.tenant, context.labels, asked, context.off)
    if not context.store and (
        path == RESPONSES or (path == CHAT and fields.get("store"))
    ):  # off holds wherever it stands
        added = {**added, "store": False}
    added = added if model == fields["model"] else {**added, "model": model}
    return await body.work(set_values, fields, added) if added else body.data


async def forward(
    context: RequestContext,
    body: RequestBody,
    answer: RequestAnswer,
    inspector: Inspector,
    data: bytes,
    *,
    path: str | None = None,
    above: bool = False,
) -> None:
    """Forward `data` to the upstream of the route and send its answer back: streamed, followed by `inspector`, or
    whole.

    `path`: another one than the request's. `above`: it stands next to the upstream's /v1. A large whole answer waits
    until the body's budget has room for it, and its upstream meanwhile. Raises `UpstreamError` and `AnswerMemoryError`
    before anything is sent; a stream that fails later ends with an error event.
    """
    sending = context.upstream.forward(
        "GET" if context.method == "HEAD" else context.method,  # our own server leaves the body of the answer out
        path or context.api,
        headers=context.headers,
        body=data,
        query=context.query,
        tenant=context.tenant,
        above=above,
    )
    if answer.attempt is None:
        body.release()
    async with AsyncExitStack() as stack:
        async with context.deadline.limit():
            response = await stack.enter_async_context(sending)
            content = await _content(response, answer, body)
        if answer.stream:
            await _send_stream(response, context, answer, inspector)
        else:
            await _send_whole(response, content, answer, body)


async def _content(response: UpstreamResponse, answer: RequestAnswer, body: RequestBody) -> bytes:
    """All of an answer that is no stream. Raises `UpstreamAuthenticationError` where our key was refused."""
    answer.stream = response.is_stream and response.status < 400 and response.status != _NO_CONTENT
    failed = response.status >= 400
    content = await response.aread(room=body.wait_for) if failed else b""
    answer.answered(response.status, response.headers, content)
    if response.status in (401, 403) and (response.own_key or answer.has_gateway_key):
        raise refused_key(f"upstream {response.name}")
    if answer.stream and response.is_encoded:
        raise UpstreamError(f"upstream {response.name} sent a compressed stream, though none was requested")
    return content if failed or answer.stream else await response.aread(room=body.wait_for)


async def _send_whole(response: UpstreamResponse, content: bytes, answer: RequestAnswer, body: RequestBody) -> None:
    if response.status >= 400:
        answer.fail("client_error" if response.status < 500 else "server_error", "upstream_status")
        content = _error_body(response, content)
        if answer.anthropic:
            content = anthropic_error(content, response.status, answer.request_id)
    elif not response.is_encoded:
        counts, error = await body.work(read_answer, content, size=len(content))
        answer.count(counts)
        answer.arrived = len(content) // BYTES_PER_TOKEN  # where no usage is reported
        answer.report(error)
        content = without_account(content) if error and response.own_key else content
    length = [(b"content-length", str(len(content)).encode())] if response.status != _NO_CONTENT else []
    headers = [*_headers(response), *length]
    await answer.send({"type": "http.response.start", "status": response.status, "headers": headers})
    await answer.send({"type": "http.response.body", "body": content})


async def _send_stream(
    response: UpstreamResponse, context: RequestContext, answer: RequestAnswer, inspector: Inspector
) -> None:
    """Send whole events, byte for byte. If the upstream stops before its answer is complete, an error event follows."""
    await answer.send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
    splitter = EventSplitter()
    try:
        async with context.deadline.limit(), aclosing(response.aiter_raw()) as pieces:
            async for data in pieces:
                if events := splitter.feed(data):
                    inspector.read(events[splitter.whole_from :])
                    events = _redacted(events, response, inspector)
                    answer.arrive(events.count(b"data:"))
                    await answer.send(piece(events))
        rest = splitter.rest()
        inspector.read(rest + b"\n\n")
        rest = _redacted(rest, response, inspector)
        if not inspector.finished:
            raise UpstreamError("the upstream ended the answer before it was finished")
    except AgentSpecError as error:
        rest = _redacted(splitter.rest(), response, inspector) if inspector.done else b""
        if not (inspector.done or inspector.error):
            answer.interrupt(error)
            rest = splitter.separator() + inspector.failure(error_response(error, answer.request_id), answer.request_id)
    answer.count(read_counts(inspector.counts))
    answer.report(inspector.error)
    await answer.send({"type": "http.response.body", "body": rest})


def _redacted(events: bytes, response: UpstreamResponse, inspector: Inspector) -> bytes:
    """`events`; if they report an error under the operator's key, without the account's names."""
    return without_account(events) if inspector.error and response.own_key else events


def _error_body(response: UpstreamResponse, content: bytes) -> bytes:
    """The body of an error answer in OpenAI's form; with the operator's key, without what identifies the account."""
    if response.is_encoded:
        content = b""
        del response.headers["content-encoding"]
    body = error_object(content, response.status, answered(response.name, response.status))
    if body is not content:
        response.headers["content-type"] = "application/json"
    return without_account(body) if response.own_key else body


def _headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    renamed = {"x-request-id": "x-upstream-request-id"}
    headers = {renamed.get(name, name): value for name, value in response.headers.items()}
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
