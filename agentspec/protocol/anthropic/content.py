"""The messages of a Messages request, whose contents are blocks, as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_values import check_json
from agentspec.protocol.validation import NOT_TEXT, is_text, refuse_unknown, shown_name, wrong_type

# Claude Code marks messages that it inserts itself with roles of its own.
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
_BETWEEN = "\n\n"  # blocks of a system prompt or of a user's message are texts of their own
_ERROR = "Error: "  # chats have no field for a tool call that failed
_INERT = {"cache_control", "citations", "caller", "toolset_name", "transformations"}
_FIELDS = {
    "text": {"text"},
    "image": {"source"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_IN_RESULT = ("text", "image")

Block = Mapping[str, Any]


def system_text(value: Any, name: str) -> str:
    """The text of a system prompt: a string, or text blocks."""
    return _BETWEEN.join(block["text"] for block in _blocks(value, name, _OF_ROLE["system"]))


def chat_messages(value: Any, *, images: bool, most: int) -> list[dict[str, Any]]:
    """The field `messages` as the messages of a chat. `images` says whether the model may be sent any.

    A message with tool results becomes several, one that only sets the effort (`output_config`) none. Raises
    `InvalidRequestError` whose `param` is the place in `value`.
    """
    if not isinstance(value, list):
        raise wrong_type("messages", "an array", value)
    if not value:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    if len(value) > most:
        raise InvalidRequestError(f"messages has {len(value)} entries; {most} are allowed", param="messages")
    chats = [chat for index, one in enumerate(value) for chat in _message(one, f"messages[{index}]", images)]
    if not chats:
        raise InvalidRequestError("messages must hold at least one message with content", param="messages")
    return chats


def _message(value: Any, name: str, images: bool) -> Iterator[dict[str, Any]]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"{name}.role must be user, assistant or system", param=f"{name}.role")
    role = _ROLES[role]
    configures = role == "system" and value.get("output_config") is not None
    refuse_unknown(value, {"role", "content", *(("output_config",) if configures else ())}, name)
    kinds = _OF_ROLE[role] if images else tuple(kind for kind in _OF_ROLE[role] if kind != "image")
    blocks = list(_blocks(value.get("content"), f"{name}.content", kinds))
    if role == "assistant":
        yield _assistant(blocks)
    elif role == "system" and (blocks or not configures):
        yield {"role": "system", "content": _BETWEEN.join(block["text"] for block in blocks)}
    elif role == "user":
        yield from _user(blocks, name, images)


def _user(blocks: Sequence[Block], name: str, images: bool) -> Iterator[dict[str, Any]]:
    """The results of tools each as a message of their own, in order; the texts and images between them as the user's.

    Images of a result follow it as the user's, since a chat's tool messages carry text alone.
    """
    said: list[Block] = []
    for index, block in enumerate(blocks):
        if block["type"] != "tool_result":
            said.append(block)
            continue
        if any(one["type"] == "text" for one in said):
            yield _message_of(said)
            said = []
        kinds = _IN_RESULT if images else ("text",)
        parts = list(_blocks(block.get("content", ""), f"{name}.content[{index}].content", kinds))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        failed = _ERROR if block.get("is_error") else ""
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": failed + text}
        said += [part for part in parts if part["type"] == "image"]
    if said or not blocks:
        yield _message_of(said)


def _message_of(blocks: Sequence[Block]) -> dict[str, Any]:
    if all(block["type"] == "text" for block in blocks):
        return {"role": "user", "content": _BETWEEN.join(block["text"] for block in blocks)}
    return {"role": "user", "content": [_part(block) for block in blocks]}


def _part(block: Block) -> dict[str, Any]:
    """A text or an image as a part of a chat message."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    """An answer of the model. Redacted thoughts can be read by nobody but their author, and are left out."""
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _blocks(value: Any, name: str, kinds: Sequence[str]) -> Iterator[Block]:
    """The content blocks in `value`, a string or an array of blocks whose types are among `kinds`."""
    if isinstance(value, str):
        yield {"type": "text", "text": _text(value, name)}
        return
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of content blocks", value)
    for index, block in enumerate(value):
        yield _checked(block, f"{name}[{index}]", kinds)


def _checked(block: Any, name: str, kinds: Sequence[str]) -> Block:
    if not isinstance(block, dict):
        raise wrong_type(name, "an object", block)
    kind = block.get("type")
    if kind == "tool_reference" and "text" in kinds:  # a tool that a search has found; all tools are shown anyway
        return {"type": "text", "text": _string(block, "tool_name", name)}
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        shown = shown_name(kind) if isinstance(kind, str) else "?"
        what = "images are not read by this model" if kind == "image" else f"a block of type {shown!r} is not supported"
        raise InvalidRequestError(f"{name}: {what} here; known: {known}", param=f"{name}.type")
    refuse_unknown(block, _FIELDS[kind] | _INERT | {"type"}, name)
    _check_fields(block, kind, name)
    return block


def _check_fields(block: Block, kind: str, name: str) -> None:
    if kind in ("text", "thinking"):
        _string(block, kind, name)
    elif kind == "tool_use":
        _string(block, "id", name)
        _string(block, "name", name)
        if not isinstance(block.get("input"), dict):
            raise wrong_type(f"{name}.input", "an object", block.get("input"))
        check_json(block["input"], f"{name}.input")
    elif kind == "tool_result":
        _string(block, "tool_use_id", name)
        if not isinstance(block.get("is_error"), (bool, type(None))):
            raise wrong_type(f"{name}.is_error", "a boolean", block["is_error"])
    elif kind == "image":
        _check_source(block.get("source"), f"{name}.source")


def _check_source(source: Any, name: str) -> None:
    """An image in the request itself, or one that the upstream fetches; a file of Anthropic's is nowhere else."""
    if not isinstance(source, dict):
        raise wrong_type(name, "an object", source)
    kind = source.get("type")
    if kind == "url":
        _string(source, "url", name)
    elif kind == "base64":
        _string(source, "data", name)
        _string(source, "media_type", name)
    else:
        raise InvalidRequestError(f"{name}.type must be base64 or url", param=f"{name}.type")


def _string(block: Block, field: str, name: str) -> str:
    return _text(block.get(field), f"{name}.{field}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if not is_text(value):
        raise InvalidRequestError(f"{name}{NOT_TEXT}", param=name)
    return value
