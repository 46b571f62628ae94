"""Reads the sessions of OpenCode: its database `opencode.db`, or the folder `storage` that older versions write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentspec.errors import ConfigurationError
from agentspec.recordings.agents.turns import Turn, answer, calls_of, moment, text_of, tool_call, tool_result
from agentspec.recordings.calls import BadLineError, OnBad, RecordedCall, json_object
from agentspec.types import Labels, Message

_Object = Mapping[str, Any]
TABLES = {"session", "message", "part"}


def is_database(path: Path) -> bool:
    """Whether a SQLite file has OpenCode's tables."""
    try:
        with closing(_connect(path)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return False
    return names >= TABLES


def is_storage(path: Path) -> bool:
    """Whether a folder is OpenCode's `storage`."""
    return (path / "message").is_dir() and (path / "part").is_dir()


def read(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of every session; a message of several steps is several answers."""
    sessions = _stored(path, on_bad) if path.is_dir() else _selected(path, on_bad)
    for session, messages in sessions:
        for turns in _contexts(messages, f"{path}:{session}"):
            yield from calls_of(turns, Labels(session, "opencode"))


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)


def _selected(path: Path, on_bad: OnBad) -> Iterator[tuple[str, list[tuple[_Object, list[_Object]]]]]:
    try:
        with closing(_connect(path)) as database:
            sessions = database.execute("SELECT DISTINCT session_id FROM message ORDER BY session_id").fetchall()
            for (session,) in sessions:
                by_message: dict[str, list[_Object]] = {}
                parts = database.execute(
                    "SELECT id, message_id, data FROM part WHERE session_id = ? ORDER BY id", (session,)
                )
                for id, message, data in parts:
                    by_message.setdefault(message, []).extend(_objects(f"{path}:part {id}", data, on_bad))
                rows = database.execute("SELECT id, data FROM message WHERE session_id = ? ORDER BY id", (session,))
                yield (
                    session,
                    [
                        (value, by_message.get(id, []))
                        for id, data in rows.fetchall()
                        for value in _objects(f"{path}:message {id}", data, on_bad)
                    ],
                )
    except sqlite3.Error as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None


def _stored(path: Path, on_bad: OnBad) -> Iterator[tuple[str, list[tuple[_Object, list[_Object]]]]]:
    for folder in sorted((path / "message").iterdir()):
        messages = [
            (value, [part for one in sorted((path / "part" / file.stem).glob("*.json")) for part in _file(one, on_bad)])
            for file in sorted(folder.glob("*.json"))
            for value in _file(file, on_bad)
        ]
        yield folder.name, messages


def _file(path: Path, on_bad: OnBad) -> list[_Object]:
    try:
        return _objects(str(path), path.read_bytes(), on_bad)
    except OSError as error:
        on_bad(BadLineError(str(path), f"cannot be read: {error.strerror}"))
        return []


def _objects(place: str, data: str | bytes, on_bad: OnBad) -> list[_Object]:
    try:
        return [json_object(data.encode() if isinstance(data, str) else data, place)]
    except BadLineError as error:
        on_bad(error)
        return []


def _contexts(messages: Sequence[tuple[_Object, list[_Object]]], place: str) -> list[list[Turn]]:
    """The turns of a session, anew after each summary."""
    contexts: list[list[Turn]] = [[]]
    for number, (message, parts) in enumerate(messages, start=1):
        turns = list(_turns(message, parts, f"{place}:{number}"))
        contexts[-1] += turns
        if message.get("summary") is True and turns:
            contexts.append([Turn(turn.message, turn.place, said=False) for turn in turns])
    return contexts


def _turns(message: _Object, parts: Sequence[_Object], place: str) -> Iterator[Turn]:
    times = message.get("time") or {}
    at = moment(times.get("completed") or times.get("created"))
    if message.get("role") != "assistant":
        yield Turn({"role": "user", "content": "\n".join(filter(None, map(_shown, parts)))}, place, at)
        return
    finished = message.get("finish") != "length" and not message.get("error")
    steps: list[list[_Object]] = [[]]
    for part in parts:
        if part.get("type") == "step-start":
            steps.append([])
        steps[-1].append(part)
    for step in steps:
        if written := _answer(step):
            yield Turn(written, place, at, finished)
            yield from (Turn(result, place, at) for result in _results(step))


def _shown(part: _Object) -> str:
    kind = part.get("type")
    return str(part.get("text") or "") if kind == "text" else f"[{part.get('filename')}]" if kind == "file" else ""


def _answer(step: Sequence[_Object]) -> Message | None:
    def texts(kind: str) -> str:
        return "".join(str(part.get("text") or "") for part in step if part.get("type") == kind)

    calls = [
        tool_call(part.get("callID"), part["tool"], (part.get("state") or {}).get("input")) for part in _tools(step)
    ]
    return answer(texts("text"), texts("reasoning"), calls) if texts("text") or calls else None


def _results(step: Sequence[_Object]) -> Iterator[Message]:
    for part in _tools(step):
        state = part.get("state") or {}
        yield tool_result(part.get("callID"), text_of(state.get("output", state.get("error"))))


def _tools(step: Sequence[_Object]) -> list[_Object]:
    return [part for part in step if part.get("type") == "tool" and part.get("tool")]
