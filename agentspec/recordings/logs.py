"""Parses lines of traces, of logged requests with responses, and of conversations for fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentspec.recordings.agents import anthropic_blocks, response_items
from agentspec.recordings.calls import BadLineError, RecordedCall, seconds_in
from agentspec.types import Labels, Message


class Traces:
    """Keeps each session's messages: a line holds the messages added since, and `reset` starts an empty history."""

    def __init__(self) -> None:
        self._history: dict[str, list[Message]] = {}

    def parse(self, record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
        session, added, answer = str(record["session"]), _messages(record["messages_delta"]), record["response"]
        if not isinstance(answer, str):
            raise TypeError("response must be a string")
        history = [] if record.get("reset") else self._history.get(session, [])
        message = {"role": "assistant", "content": answer}
        yield RecordedCall(place, _labels(record, session), [*history, *added], message)
        self._history[session] = [*history, *added, message]


def parse_chat(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """Every assistant message of a conversation as the answer to the messages before it."""
    messages = _messages(record["messages"])
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadLineError(place, "no message of role assistant")
    for number in answers:
        yield RecordedCall(place, _labels(record, Path(place).name), messages[:number], messages[number])


def parse_log(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """The calls of a request and its response, each of which is the body itself or, as in batches, an object with it.

    The request may be missing, as in the output of a batch; its answers are then read without messages before them.
    """
    request, response = _body(record.get("request", record)), _body(record.get("response", record))
    metadata = {**(request.get("metadata") or {}), **(record.get("metadata") or {}), **record}
    labels = _labels(metadata, str(record.get("custom_id") or Path(place).name))
    for call in _logged(request, response, place):
        yield replace(call, labels=labels)


def _logged(request: Any, response: Any, place: str) -> Iterator[RecordedCall]:
    """The answers of a response of any of the three APIs; they are told apart by the response's own fields."""
    if isinstance(response, str):
        response = {"choices": [{"message": {"role": "assistant", "content": response}}]}
    if response.get("choices"):
        yield from _chat_choices(request, response, place)
    elif isinstance(response.get("output"), list):
        yield from response_items.logged_call(request, response, place)
    elif response.get("type") == "message" and isinstance(response.get("content"), list):
        yield anthropic_blocks.logged_call(request, response, place)
    else:
        raise BadLineError(place, "no answer in the response")


def _chat_choices(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> Iterator[RecordedCall]:
    messages, prompt = _messages(request.get("messages") or []), request.get("prompt")
    for choice in response["choices"]:
        answered = choice["message"] if "message" in choice else {"content": choice["text"]}
        message = _message({"role": "assistant", **answered})
        yield RecordedCall(
            place,
            Labels(),
            messages,
            message,
            prompt if isinstance(prompt, str) else None,
            finished=choice.get("finish_reason") != "length",
            created_at=seconds_in(response.get("created")),
        )


def _body(value: Any) -> Any:
    return value["body"] if isinstance(value, dict) and isinstance(value.get("body"), dict) else value


def _labels(record: Mapping[str, Any], session: str) -> Labels:
    named = (record.get(name) for name in ("session", "workflow", "step"))
    given = [str(value) if isinstance(value, str | int) and value != "" else None for value in named]
    return Labels(given[0] or session, given[1], given[2])


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise TypeError("messages must be an array")
    return [_message(message) for message in value]


def _message(value: Any) -> Message:
    """A message that every reader can take. Raises `TypeError` for another shape."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise TypeError("a message must be an object with a role")
    if not isinstance(value.get("content"), str | list | None):
        raise TypeError("a message's content must be a string or an array")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TypeError("a message's tool_calls must be an array of objects")
    return value
