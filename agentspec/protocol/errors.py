"""Upstreams' errors in the form of OpenAI's or Anthropic's API, without the operator's account."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentspec.errors import doc_url
from agentspec.protocol.wire import encode, object_in, reported

MAX_MESSAGE = 2000
MAX_ERROR_BYTES = 1 << 20
# Fragments of keys, which OpenAI fills with asterisks, and names of organisations and projects.
_ACCOUNT = re.compile(rb"\b(?:sk|org|proj)[-_][\w*.-]{8,}")
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_object(content: bytes, status: int, message: str) -> bytes:
    """`content` if it is an OpenAI error body, else one with `message`, which also quotes another form's message.

    What is not JSON is not quoted: pages of servers in between name hosts and versions.
    """
    given = _object(content)
    if isinstance(given.get("error"), dict):
        return content
    if quoted := _message(given):
        message += f": {quoted[:MAX_MESSAGE]}"
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    kind = "rate_limit_error" if status == 429 else kind
    error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": "upstream_status"}
    error["doc_url"] = doc_url("upstream_status")
    return encode({"error": error})


def without_account(content: bytes) -> bytes:
    """`content` without fragments of keys and names of organisations and projects."""
    return _ACCOUNT.sub(b"***", content)


def error_message(given: Any) -> str | None:
    """The message of an error in any form."""
    error = reported(given) if isinstance(given, Mapping) else None
    return _message(error if isinstance(error, Mapping) else given)


def _message(given: Any) -> str | None:
    """The message of a JSON error in another form, such as `{"detail": "Not Found"}`."""
    if not isinstance(given, dict):
        return None
    return next((text for name in ("error", "message", "detail") if isinstance(text := given.get(name), str)), None)


def anthropic_error(body: bytes, status: int, request_id: str = "") -> bytes:
    """`body`, an error of OpenAI's shape, in Anthropic's shape; one that has that shape already stays as it is."""
    given = _object(body)
    if given.get("type") == "error" and isinstance(given.get("error"), dict):
        return body
    error: Any = given.get("error")
    return encode(anthropic_form(error if isinstance(error, dict) else {}, status, request_id))


def anthropic_form(error: Mapping[str, Any], status: int, request_id: str) -> dict[str, Any]:
    """OpenAI's object `error` in Anthropic's shape; its `param`, `code` and `doc_url` stay as further members."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.get("message") or error.get("code") or "the request failed"
    shown = {"type": kind, "message": str(message)}
    shown |= {name: error[name] for name in ("param", "code", "doc_url") if error.get(name) is not None}
    return {"type": "error", "error": shown, **({"request_id": request_id} if request_id else {})}


def _object(body: bytes) -> dict[str, Any]:
    return object_in(body) if len(body) <= MAX_ERROR_BYTES else {}
