"""Reads conversations made of items, as OpenAI's Responses API has them: its logged calls, and the sessions that Codex
keeps in `~/.codex/sessions`, an item a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.protocol.openai_responses.items import ARGUMENT
from agentspec.protocol.tools import ToolNames, key_of
from agentspec.recordings.calls import (
    OnBad,
    RecordedCall,
    Turn,
    answer,
    calls_of,
    moment,
    records,
    seconds_in,
    text_of,
    tool_call,
    tool_result,
)
from agentspec.types import Labels, Message


@dataclass(frozen=True, slots=True)
class Item:
    """An item with its place and its time. `said` is false if it was not written there, but repeated."""

    value: Mapping[str, Any]
    place: str
    at: float | None = None
    said: bool = True


@dataclass(slots=True)
class _ModelItems:
    """What one response of the model consists of, so far."""

    place: str
    at: float | None
    said: bool
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)

    def add(self, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self.texts.append(text_of(item.get("content")))
        elif kind == "reasoning":  # a summary was not written by the model that answered
            self.thoughts.append(text_of(item.get("content") or []))
        else:
            given = next((item[name] for name in ("arguments", "input", "action") if item.get(name) is not None), None)
            if kind == "custom_tool_call":
                given = {ARGUMENT: given}  # as the model wrote it
            self.calls.append(tool_call(item.get("call_id") or item.get("id"), _chat_name(item, str(kind)), given))

    def turn(self) -> Turn:
        message = answer("".join(self.texts), "".join(self.thoughts), self.calls)
        return Turn(message, self.place, self.at, said=self.said)


def _chat_name(item: Mapping[str, Any], kind: str) -> str:
    """The tool's name as the gateway shows it to a model."""
    name, namespace = item.get("name"), item.get("namespace")
    if not name:
        return kind.removesuffix("_call")
    return ToolNames().of_key(key_of(str(name), str(namespace) if namespace else None))


def turns_of(items: Iterable[Item]) -> Iterator[Turn]:
    """The turns of a conversation; items of the model that follow each other are one answer."""
    written: _ModelItems | None = None
    for item in items:
        kind = str(item.value.get("type", "message"))
        spoken = kind == "message" and item.value.get("role") == "assistant"
        is_models = spoken or kind == "reasoning" or kind.endswith("_call")
        if written is not None and not (is_models and item.said is written.said):
            yield written.turn()
            written = None
        if is_models:
            written = written or _ModelItems(item.place, item.at, item.said)
            written.add(item.value)
            continue
        if kind == "message":
            role = "system" if (role := str(item.value.get("role"))) == "developer" else role
            yield Turn({"role": role, "content": text_of(item.value.get("content"))}, item.place, item.at)
        elif kind.endswith("_output"):
            yield Turn(tool_result(item.value.get("call_id"), _result(item.value)), item.place, item.at)
    if written is not None:
        yield written.turn()


def _result(item: Mapping[str, Any]) -> str:
    """What a tool answered; a search for tools, which tools it found."""
    if item.get("type") != "tool_search_output":
        return text_of(item.get("output"))
    return json.dumps(item.get("tools"), ensure_ascii=False)


def logged_response(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> Iterator[RecordedCall]:
    """A logged request and response of `/v1/responses`; nothing if the response holds no answer."""
    given = request.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if request.get("instructions"):
        items = [{"role": "system", "content": request["instructions"]}, *items]
    messages = [turn.message for turn in turns_of(Item(item, place) for item in items)]
    at = seconds_in(response.get("created_at"))
    for turn in turns_of(Item(item, place) for item in response["output"]):
        finished = response.get("status") != "incomplete"
        yield RecordedCall(
            place, Labels(), messages, turn.message, finished=finished, created_at=at, id=response.get("id")
        )


def read_codex(path: Path, on_bad: OnBad) -> Iterator[RecordedCall]:
    """Every answer of a session."""
    session, contexts = path.stem, [list[Item]()]
    for place, record in records(path, on_bad):
        kind, payload = record.get("type"), record.get("payload") or {}
        if kind == "session_meta":
            session = str(payload.get("id") or session)
            contexts[-1] += _instructions(payload, place)
        elif kind == "compacted":
            contexts.append(_replacement(payload, place))
        elif kind == "response_item":
            contexts[-1].append(Item(payload, place, moment(record.get("timestamp"))))
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
