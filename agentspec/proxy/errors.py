"""Turns errors into HTTP responses of OpenAI's shape: the one place where classes of errors become statuses.

An upstream's own error is no exception where its answer is passed through: see `forwarding.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus

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
from agentspec.protocol.errors import error_object, without_account
from agentspec.protocol.wire import encode
from agentspec.proxy.logs import logger
from agentspec.telemetry.safe_errors import class_of, frames_of

# Headers of an upstream's error answer that are passed on.
_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
_UNAVAILABLE = (ShuttingDownError, NotReadyError, AnswerMemoryError)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    status: int
    body: bytes
    code: str
    headers: dict[str, str]


def error_response(error: Exception, request_id: str = "") -> ErrorResponse:
    """The response for `error`. For an unexpected error it has only the request id to look up in the log."""
    known = _shown_error(error, request_id)
    if isinstance(known, UpstreamStatusError):
        retry = {name: known.headers[name] for name in _RETRY_HEADERS if name in known.headers}
        body = error_object(known.upstream_body, known.status, known.message)
        return ErrorResponse(known.status, without_account(body), "upstream_status", retry)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else _headers(known)
    return ErrorResponse(known.status, _body(known), known.code or known.type, headers)


def _shown_error(error: Exception, request_id: str) -> AgentSpecError:
    """`error`; or what clients get in its place, if it is unexpected, starlette's, or an upstream's refusal of a key
    that is not the client's.
    """
    if isinstance(error, HTTPException):
        return _route_error(error)
    if isinstance(error, UpstreamStatusError) and error.status in (401, 403):
        return error if getattr(error, "for_client", False) else refused_key("the upstream")
    if isinstance(error, AgentSpecError) and not isinstance(error, EngineError):
        return error
    message = error.message if isinstance(error, EngineError) else "internal error"
    if request_id:
        message += f"; the server's log says more about request {request_id}"
    known = AgentSpecError(message)
    known.code = "internal_error"
    if isinstance(error, EngineError):
        known.status, known.code = error.status, error.code
    return known


def _body(error: AgentSpecError) -> bytes:
    body = encode(error.body())
    return without_account(body) if isinstance(error, UpstreamError) else body  # it may quote an answer of status 200


def refused_key(upstream: str) -> UpstreamAuthenticationError:
    """What a client gets when an upstream refuses the operator's key: its own words describe key and account."""
    return UpstreamAuthenticationError(
        f"{upstream} refused the gateway's request (its key, or what the key may use); tell the gateway's operator"
    )


def log_unexpected(error: Exception, request_id: str) -> None:
    """Log where an unexpected error, or the cause of an `EngineError`, arose, with the id that the client gets."""
    culprit: BaseException | None = error
    if isinstance(error, (AgentSpecError, HTTPException)):
        culprit = error.__cause__ if isinstance(error, EngineError) else None
    if culprit is not None:
        logger.error("internal error", request_id=request_id, exception=class_of(culprit), frames=frames_of(culprit))


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


def _route_error(error: HTTPException) -> AgentSpecError:
    """The error for an unknown route or a method that the route does not allow."""
    hint = "" if error.detail == HTTPStatus(error.status_code).phrase else f" {error.detail}"
    message, code = {
        404: (
            f"no such route{hint}: there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,"
            " /v1/embeddings and /v1/models; other routes of an upstream are not forwarded",
            "unknown_route",
        ),
        405: ("method not allowed here", "method_not_allowed"),
    }.get(error.status_code, (HTTPStatus(error.status_code).phrase, "http_error"))
    known = InvalidRequestError(message)
    known.status, known.code = error.status_code, code
    return known
