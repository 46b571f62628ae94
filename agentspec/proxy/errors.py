"""Turns errors into HTTP responses of OpenAI's shape; no other module maps the error classes.

An upstream's own error is no exception where its answer is passed through: see `forwarding/passthrough.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from agentspec.errors import (
    AgentSpecError,
    AnswerMemoryError,
    AuthenticationError,
    EngineError,
    InvalidRequestError,
    NoServerError,
    NotReadyError,
    OverloadedError,
    ShuttingDownError,
    SlowClientError,
    UpstreamAuthenticationError,
    UpstreamError,
    UpstreamStatusError,
)
from agentspec.protocol.errors import anthropic_error, error_object, without_account
from agentspec.protocol.wire import encode, event, named_event
from agentspec.proxy.logs import logger
from agentspec.telemetry.safe_errors import class_of, frames_of

# Headers of an upstream's error answer that are passed on.
_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
_UNAVAILABLE = (ShuttingDownError, NotReadyError, AnswerMemoryError)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error response: HTTP status, extra headers, JSON body; `code` names the error in logs."""

    status: int
    body: bytes
    code: str
    headers: dict[str, str]


def error_response(error: Exception, request_id: str = "") -> ErrorResponse:
    """The response for `error`. For an unexpected error it tells only the request id to look up in the log."""
    error = _of_gateway(error)
    if isinstance(error, UpstreamStatusError):
        kept = {name: error.headers[name] for name in _RETRY_HEADERS if name in error.headers}
        body = error_object(error.upstream_body, error.status, error.message)
        return ErrorResponse(error.status, without_account(body), "upstream_status", kept)
    if isinstance(error, HTTPException):
        return _http(error)
    code = error.code or error.type if isinstance(error, AgentSpecError) else "internal_error"
    status = error.status if isinstance(error, AgentSpecError) else 500
    body = encode(_body(error, request_id))
    told = without_account(body) if isinstance(error, UpstreamError) else body  # it may quote an answer of status 200
    return ErrorResponse(status, told, code, _headers(error))


def error_event(error: Exception, request_id: str = "") -> bytes:
    """The event that ends a stream after `error` interrupted it."""
    return event(without_account(encode(_body(_of_gateway(error), request_id))))


def anthropic_error_event(error: Exception, request_id: str = "") -> bytes:
    """The same on the routes of Anthropic's API."""
    error = _of_gateway(error)
    status = error.status if isinstance(error, AgentSpecError) else 500
    return named_event("error", without_account(anthropic_error(encode(_body(error, request_id)), status, request_id)))


def _of_gateway(error: Exception) -> Exception:
    """`error`, or another one in place of an upstream's refusal of a key that is not the client's."""
    refused = isinstance(error, UpstreamStatusError) and error.status in (401, 403)
    return error if not refused or getattr(error, "for_client", False) else refused_key("the upstream")


def refused_key(upstream: str) -> UpstreamAuthenticationError:
    """What a client gets when an upstream refuses the operator's key: its own words tell about key and account."""
    return UpstreamAuthenticationError(
        f"{upstream} refused the gateway's request (its key, or what the key may use); tell the gateway's operator"
    )


def unexpected(error: Exception) -> BaseException | None:
    """The unexpected exception: `error` itself, or the cause of an `EngineError`; None for other deliberate errors."""
    if isinstance(error, (AgentSpecError, HTTPException)):
        return error.__cause__ if isinstance(error, EngineError) else None
    return error


def log_unexpected(error: Exception, request_id: str) -> None:
    """Log where an unexpected error arose, with the request id, which the client gets in its response."""
    if (culprit := unexpected(error)) is not None:
        logger.error("internal error", request_id=request_id, exception=class_of(culprit), frames=frames_of(culprit))


def _body(error: Exception, request_id: str) -> dict[str, Any]:
    if not isinstance(error, AgentSpecError):
        body: dict[str, Any] = AgentSpecError("internal error").body()
        body["error"]["code"] = "internal_error"
    else:
        body = error.body()
    if request_id and (not isinstance(error, AgentSpecError) or isinstance(error, EngineError)):
        body["error"]["message"] += f"; the server's log says more about request {request_id}"
    return body


def outcome(error: Exception) -> str:
    """The metrics label, one of a fixed set, for a request that ended with `error`."""
    if isinstance(error, (OverloadedError, *_UNAVAILABLE)):
        return "rejected"
    return "client_error" if 400 <= error_response(error).status < 500 else "server_error"


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, (OverloadedError, NoServerError)):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, _UNAVAILABLE):
        return {"retry-after": "1"}
    if isinstance(error, SlowClientError):
        return {"connection": "close"}  # the rest of the body may never come
    return {"www-authenticate": "Bearer"} if isinstance(error, AuthenticationError) else {}


def _http(error: HTTPException) -> ErrorResponse:
    """The response for an unknown route or a method that the route does not allow."""
    message = {
        404: "no such route: there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,"
        " /v1/embeddings and /v1/models; what an upstream has besides can be listed in server.extra_routes",
        405: "method not allowed here",
    }.get(error.status_code, HTTPStatus(error.status_code).phrase)
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
    body: dict[str, Any] = InvalidRequestError(message).body()
    body["error"]["code"] = code
    return ErrorResponse(error.status_code, encode(body), code or "http_error", dict(error.headers or {}))
