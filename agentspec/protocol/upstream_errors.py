"""Brings an upstream's error answer into OpenAI's form, and takes out what it tells about the operator's account."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 2000
MAX_ERROR_BYTES = 1 << 20
# Fragments of keys, which OpenAI fills with asterisks, and names of organisations and projects.
_ACCOUNT = re.compile(rb"\b(?:sk|org|proj)[-_][\w*.-]{8,}")


def error_object(content: bytes, status: int, message: str) -> bytes:
    """`content` if it is an OpenAI error body, else one with `message`, which also quotes another form's message.

    What is not JSON is not quoted: pages of servers in between name hosts and versions.
    """
    try:
        given = json.loads(content) if len(content) <= MAX_ERROR_BYTES else None
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and isinstance(given.get("error"), dict):
        return content
    if quoted := _message(given):
        message += f": {quoted[:MAX_MESSAGE]}"
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    kind = "rate_limit_error" if status == 429 else kind
    error = {"message": message, "type": kind, "param": None, "code": "upstream_status"}
    return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "replace")


def without_account(content: bytes) -> bytes:
    """`content` without fragments of keys and names of organisations and projects."""
    return _ACCOUNT.sub(b"***", content)


def reported(value: Mapping[str, Any]) -> Any:
    """The error that a chunk or an answer reports, if any: as OpenAI's, or in the form that vLLM once had."""
    return value if value.get("object") == "error" else value.get("error")


def error_message(given: Any) -> str | None:
    """The message of an error in any form."""
    error = reported(given) if isinstance(given, Mapping) else None
    return _message(error if isinstance(error, Mapping) else given)


def _message(given: Any) -> str | None:
    """The message of a JSON error in another form, such as `{"detail": "Not Found"}`."""
    if not isinstance(given, dict):
        return None
    return next((text for name in ("error", "message", "detail") if isinstance(text := given.get(name), str)), None)
