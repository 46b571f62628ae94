"""Errors as answers: the one handler over the error tree, always in OpenAI's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from agentspec.errors import (
    AgentSpecError,
    AuthenticationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    ShuttingDownError,
    UpstreamStatusError,
)
from agentspec.proxy.answer import encode

# An upstream may say these about its own errors; everything else it sent stays with us.
_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it goes out: HTTP status, extra headers, JSON body; `code` is what logs may say about it."""

    status: int
    body: bytes
    code: str
    headers: dict[str, str]


def failure(error: Exception) -> Failure:
    """How `error` is answered. An error that nobody raised on purpose says nothing about itself."""
    if isinstance(error, UpstreamStatusError):
        kept = {name: error.headers[name] for name in _RETRY_HEADERS if name in error.headers}
        return Failure(error.status, error.upstream_body, "upstream_status", kept)
    if isinstance(error, HTTPException):
        return _http(error)
    if not isinstance(error, AgentSpecError):
        body = {"message": "internal error; the server's log has more", "type": "server_error", "param": None}
        return Failure(500, encode({"error": body | {"code": "internal_error"}}), "internal_error", {})
    code = error.code or error.type
    return Failure(error.status, encode(error.body()), code, _headers(error))


def event_body(error: Exception) -> bytes:
    """The JSON of the event that ends a stream which `error` broke off."""
    if isinstance(error, AgentSpecError):
        return encode(error.body())
    return failure(error).body


def outcome(error: Exception) -> str:
    """What metrics call it: a fixed set of words."""
    if isinstance(error, (OverloadedError, ShuttingDownError, NotReadyError)):
        return "rejected"
    return "client_error" if 400 <= failure(error).status < 500 else "server_error"


def _headers(error: AgentSpecError) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, (ShuttingDownError, NotReadyError)):
        return {"retry-after": "1"}
    return {"www-authenticate": "Bearer"} if isinstance(error, AuthenticationError) else {}


def _http(error: HTTPException) -> Failure:
    """No such route, or not with this method."""
    said = {404: "no such route", 405: "method not allowed here"}.get(
        error.status_code, HTTPStatus(error.status_code).phrase
    )
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
    body: dict[str, Any] = InvalidRequestError(said).body()
    body["error"]["code"] = code
    return Failure(error.status_code, encode(body), code or "http_error", dict(error.headers or {}))
