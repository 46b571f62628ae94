"""Reads the sessions that Codex keeps in `~/.codex/sessions`: items of the Responses API, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentspec.recordings.agents.response_items import Item, turns_of
from agentspec.recordings.agents.turns import calls_of, moment, records
from agentspec.recordings.calls import OnBad, RecordedCall
from agentspec.types import Labels


def read(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of a session. Older versions write the items by themselves, after a line about the session."""
    session, contexts = path.stem, [list[Item]()]
    for place, record in records(path, on_bad):
        at = moment(record.get("timestamp"))
        kind, payload = record.get("type"), record.get("payload")
        if not isinstance(payload, dict):
            if kind is None and "id" in record:
                session = str(record["id"])
            kind, payload = ("session_meta" if kind is None and "id" in record else "response_item"), record
        if kind == "session_meta":
            session = str(payload.get("id") or session)
            contexts[-1] += _instructions(payload, place)
        elif kind == "compacted":
            contexts.append(_replacement(payload, place))
        elif kind == "response_item":
            contexts[-1].append(Item(payload, place, at))
    for context in contexts:
        yield from calls_of(turns_of(context), Labels(session, "codex"))


def _instructions(payload: dict[str, Any], place: str) -> list[Item]:
    given = payload.get("base_instructions") or payload.get("instructions")
    text = given.get("text") if isinstance(given, dict) else given
    return [Item({"role": "system", "content": text}, place)] if text else []


def _replacement(payload: dict[str, Any], place: str) -> list[Item]:
    """What stands for the history from now on: items, or a summary."""
    items = payload.get("replacement_history") or [{"role": "user", "content": payload.get("message") or ""}]
    return [Item(item, place, said=False) for item in items]
