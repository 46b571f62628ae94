"""Leaves out what Claude Code writes at the beginning of a prompt for Anthropic alone: a line that changes with every
request, so that no server would find the prompt in its cache.
"""

from __future__ import annotations

import re
from typing import Any

from agentspec.backends.base import Backend
from agentspec.backends.http.endpoint import ANTHROPIC
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.body.reading import set_values

CHANGING = b"x-anthropic-billing-header:"
_LINE = re.compile(r"\s*x-anthropic-billing-header:(?:(?:[ \t]*[\w.-]+=[^;\s]*;?)+|[^\n]*)\s*")


def leave_out_changing_prefix(body: RequestBody, backend: Backend) -> None:
    """Leave that text out of `body` where a system prompt begins, unless Anthropic itself answers, which reads it."""
    servers: list[Any] = [backend]
    if isinstance(backend, PoolBackend):
        servers = [member.backend for member, _ in backend.pool.members()]
    hosts = [one.settings.url.host for one in servers if isinstance(one, OpenAIBackend)]
    if any(f".{host}".endswith(ANTHROPIC) for host in hosts):
        return
    fields = body.fields
    changed = {name: _without(fields[name]) for name in ("system", "instructions") if name in fields}
    for name in ("messages", "input"):
        if isinstance(given := fields.get(name), list) and (left := _without_in_messages(given)):
            changed[name] = left
    new = {name: changed.get(name, value) for name, value in fields.items()}
    new = {name: value for name, value in new.items() if value or not fields[name]}  # of some nothing is left
    if new != fields:
        body.fields, body.data = new, set_values(new, {})


def _without_in_messages(messages: list[Any]) -> list[Any]:
    """Without it in the system messages that come first."""
    left: list[Any] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return [*left, *messages[index:]]
        content = _without(message.get("content"))
        if content or content == message.get("content"):
            left.append(message if content == message.get("content") else {**message, "content": content})
    return left


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
