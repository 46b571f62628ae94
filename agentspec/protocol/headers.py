"""The `x-agentspec-*` headers: a request's labels, switches and policy, and the strategy that wrote an answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import quote, unquote

from agentspec.errors import InvalidRequestError
from agentspec.protocol.policy import ANY, MAX_LABEL, PREFIX, PRINTABLE, StepPolicy
from agentspec.types import Labels

_EARLY_TOOLS = "early-tools"
_REQUEST_NAMES = (
    *("session", "workflow", "step", "speculation", "store", _EARLY_TOOLS),
    *("deadline-s", "priority"),
)


def label_headers(
    labels: Labels,
    *,
    speculation: bool = True,
    store: bool = True,
    early_tools: int = 0,
    keep: str = "",
) -> dict[str, str]:
    """Labels, switches and the count of early tools as headers. `%`, blanks and non-ASCII characters not in `keep`, and
    blanks at either end, are percent-encoded. A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    headers = {f"{PREFIX}{name}": _quoted(value, keep) for name, value in named.items() if value}
    headers |= {PREFIX + _EARLY_TOOLS: str(early_tools)} if early_tools else {}
    switches = {"speculation": speculation, "store": store}
    return headers | {f"{PREFIX}{name}": "off" for name, on in switches.items() if not on}


def read_labels(headers: Mapping[str, str]) -> Labels:
    """The labels of a request. Raises `InvalidRequestError` that names the wrong header."""
    return Labels(**{field.name: _label(headers, field.name) for field in fields(Labels)})


def read_early_tools(headers: Mapping[str, str]) -> int:
    """How many tools an agent had early since its last call. Raises `InvalidRequestError` for no count."""
    given = headers.get(header := PREFIX + _EARLY_TOOLS, "0").strip()
    if not (given.isascii() and given.isdigit() and len(given) <= 6):
        raise InvalidRequestError(f"{header} must be a count below a million", param=header)
    return int(given)


def read_switch(headers: Mapping[str, str], name: str) -> bool:
    """A switch, which is on unless its header says `off`. Raises `InvalidRequestError` for another value."""
    header = PREFIX + name
    value = headers.get(header, "on").strip().lower()
    if value not in ("on", "off"):
        raise InvalidRequestError(f"{header} must be 'on' or 'off'", param=header)
    return value == "on"


def switched_off(**switches: bool) -> tuple[str, ...]:
    """The names of the switches that are off for a request."""
    return tuple(name for name, on in switches.items() if not on)


def read_policy(headers: Mapping[str, str]) -> StepPolicy:
    """The policy in a request's headers (lower case). Raises `InvalidRequestError` that names the wrong header."""
    read: dict[str, Any] = {
        "deadline_s": _number(headers, "deadline_s", float),
        "priority": _number(headers, "priority", int),
    }
    if all(value is None for value in read.values()):
        return ANY
    try:
        return StepPolicy(**read)
    except InvalidRequestError as error:
        header = _header(str(error.param))
        raise InvalidRequestError(error.message.replace(str(error.param), header, 1), param=header) from None


def refuse_misspelt(headers: Iterable[str]) -> None:
    """Raise `InvalidRequestError` for a header (lower case) with a name that is nearly one of ours: a store that should
    be off would be on. Other names may belong to an upstream.
    """
    for header in headers:
        name = header[:MAX_LABEL].removeprefix(PREFIX)
        if name in _REQUEST_NAMES or not header.startswith(PREFIX):
            continue
        if near := difflib.get_close_matches(name, _REQUEST_NAMES, n=1, cutoff=0.75):
            hint = f"no header {header[:80]!r} is known; did you mean {PREFIX + near[0]!r}?"
            raise InvalidRequestError(hint, param=header[:80])


def strategy_headers(summary: str, *, lossy: bool, speculation: bool) -> dict[str, str]:
    """The header that names an answer's strategy: `lossy` if the answer may differ from the base model's."""
    if not lossy:
        return {f"{PREFIX}lossless": summary}
    return {f"{PREFIX}lossy": summary} if speculation else {}


def _label(headers: Mapping[str, str], name: str) -> str | None:
    """The label in the header of ours that ends in `name`, percent-decoded; None if it is empty."""
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


def _quoted(value: str, keep: str) -> str:
    text = quote(value, PRINTABLE + keep, errors="replace")
    return re.sub("^ +| +$", lambda blanks: "%20" * len(blanks[0]), text)


def _number(headers: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float | None:
    given = headers.get(_header(name), "").strip()
    try:
        return kind(given) if given else None
    except ValueError:
        raise InvalidRequestError(f"{_header(name)} must be a number", param=_header(name)) from None


def _header(name: str) -> str:
    return PREFIX + name.replace("_", "-")
