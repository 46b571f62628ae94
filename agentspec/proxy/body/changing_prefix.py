"""Leaves out what Claude Code writes at the beginning of a prompt for Anthropic alone: a line that changes with every
request, so that no server would find the prompt in its cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentspec.proxy.body.reading import set_values

MARK = b"x-anthropic-billing-header:"
_LINE = re.compile(r"\s*x-anthropic-billing-header:(?:(?:[ \t]*[\w.-]+=[^;\s]*;?)+|[^\n]*)\s*")


def without_changing_prefix(fields: Mapping[str, Any], data: bytes) -> tuple[Mapping[str, Any], bytes]:
    """The fields of a body and its bytes, without that text where a system prompt begins; unchanged without one."""
    changed = {name: _without(fields[name]) for name in ("system", "instructions") if name in fields}
    for name in ("messages", "input"):
        if isinstance(given := fields.get(name), list) and (kept := _without_in_messages(given)):
            changed[name] = kept
    new = {name: changed.get(name, value) for name, value in fields.items()}
    new = {name: value for name, value in new.items() if value or not fields[name]}  # of some nothing is left
    return (fields, data) if new == fields else (new, set_values(new, {}))


def _without_in_messages(messages: list[Any]) -> list[Any]:
    """Without it in the system messages that come first."""
    kept: list[Any] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return [*kept, *messages[index:]]
        content = _without(message.get("content"))
        if content or content == message.get("content"):
            kept.append(message if content == message.get("content") else {**message, "content": content})
    return kept


def _without(content: Any) -> Any:
    """A text without it at its beginning, or parts; a part of which nothing is left goes."""
    if isinstance(content, str):
        return content[found.end() :] if (found := _LINE.match(content)) else content
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        left = _without(text) if isinstance(text, str) else text
        if left or left == text:
            parts.append(part if left == text else {**part, "text": left})
    return parts
