"""The failures of an upstream, and its error answers, as errors of ours."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from agentspec.backends.http.connections import NothingAnsweredError, httpcore, httpx
from agentspec.errors import UpstreamError, UpstreamStatusError, UpstreamTimeoutError
from agentspec.protocol.errors import MAX_ERROR_BYTES, error_message
from agentspec.protocol.wire import loads

_NOTHING_SENT = (httpx.ConnectError, httpcore.ConnectError, httpx.ConnectTimeout, httpcore.ConnectTimeout)
_CERTIFICATE = "its certificate is not trusted, or for another name; SSL_CERT_FILE can name authorities to trust"
_LATE = (httpx.TimeoutException, httpcore.TimeoutException)


def own_error(name: str, error: Exception) -> UpstreamError:
    """The error for one of the HTTP library."""
    if isinstance(error, _LATE):
        mapped: UpstreamError = UpstreamTimeoutError(f"upstream {name} did not answer in time ({type(error).__name__})")
    elif isinstance(error, _NOTHING_SENT):
        check = _CERTIFICATE if _is_untrusted(error) else "check its address, and that it runs"
        mapped = UpstreamError(f"upstream {name} could not be reached ({type(error).__name__}): {check}")
    else:
        mapped = UpstreamError(f"upstream {name} broke off ({type(error).__name__})")
    mapped.retryable = isinstance(error, (*_NOTHING_SENT, NothingAnsweredError))
    return mapped


def _is_untrusted(error: BaseException) -> bool:
    """Whether the server's certificate was refused. The message of ssl would show clients the address."""
    causes = (error.__cause__, error.__cause__ and error.__cause__.__cause__)
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)


def status_error(name: str, status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamStatusError:
    """The exception for an upstream's error answer: it holds the whole answer and quotes its message, if any."""
    try:
        message = error_message(decode_json(body, name)) if len(body) <= MAX_ERROR_BYTES else None
    except UpstreamError:
        message = None
    text = answered(name, status) + (f": {message[:2000]}" if message else "")
    return UpstreamStatusError(text, status=status, body=body, headers=headers)


def answered(name: str, status: int) -> str:
    hint = " (its base_url should end in /v1, once, unless its documentation says otherwise)" if status == 404 else ""
    return f"upstream {name} answered {status}{hint}"


def decode_json(body: bytes, name: str) -> Any:
    try:
        return loads(body)
    except ValueError:
        raise UpstreamError(f"upstream {name} answered with something that is not JSON") from None
