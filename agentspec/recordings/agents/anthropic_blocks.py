"""Reads messages made of content blocks, as Anthropic's Messages API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.recordings.agents.turns import answer, text_of, tool_call, tool_result
from agentspec.recordings.calls import RecordedCall
from agentspec.types import Labels, Message

CUT = ("max_tokens", "model_context_window_exceeded")


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


def logged_call(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> RecordedCall:
    """A logged request and response of `/v1/messages`."""
    messages: list[Message] = []
    if request.get("system"):
        messages.append({"role": "system", "content": text_of(request["system"])})
    for message in request.get("messages") or []:
        messages += messages_of(message["role"], message["content"])
    finished = response.get("stop_reason") not in CUT
    return RecordedCall(place, Labels(), messages, answer_of(response["content"]), finished=finished)
