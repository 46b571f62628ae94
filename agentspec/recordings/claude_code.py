"""Reads messages made of content blocks, as Anthropic's Messages API has them: its logged calls, and the sessions that
Claude Code keeps in `~/.claude/projects`, a line for each block of a message, in a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from agentspec.recordings.calls import OnBad, RecordedCall, answer, moment, records, text_of, tool_call, tool_result
from agentspec.types import Labels, Message

_CUT = ("max_tokens", "model_context_window_exceeded")


def messages_of(role: str, content: Any) -> list[Message]:
    """The chat messages that one message is: its tool results first, then what else it says."""
    if role == "assistant":
        return [answer_of(content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}])]
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    results = [block for block in content if block.get("type") == "tool_result"]
    rest = [block for block in content if block.get("type") != "tool_result"]
    messages = [tool_result(block.get("tool_use_id"), text_of(block.get("content"))) for block in results]
    return [*messages, {"role": role, "content": text_of(rest)}] if rest or not results else messages


def answer_of(blocks: Sequence[Mapping[str, Any]]) -> Message:
    """The assistant's message that the blocks of an answer make up."""

    def texts(kind: str) -> str:
        return "".join(str(block.get(kind) or "") for block in blocks if block.get("type") == kind)

    calls = [block for block in blocks if block.get("type") in ("tool_use", "server_tool_use", "mcp_tool_use")]
    tool_calls = (tool_call(block.get("id"), block["name"], block.get("input")) for block in calls)
    return answer(texts("text"), texts("thinking"), tool_calls)


def logged_message(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> RecordedCall:
    """A logged request and response of `/v1/messages`."""
    messages: list[Message] = []
    if request.get("system"):
        messages.append({"role": "system", "content": text_of(request["system"])})
    for message in request.get("messages") or []:
        messages += messages_of(message["role"], message["content"])
    finished = response.get("stop_reason") not in _CUT
    return RecordedCall(
        place, Labels(), messages, answer_of(response["content"]), finished=finished, id=response.get("id")
    )


@dataclass(frozen=True, slots=True)
class _MessageLine:
    """A line with a message. The lines of one answer share `reply`: each has a block of it, or all that was written so
    far, perhaps the beginning of a block that a later line has whole.
    """

    place: str
    number: int
    uuid: str
    message: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def reply(self) -> str | None:
        named = self.message.get("id") or self.record.get("requestId")
        return named if self.message.get("role") == "assistant" else None

    def blocks(self, kind: str) -> list[Mapping[str, Any]]:
        content = self.message.get("content")
        return [block for block in content if block.get("type") == kind] if isinstance(content, list) else []


@dataclass(frozen=True, slots=True)
class _Session:
    """The lines of a file that have messages, found by what the search for earlier messages asks for.

    `lines` has them by ("line", uuid), by ("reply", id of the answer that they are part of), and by ("result", id of a
    tool's call) where they hold that result. `parents` has every line.
    """

    replies: dict[str, list[_MessageLine]] = field(default_factory=dict)
    lines: dict[tuple[str, str], list[_MessageLine]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)

    def add(self, entry: _MessageLine) -> None:
        if entry.message.get("role") == "assistant" and not _is_synthetic(entry):
            self.replies.setdefault(entry.reply or entry.uuid, []).append(entry)
        keys = {("line", entry.uuid)} | {
            ("result", str(block.get("tool_use_id"))) for block in entry.blocks("tool_result")
        }
        for key in keys | ({("reply", entry.reply)} if entry.reply else set()):
            self.lines.setdefault(key, []).append(entry)


def read_claude_code(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of a session, of its subagents too, with the messages on the path to it."""
    session = _session(path, on_bad)
    ends: dict[str | None, _Branch] = {}  # by the line that they reach so far
    for parts in session.replies.values():
        first = parts[0]
        answer = _answer(parts)
        if not (answer["content"] or answer.get("tool_calls")):
            continue
        labels = Labels(str(first.record.get("sessionId") or path.stem), "claude-code")
        yield RecordedCall(
            first.place,
            labels,
            _before(first, session, ends),
            answer,
            finished=not any(part.message.get("stop_reason") in _CUT for part in parts),
            created_at=moment(parts[-1].record.get("timestamp")),
            id=first.reply,
        )


def _session(path: Path, on_bad: OnBad) -> _Session:
    session = _Session()
    for number, (place, record) in enumerate(records(path, on_bad)):
        uuid = str(record.get("uuid") or place)
        kind, message, repeated = record.get("type"), record.get("message"), uuid in session.parents
        session.parents[uuid] = record.get("parentUuid")
        if kind == "user" and repeated:
            continue  # the line was written twice
        if kind in ("user", "assistant") and isinstance(message, dict) and "role" in message:
            session.add(_MessageLine(place, number, uuid, message, record))
    return session


def _is_synthetic(entry: _MessageLine) -> bool:
    """Whether the program itself wrote the answer, to show an error."""
    return bool(entry.record.get("isApiErrorMessage")) or entry.message.get("model") == "<synthetic>"


def _before(answer: _MessageLine, session: _Session, ends: dict[str | None, _Branch]) -> list[Message]:
    """The messages on the path to `answer`: those of the branch that it goes on, and what came since."""
    path: dict[str, None] = {}
    above = end = session.parents[answer.uuid]
    while above is not None and above not in ends and above not in path:
        path[above] = None
        above = session.parents.get(above)
    ends[end] = branch = ends.pop(above, None) or _Branch(session.lines)
    return branch.grow(path, answer.number)


class _Branch:
    """The messages on a path: of its lines, of the other lines of their answers, and of all results of their tools.

    A branch grows with its path, so that a session is read once and not once for each answer.
    """

    def __init__(self, lines: Mapping[tuple[str, str], Sequence[_MessageLine]]) -> None:
        self._lines = lines
        self._known: set[int] = set()
        self._waiting: list[tuple[int, _MessageLine]] = []  # a heap; lines that belong here by their numbers
        self._found: list[_MessageLine] = []
        self._messages: list[Message] = []
        self._written: dict[str, tuple[int, list[_MessageLine]]] = {}  # each answer's place in `_messages`, its lines

    def grow(self, path: Iterable[str], number: int) -> list[Message]:
        """The messages before line `number`, now that the path has these lines too."""
        for uuid in path:
            for entry in self._lines.get(("line", uuid), ()):
                self._wait((entry, *self._lines.get(("reply", entry.reply or ""), ())))
        found = []
        while self._waiting and self._waiting[0][0] < number:
            _, entry = heappop(self._waiting)
            found.append(entry)
            for block in entry.blocks("tool_use"):
                results = self._lines.get(("result", str(block.get("id"))), ())
                self._wait(one for one in results if one.number > entry.number)
        self._write([entry for entry in found if not _is_synthetic(entry)])
        return list(self._messages)

    def _wait(self, entries: Iterable[_MessageLine]) -> None:
        for entry in entries:
            if entry.number not in self._known:
                self._known.add(entry.number)
                heappush(self._waiting, (entry.number, entry))

    def _write(self, found: list[_MessageLine]) -> None:
        """Add the messages of these lines; an answer stands where its first line does."""
        if found and self._found and found[0].number < self._found[-1].number:
            found = sorted(self._found + found, key=lambda entry: entry.number)
            self._found, self._messages, self._written = [], [], {}
        self._found += found
        for entry in found:
            if entry.reply is None:
                self._messages += messages_of(str(entry.message["role"]), entry.message.get("content"))
                continue
            if entry.reply not in self._written:
                self._written[entry.reply] = len(self._messages), []
                self._messages.append({})
            self._written[entry.reply][1].append(entry)
        for reply in {entry.reply for entry in found if entry.reply is not None}:
            place, parts = self._written[reply]
            self._messages[place] = _answer(parts)


def _answer(parts: Sequence[_MessageLine]) -> Message:
    """The message that the lines make up; a block that begins as one of an earlier line does takes its place."""
    written: list[Mapping[str, Any]] = []
    for part in parts:
        content = part.message.get("content") or []
        open_places = list(range(len(written)))
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            place = next((one for one in open_places if _continues(block, written[one])), None)
            if place is None:
                written.append(block)
            else:
                open_places.remove(place)
                written[place] = block
    return answer_of(written)


def _continues(block: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether a block is an earlier one, as far as that was written then."""
    kind = str(block.get("type"))
    if kind != earlier.get("type"):
        return False
    if kind in ("text", "thinking"):
        return str(block.get(kind) or "").startswith(str(earlier.get(kind) or ""))
    return block.get("id") is not None and block.get("id") == earlier.get("id")
