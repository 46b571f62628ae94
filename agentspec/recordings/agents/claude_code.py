"""Reads the sessions that Claude Code keeps in `~/.claude/projects`: a line for each block of a message, in a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.recordings.agents.anthropic_blocks import CUT, answer_of, messages_of
from agentspec.recordings.agents.turns import moment, records
from agentspec.recordings.calls import OnBad, RecordedCall
from agentspec.types import Labels, Message


@dataclass(frozen=True, slots=True)
class _MessageLine:
    """A line with a message. The lines of one answer share `reply`."""

    place: str
    number: int
    uuid: str
    message: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def reply(self) -> str | None:
        return self.message.get("id") if self.message.get("role") == "assistant" else None

    def blocks(self, kind: str) -> list[Mapping[str, Any]]:
        content = self.message.get("content")
        return [block for block in content if block.get("type") == kind] if isinstance(content, list) else []


def read(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of a session, of its subagents too, with the messages on the path to it."""
    entries, parents = _entries(path, on_bad)
    replies: dict[str, list[_MessageLine]] = {}
    for entry in entries:
        if entry.message.get("role") == "assistant" and not _is_synthetic(entry):
            replies.setdefault(entry.reply or entry.uuid, []).append(entry)
    for parts in replies.values():
        first, last = parts[0], parts[-1]
        answer = _answer(parts)
        if not (answer["content"] or answer.get("tool_calls")):
            continue
        labels = Labels(str(first.record.get("sessionId") or path.stem), "claude-code")
        yield RecordedCall(
            first.place,
            labels,
            _messages(_before(first, entries, parents)),
            answer,
            finished=last.message.get("stop_reason") not in CUT,
            created_at=moment(last.record.get("timestamp")),
        )


def _entries(path: Path, on_bad: OnBad) -> tuple[list[_MessageLine], dict[str, str | None]]:
    """The lines with messages, and the parent of every line."""
    entries: list[_MessageLine] = []
    parents: dict[str, str | None] = {}
    for number, (place, record) in enumerate(records(path, on_bad)):
        uuid = str(record.get("uuid") or place)
        parents[uuid] = record.get("parentUuid")
        message = record.get("message")
        if record.get("type") in ("user", "assistant") and isinstance(message, dict) and "role" in message:
            entries.append(_MessageLine(place, number, uuid, message, record))
    return entries, parents


def _is_synthetic(entry: _MessageLine) -> bool:
    """Whether the program itself wrote the answer, to show an error."""
    return bool(entry.record.get("isApiErrorMessage")) or entry.message.get("model") == "<synthetic>"


def _before(
    answer: _MessageLine, entries: Sequence[_MessageLine], parents: Mapping[str, str | None]
) -> list[_MessageLine]:
    """The lines on the path to `answer`, with the other lines of their answers and all results of their tools."""
    path: set[str] = set()
    above = parents[answer.uuid]
    while above is not None and above not in path:
        path.add(above)
        above = parents.get(above)
    replies = {entry.reply for entry in entries if entry.uuid in path and entry.reply}
    found, calls = [], set[str]()
    for entry in entries:
        if entry.number >= answer.number:
            break
        results = {str(block.get("tool_use_id")) for block in entry.blocks("tool_result")}
        if entry.uuid in path or entry.reply in replies or results & calls:
            found.append(entry)
            calls |= {str(block.get("id")) for block in entry.blocks("tool_use")}
    return [entry for entry in found if not _is_synthetic(entry)]


def _messages(entries: Sequence[_MessageLine]) -> list[Message]:
    messages: list[Message] = []
    written: dict[str, list[_MessageLine]] = {}
    for entry in entries:
        if entry.reply is None:
            messages += messages_of(str(entry.message["role"]), entry.message.get("content"))
        elif entry.reply in written:
            written[entry.reply].append(entry)
        else:
            written[entry.reply] = [entry]
            messages.append({"reply": entry.reply})
    return [_answer(written[message["reply"]]) if "reply" in message else message for message in messages]


def _answer(parts: Sequence[_MessageLine]) -> Message:
    contents = [part.message.get("content") or [] for part in parts]
    blocks = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
    return answer_of([block for several in blocks for block in several])
