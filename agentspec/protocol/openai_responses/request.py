"""Parses the bodies of `/v1/responses`, and turns them into the bodies of chat requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentspec.errors import InvalidRequestError
from agentspec.protocol.forms import parse_format
from agentspec.protocol.openai_responses.items import (
    ADDITIONAL_TOOLS,
    CALL_OUTPUTS,
    CALLS,
    COMPACTION,
    MAX_ID,
    ClientTool,
    Item,
    added_tools,
    allowed_tools,
    as_arguments,
    chat_tools,
    client_tools,
    offered_tools,
    parse_input,
    summary_of,
)
from agentspec.protocol.requests import EFFORTS, MAX_TOOLS, SAMPLED, SamplingFields, check_stream_options
from agentspec.protocol.tools import ToolNames, key_of
from agentspec.protocol.validation import INERT, Body, Closed, Count, Text, must, one_of, only

_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class Conversation:
    """The messages of a chat request.

    `names` has the names of the tools in the chat, and learns those of tools that were called and are not offered.
    """

    names: ToolNames = field(default_factory=ToolNames)
    messages: list[dict[str, Any]] = field(default_factory=list)
    _called: set[str] = field(default_factory=set)

    def add_all(self, items: Iterable[Item], *, first_new: int = 0) -> None:
        """Add the items in order; those from `first_new` on are the request's own `input`.

        Raises `InvalidRequestError` for the result of a call that is not in the conversation.
        """
        for index, item in enumerate(items, start=-first_new):
            kind = item["type"]
            if kind == ADDITIONAL_TOOLS:
                continue  # says nothing, and offers tools
            if kind == COMPACTION:
                self._add({"role": "user", "content": f"Summary of the conversation so far:\n\n{summary_of(item)}"})
            elif kind in CALL_OUTPUTS:
                self._add_output(item, index)
            elif kind != "message" or item["role"] == "assistant":
                self._add_written(item)
            else:
                role = "system" if item["role"] in _SYSTEM else "user"
                self._add({"role": role, "content": _content(item["content"])})

    def instruct(self, text: str) -> None:
        """Put instructions before everything."""
        self._add({"role": "system", "content": text})

    def _add(self, message: dict[str, Any]) -> None:
        first = self.messages[0] if len(self.messages) == 1 else {}
        texts = isinstance(first.get("content"), str) and isinstance(message["content"], str)
        if texts and first["role"] == message["role"] == "system":  # templates take one, at the beginning
            first["content"] += f"\n\n{message['content']}"
        else:
            self.messages.append(message)

    def _add_output(self, item: Item, index: int) -> None:
        if item["call_id"] not in self._called:
            name = f"input[{index}].call_id"
            raise InvalidRequestError(f"{name} names no tool call of this conversation", param=name)
        content = _joined(item["output"])
        self._add({"role": "tool", "tool_call_id": item["call_id"], "content": content})

    def _function(self, item: Item) -> dict[str, Any]:
        """A call as chats have it."""
        written = as_arguments(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
        return {"name": self.names.of_key(key_of(item["name"], item.get("namespace"))), "arguments": written}

    def _add_written(self, item: Item) -> None:
        """Add a thought, a message or a call of the model: one message of a chat has all that belong together."""
        if item["type"] == "reasoning" and not _thoughts(item):
            return  # some clients send back that there were thoughts, but not which
        turn = self.messages[-1] if self.messages else {}
        if turn.get("role") != "assistant" or _begins_new_turn(item["type"], turn):
            turn = {"role": "assistant", "content": None}
            self._add(turn)
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


def _begins_new_turn(kind: str, turn: dict[str, Any]) -> bool:
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


def _chat_part(part: Item) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
    return {"type": "text", "text": _text_of(part)}


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(_text_of(part) for part in content)


def _text_of(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part.get("text", ""))


_Summary = Annotated[Text, one_of("auto", "concise", "detailed")]
_WHOLE = " must be disabled: send a conversation that fits the model"
# Of vLLM and of chats: they mean here what they mean there, and are checked there.
_AS_IN_CHATS = (
    *SAMPLED,
    *("prediction", "chat_template_kwargs", "parallel_tool_calls", "user"),
)
_REPEATED = (  # in the answer, as they are
    "instructions max_output_tokens max_tool_calls model previous_response_id prompt_cache_key safety_identifier"
    " temperature top_logprobs top_p truncation user".split()
)
_RENAMED = {"max_tokens": "max_output_tokens", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function\b)?(.*)")


def _refuse(advice: str) -> Any:
    return must(lambda _: False, advice)


class _TextConfig(Closed):
    format: Any = None
    verbosity: Annotated[Text, one_of("low", "medium", "high")] | None = None


class _Reasoning(Closed):
    effort: Annotated[Text, one_of(*EFFORTS)] | None = None
    summary: _Summary | None = None
    generate_summary: _Summary | None = None
    context: Annotated[Text, one_of("auto", "all_turns")] | None = None  # the thoughts of all turns are shown
    mode: Annotated[Text, one_of("standard")] | None = None


class _ResponsesStreamOptions(Closed):
    include_obfuscation: Annotated[Any, only(False)] = None


_Metadata = Annotated[  # bounds of OpenAI's
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]


class _ResponsesBody(SamplingFields, Body):
    """The fields of a request. `input` and `tools` are read by `items.py` and `tools.py`."""

    inert: ClassVar[frozenset[str]] = INERT | {*_AS_IN_CHATS}
    model: Text = ""
    input: Any = None
    instructions: Text | None = None
    previous_response_id: Annotated[Text, must(lambda text: 0 < len(text) <= MAX_ID, " is no id")] | None = None
    stream: bool = False
    store: bool = True
    max_output_tokens: Annotated[Count, must(lambda count: count > 0, " must be at least 1")] | None = None
    max_tool_calls: Count | None = None  # of hosted tools, of which there are none
    metadata: _Metadata | None = None
    include: list[Annotated[Text, one_of("reasoning.encrypted_content")]] | None = None
    top_logprobs: Annotated[Count, must(lambda count: count == 0, " must be 0: chats report probabilities")] = 0
    truncation: Annotated[Text, must(lambda one: one == "disabled", _WHOLE)] = "disabled"
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig = _TextConfig()
    reasoning: _Reasoning = _Reasoning()
    stream_options: _ResponsesStreamOptions = _ResponsesStreamOptions()
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex' own settings
    background: Annotated[Any, only(False)] = None
    conversation: Annotated[Any, _refuse(" is not stored here; use previous_response_id")] = None
    prompt: Annotated[Any, _refuse(" templates are not stored here; send instructions and input")] = None
    context_management: Annotated[Any, only([])] = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request that was read. `items` is its own input; `fields` are the parts that the answer repeats.

    `store` and `previous` (an id) are what the client wishes. `chat` has the fields of the chat request besides its
    messages, `tools` are those in it, as the client names them, and `names` what they are called in it.
    """

    items: list[Item]
    fields: Mapping[str, Any]
    chat: Mapping[str, Any]
    tools: Sequence[ClientTool]
    names: ToolNames
    instructions: str | None
    previous: str | None
    store: bool

    def messages(self, history: Sequence[Item] = ()) -> list[dict[str, Any]]:
        """The messages of instructions, the items of earlier responses, and this request. Raises as `parse_input`."""
        made = Conversation(self.names)
        if self.instructions:
            made.instruct(self.instructions)
        made.add_all([*history, *self.items], first_new=len(history))
        if not (messages := made.finish()):
            raise InvalidRequestError("input must hold at least one item", param="input")
        return messages

    def own_name(self, param: str) -> str:
        """The name in this request of the field that its chat calls `param`; all of its messages are the `input`."""
        if param.startswith("messages"):
            return "input"
        if (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self.tools):
            tool = self.tools[int(found[1])]
            custom = tool.kind == "custom" and found[2].startswith(".parameters")
            return f"{tool.param}.format" if custom else tool.param + found[2]
        param = param.replace("response_format.json_schema", "text.format")
        head, dot, rest = param.partition(".")
        return _RENAMED.get(head, head) + dot + rest


def parse_responses(body: Mapping[str, Any], history: Sequence[Item] = ()) -> ResponsesRequest:
    """Parse a request after the items of the earlier responses that it continues, which may bring tools.

    Raises `InvalidRequestError` with `param` for a field that is wrong or unsupported.
    """
    fields = _ResponsesBody.parse(body)
    if fields.input is None and fields.previous_response_id is None:
        raise InvalidRequestError("input is missing", param="input")
    items = parse_input([] if fields.input is None else fields.input)
    check_stream_options(fields.stream_options, stream=fields.stream)
    declared, own = client_tools(fields.tools or []), added_tools(items, "input[{}]")
    tools = offered_tools([*declared, *added_tools(history, "previous_response_id"), *own])
    names = ToolNames.of(tool.key for tool in tools)
    chat = {name: body[name] for name in _AS_IN_CHATS if body.get(name) is not None} | _chat(fields)
    if fields.tool_choice is not None:
        chosen, tools = allowed_tools(fields.tool_choice, tools)
        chat["tool_choice"] = chosen
        if isinstance(chosen, ClientTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": names.of_key(chosen.key)}}
    if tools:
        chat["tools"] = chat_tools(tools, names)
    else:  # without tools these say nothing, and chats refuse them
        chat.pop("parallel_tool_calls", None)
        if chat.get("tool_choice") in ("auto", "none"):
            del chat["tool_choice"]
    return ResponsesRequest(
        items=items,
        fields=_repeated(fields, body),
        chat=chat,
        tools=tools,
        names=names,
        instructions=fields.instructions,
        previous=fields.previous_response_id,
        store=fields.store,
    )


def _chat(fields: _ResponsesBody) -> dict[str, Any]:
    """The fields of the chat request that have other names there, besides messages and tools."""
    chat: dict[str, Any] = {"model": fields.model, **fields.text.given("verbosity")}
    if fields.max_output_tokens is not None:
        chat["max_tokens"] = fields.max_output_tokens
    if fields.text.format is not None:
        chat |= parse_format(fields.text.format, "text.format")
    return chat if fields.reasoning.effort is None else {**chat, "reasoning_effort": fields.reasoning.effort}


def _repeated(fields: _ResponsesBody, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer says about the request."""
    text = body.get("text") or {}
    return {
        **{name: getattr(fields, name) for name in _REPEATED},
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": fields.reasoning.effort, "summary": fields.reasoning.summary},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": fields.tools or [],
    }
