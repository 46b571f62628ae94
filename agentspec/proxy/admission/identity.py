"""Who is asking, by what agents send already: the one table of their headers and fields, read as labels.

Our own headers count first. Labels select statistics and drafts within a tenant. They isolate
nothing, so a name that somebody else uses does no harm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.protocol.headers import MAX_LABEL, SESSION_PARENT
from agentspec.types import Labels

MAX_READ = 4096  # characters of a name that are looked at; longer ones are no names


@dataclass(frozen=True, slots=True)
class NamedBy:
    """One place where clients name themselves: a header, or a field of the body. `read` finds the name in its value."""

    label: str
    header: str = ""
    field: str = ""
    read: Callable[[str], str] = str

    def value(self, headers: Mapping[str, str], fields: Mapping[str, Any]) -> str | None:
        """The label, None if the client names none here."""
        given: Any = headers.get(self.header) if self.header else _member(fields, self.field)
        if not isinstance(given, str) or len(given) > MAX_READ:
            return None
        return _as_label(self.read(given.strip()))


def _session_of_user(user: str) -> str:
    """The session in Claude Code's `metadata.user_id`: JSON, or words joined by underscores; else the user itself."""
    if user.startswith("{"):
        try:
            value = json.loads(user)
        except (ValueError, RecursionError):
            value = None
        session = value.get("session_id") if isinstance(value, dict) else None
        return session if isinstance(session, str) else user
    return user.rpartition("_session_")[2] or user


SOURCES = (
    NamedBy("session", header="x-claude-code-session-id"),
    NamedBy("session", header="x-dynamo-session-id"),
    NamedBy("session", header="session-id"),
    NamedBy("session", header="session_id"),
    NamedBy("session", header="x-session-id"),
    NamedBy("session", header="x-session-affinity"),
    NamedBy("session", field="session_id"),
    NamedBy("session", field="metadata.session_id"),
    NamedBy("session", field="metadata.thread_id"),
    NamedBy("session", field="prompt_cache_key"),
    NamedBy("session", field="metadata.user_id", read=_session_of_user),
    NamedBy("session", field="previous_response_id"),
    NamedBy("workflow", header=SESSION_PARENT),
    NamedBy("step", header="x-claude-code-agent-id"),
)
"""Where the label comes from: of those that a request has, the first."""


def identified(labels: Labels, headers: Mapping[str, str], fields: Mapping[str, Any]) -> Labels:
    """`labels`, our own, with those that are missing as the client names itself elsewhere. Never raises."""
    named = dict(_named(headers, fields))
    return Labels(
        labels.session or named.get("session"),
        labels.workflow or named.get("workflow"),
        labels.step or named.get("step"),
    )


def _named(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels with their values, the one that counts last."""
    for source in reversed(SOURCES):
        if (value := source.value(headers, fields)) is not None:
            yield source.label, value


def _member(fields: Mapping[str, Any], path: str) -> Any:
    outer, _, inner = path.rpartition(".")
    place = fields.get(outer) if outer else fields
    return place.get(inner) if isinstance(place, Mapping) else None


def _as_label(name: str) -> str | None:
    """A client's name as a label: one that no label may be is replaced by its digest."""
    if not name:
        return None
    if len(name) <= MAX_LABEL and name.isprintable():
        return name
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
