"""What the gateway must know of an API to answer its requests, and the form of its answers: JSON, or events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from starlette.responses import Response

from agentspec.backends.base import CHAT
from agentspec.protocol.responses import Accumulator, ResponseWriter, obfuscated
from agentspec.protocol.wire import DONE, encode, event, named_event
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.errors import error_event
from agentspec.proxy.request_context import RequestContext
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.cache.stored import StoredResponse
    from agentspec.proxy.forwarding import Inspector

Fields = Mapping[str, Any]
History = Sequence[dict[str, Any]]
"""The items of the stored answers that a request continues, oldest first."""


class ApiWriter:
    """Writes one answer in the form of its API: the events of a stream, or `body` after `add` for each delta.

    `headers` are those of the answer; `holds_answer`: a stream's last event has the whole answer again. This one writes
    by a `ResponseWriter` of `protocol/`, in OpenAI's events; another API overrides what is different.
    """

    holds_answer: ClassVar[bool] = False
    named: ClassVar[bool] = False
    """Whether an event is named by the type of its chunk."""
    end: ClassVar[bytes] = DONE
    """What ends a stream, also one that failed."""

    def __init__(self, writer: ResponseWriter, headers: Mapping[str, str] | None = None) -> None:
        self.headers = headers or {}
        self._writer = writer
        self._encode = obfuscated if writer.format.obfuscation else encode
        self._answer = Accumulator()

    def add(self, delta: Delta) -> None:
        self._answer.add(delta)

    def body(self) -> dict[str, Any]:
        return self._writer.body(self._answer)

    def events(self, delta: Delta) -> Iterator[bytes]:
        for chunk in self._writer.chunks(delta):
            yield self._event(chunk)

    def close(self) -> Iterable[bytes]:
        """The events after the last delta, before the answer is stored. Also called for a whole answer."""
        return ()

    def to_store(self, context: RequestContext, seconds: float) -> StoredResponse | None:
        """The answer as it is stored, if it is; `seconds` is the time since its request came."""
        return None

    def stored(self, done: bool) -> None:
        """Note whether it was stored."""

    def last(self) -> Iterable[bytes]:
        return [self.end] if self.end else []

    def failure(self, error: Exception, request_id: str) -> Iterable[bytes]:
        """The events that end a stream which `error` broke off."""
        return [self.error_event(error, request_id), *self.last()]

    def own_name(self, param: str) -> str:
        """The name in the request of the field that errors of the backend call `param`."""
        return param

    def error_event(self, error: Exception, request_id: str) -> bytes:
        return error_event(error, request_id)

    def _event(self, chunk: dict[str, Any]) -> bytes:
        data = self._encode(chunk)
        return named_event(chunk["type"], data) if self.named else event(data)


Parse = Callable[[Fields, RequestContext, History], tuple[Sequence[GenerateRequest], ApiWriter]]
Translate = Callable[[Fields, RequestContext, History, bool], tuple[Fields, ApiWriter]]


@dataclass(frozen=True, slots=True)
class Api:
    """One API. `path` is the route below /v1. `needs` is the route that a backend of this process must answer.

    `parse` turns a body's fields into requests for such a backend, and the writer that writes their answers as one.
    `translate` turns them into a chat for an upstream without the route; its last argument says whether that server
    applies a chat template. It is None for APIs that every upstream has. `inspector` reads the stream of an upstream
    that has the route, if it is not one of chunks. `keeps_answers`: answers are stored, and later requests can continue
    them.
    """

    path: str
    parse: Parse
    translate: Translate | None = None
    inspector: Callable[[], Inspector] | None = None
    needs: str = CHAT
    keeps_answers: bool = False


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as compact JSON. A thread may make it: orjson holds the interpreter's lock for a tenth of json's time."""
    try:
        content = orjson.dumps(value)
    except TypeError:  # a lone surrogate, or an integer above 64 bits
        content = encode(value)
    return Response(content, status, media_type="application/json")


async def respond(answer: RequestAnswer, response: Response) -> None:
    await answer.send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await answer.send({"type": "http.response.body", "body": response.body})
