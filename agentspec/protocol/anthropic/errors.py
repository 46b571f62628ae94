"""Errors as Anthropic's API reports them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import json
from typing import Any

from agentspec.protocol.upstream_errors import MAX_ERROR_BYTES

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


def error_type(status: int) -> str:
    """Anthropic's name for an error of this HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def anthropic_error(body: bytes, status: int, request_id: str = "") -> bytes:
    """`body`, an error of OpenAI's shape, in Anthropic's shape; one that has that shape already stays as it is.

    `param` and `code`, where the error has them, stay as further members.
    """
    given = _object(body)
    if given.get("type") == "error" and isinstance(given.get("error"), dict):
        return body
    error: Any = given.get("error")
    told: dict[str, Any] = error if isinstance(error, dict) else {}
    message = told.get("message") or told.get("code") or "the request failed"
    shown: dict[str, Any] = {"type": error_type(status), "message": str(message)}
    shown |= {name: told[name] for name in ("param", "code") if told.get(name) is not None}
    whole = {"type": "error", "error": shown, **({"request_id": request_id} if request_id else {})}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if len(body) <= MAX_ERROR_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
