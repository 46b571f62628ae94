"""Turns the items of a conversation into the messages of a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.items import ADDITIONAL_TOOLS, CALL_OUTPUTS, CALLS, Item
from agentspec.protocol.openai_responses.tool_input import as_arguments
from agentspec.protocol.tool_names import ToolNames, key_of

_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class Conversation:
    """The messages of a chat request; `origins` has for each the position of its first item, -1 for instructions.

    `names` has the names of the tools in the chat, and learns those of tools that were called and are not offered.
    """

    names: ToolNames = field(default_factory=ToolNames)
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    _called: set[str] = field(default_factory=set)

    def add_all(self, items: Iterable[Item], *, first_new: int = 0) -> None:
        """Add the items in order; those from `first_new` on are the request's own `input`.

        Raises `InvalidRequestError` for the result of a call that nobody made.
        """
        for position, item in enumerate(items):
            kind = item["type"]
            if kind == ADDITIONAL_TOOLS:
                continue  # says nothing, and offers tools
            if kind in CALL_OUTPUTS:
                self._add_output(item, position, position - first_new)
            elif kind != "message" or item["role"] == "assistant":
                self._add_written(item, position)
            else:
                role = "system" if item["role"] in _SYSTEM else "user"
                self._add({"role": role, "content": _content(item["content"])}, position)

    def instruct(self, text: str) -> None:
        """Put instructions before everything."""
        self._add({"role": "system", "content": text}, -1)

    def _add(self, message: dict[str, Any], position: int) -> None:
        last = self.messages[-1] if self.messages else None
        both_begin = last is not None and len(self.messages) == 1 and last["role"] == message["role"] == "system"
        if both_begin and last is not None:  # templates take one system message, at the beginning
            last["content"] = _together(last["content"], message["content"])
            return
        self.messages.append(message)
        self.origins.append(position)

    def _add_output(self, item: Item, position: int, index: int) -> None:
        if item["call_id"] not in self._called:
            name = f"input[{index}].call_id"
            raise InvalidRequestError(f"{name} names no tool call of this conversation", param=name)
        content = _joined(item["output"])
        self._add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, position)

    def _function(self, item: Item) -> dict[str, Any]:
        """A call as chats have it."""
        written = as_arguments(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
        return {"name": self.names.of_key(key_of(item["name"], item.get("namespace"))), "arguments": written}

    def _add_written(self, item: Item, position: int) -> None:
        """Add a thought, a message or a call of the model: one message of a chat has all that belong together."""
        if item["type"] == "reasoning" and not _thoughts(item):
            return  # some clients send back that there were thoughts, but not which
        turn = self.messages[-1] if self.messages else {}
        if turn.get("role") != "assistant" or _begins_anew(item["type"], turn):
            turn = {"role": "assistant", "content": None}
            self._add(turn, position)
        if item["type"] == "message":
            turn["content"] = (turn["content"] or "") + _joined(item["content"])
        elif item["type"] == "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(item)
        else:
            call = {"id": item["call_id"], "type": "function", "function": self._function(item)}
            turn.setdefault("tool_calls", []).append(call)
            self._called.add(item["call_id"])

    def finish(self) -> list[dict[str, Any]]:
        """The messages. A turn of thoughts alone has empty text."""
        for message in self.messages:
            if message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return self.messages


def _begins_anew(kind: str, turn: dict[str, Any]) -> bool:
    """Whether an item of this kind cannot belong to the turn: a turn is thoughts, then text, then calls.

    What was written after a call does, since in a chat nothing may stand between a call and its result.
    """
    return kind not in CALLS and "tool_calls" not in turn and turn["content"] is not None


def _thoughts(item: Item) -> str:
    return "".join(one["text"] for one in item["content"] or item["summary"])


def _content(parts: Sequence[Item]) -> Any:
    """The content of a user's message: plain text as a string, with media as the parts that chats have."""
    if all(part["type"] in ("input_text", "refusal") for part in parts):
        return _joined(parts)
    return [_chat_part(part) for part in parts]


def _together(first: Any, second: Any) -> Any:
    """Two contents as one: text if both are, else the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    both = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second))
    return [part for parts in both for part in parts]


def _chat_part(part: Item) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
    if part["type"] == "input_file":
        return {"type": "file", "file": {key: part[key] for key in ("file_data", "filename") if key in part}}
    return {"type": "text", "text": _text(part)}


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(_text(part) for part in content)


def _text(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part.get("text", ""))
