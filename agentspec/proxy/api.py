"""What the gateway must know of an API to answer its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from agentspec.backends.base import CHAT
from agentspec.protocol.responses import ApiWriter
from agentspec.protocol.wire import encode
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.request_context import RequestContext
from agentspec.types import GenerateRequest

if TYPE_CHECKING:
    from agentspec.proxy.forwarding import Inspector

Fields = Mapping[str, Any]
History = Sequence[dict[str, Any]]
"""The items of the stored answers that a request continues, oldest first."""


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
