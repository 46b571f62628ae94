"""Reads the sessions that the coding agent Pi keeps in `~/.pi/agent/sessions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentspec.recordings.agents.turns import Turn, answer, calls_of, moment, records, text_of, tool_call, tool_result
from agentspec.recordings.calls import OnBad, RecordedCall
from agentspec.types import Labels, Message

_USER = {"bashExecution": "Ran `{command}`\n{output}", "branchSummary": "{summary}", "compactionSummary": "{summary}"}


def read(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of a session, on each of its branches."""
    session = path.stem
    entries: dict[str, tuple[str | None, Mapping[str, Any], str]] = {}
    last: str | None = None
    for place, record in records(path, on_bad):
        if record.get("type") == "session":
            session = str(record.get("id") or session)
            continue
        id = str(record.get("id") or place)
        entries[id] = (record.get("parentId", last), record, place)  # older versions have neither, and no branches
        last = id
    above = {parent for parent, _, _ in entries.values()}
    seen: set[str] = set()
    for leaf in (id for id in entries if id not in above):
        for turns in _contexts(_path(entries, leaf)):
            calls = [call for call in calls_of(turns, Labels(session, "pi")) if call.place not in seen]
            seen |= {call.place for call in calls}
            yield from calls


def _path(
    entries: Mapping[str, tuple[str | None, Mapping[str, Any], str]], leaf: str
) -> list[tuple[str, Mapping[str, Any], str]]:
    path: list[tuple[str, Mapping[str, Any], str]] = []
    at = leaf
    while at in entries and len(path) <= len(entries):
        parent, record, place = entries[at]
        path.append((at, record, place))
        if parent is None:
            break
        at = parent
    return path[::-1]


def _contexts(path: list[tuple[str, Mapping[str, Any], str]]) -> list[list[Turn]]:
    """The turns that the model saw, anew after each compaction: a summary and what was kept of the turns before."""
    contexts: list[dict[str, Turn]] = [{}]
    for id, record, place in path:
        if record.get("type") == "compaction":
            kept = list(contexts[-1])
            first = kept.index(record["firstKeptEntryId"]) if record.get("firstKeptEntryId") in kept else len(kept)
            summary = Turn({"role": "user", "content": str(record.get("summary") or "")}, place)
            old = {one: replace(contexts[-1][one], said=False) for one in kept[first:]}
            contexts.append({id: summary, **old})
        elif record.get("type") == "message" and isinstance(record.get("message"), dict):
            contexts[-1][id] = _turn(record["message"], place, moment(record.get("timestamp")))
    return [list(context.values()) for context in contexts]


def _turn(message: Mapping[str, Any], place: str, at: float | None) -> Turn:
    role, content = str(message.get("role")), message.get("content")
    if role == "assistant":
        reason = message.get("stopReason")
        return Turn(_answer(content), place, at, reason not in ("length", "aborted"), said=reason != "error")
    if role == "toolResult":
        return Turn(tool_result(message.get("toolCallId"), text_of(content)), place, at)
    if role in _USER:
        given = {"command": "", "output": "", "summary": ""} | dict(message)
        return Turn({"role": "user", "content": _USER[role].format(**given)}, place, at)
    return Turn({"role": "user", "content": text_of(content)}, place, at)


def _answer(content: Any) -> Message:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]
    texts = "".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")
    thoughts = "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking")
    calls = [block for block in blocks if block.get("type") == "toolCall"]
    return answer(
        texts, thoughts, (tool_call(block.get("id"), block["name"], block.get("arguments")) for block in calls)
    )
