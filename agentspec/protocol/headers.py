"""The `x-agentspec-*` headers: a request's labels and switches, and the strategy that wrote an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from urllib.parse import quote, unquote

from agentspec.errors import InvalidRequestError
from agentspec.types import Labels

PREFIX = "x-agentspec-"
MAX_LABEL = 256
SESSION_PARENT, SESSION_FINAL = "x-dynamo-parent-session-id", "x-dynamo-session-final"
"""NVIDIA Dynamo's headers for the session that began this one, and for a session's last request."""
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def label_headers(labels: Labels, *, speculation: bool = True, store: bool = True, keep: str = "") -> dict[str, str]:
    """Labels and switches as headers. Blanks, `%` and non-ASCII characters not in `keep` are percent-encoded."""
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    headers = {f"{PREFIX}{name}": quote(value, safe=_PRINTABLE + keep) for name, value in named.items() if value}
    switches = {"speculation": speculation, "store": store}
    return headers | {f"{PREFIX}{name}": "off" for name, on in switches.items() if not on}


def read_labels(headers: Mapping[str, str]) -> Labels:
    """The labels of a request. Raises `InvalidRequestError` that names the wrong header."""
    return Labels(**{field.name: _label(headers, field.name) for field in fields(Labels)})


def read_switch(headers: Mapping[str, str], name: str) -> bool:
    """A switch, which is on unless its header says `off`. Raises `InvalidRequestError` for another value."""
    header = PREFIX + name
    value = headers.get(header, "on").strip().lower()
    if value not in ("on", "off"):
        raise InvalidRequestError(f"{header} must be 'on' or 'off'", param=header)
    return value == "on"


def strategy_headers(summary: str, *, lossy: bool, speculation: bool) -> dict[str, str]:
    """The header that names an answer's strategy: `lossy` if the answer may differ from the base model's."""
    if not lossy:
        return {f"{PREFIX}lossless": summary}
    return {f"{PREFIX}lossy": summary} if speculation else {}


def _label(headers: Mapping[str, str], name: str) -> str | None:
    """A label, percent-decoded; None if the header is empty."""
    header = PREFIX + name
    given = headers.get(header, "")
    if not given.isascii():
        raise InvalidRequestError(f"{header} must be percent-encoded UTF-8, as in %C3%A9", param=header)
    try:
        value = unquote(given, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{header} is not percent-encoded UTF-8", param=header) from None
    if len(value) > MAX_LABEL or not value.isprintable():
        raise InvalidRequestError(f"{header} must be at most {MAX_LABEL} printable characters", param=header)
    return value or None
