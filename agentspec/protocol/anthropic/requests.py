"""Reads the bodies of `/v1/messages` and `/v1/messages/count_tokens` as bodies of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from agentspec.errors import InvalidRequestError
from agentspec.protocol.forms import parse_format
from agentspec.protocol.messages import without_past_thoughts
from agentspec.protocol.requests import EFFORTS, MAX_MESSAGES, MAX_TOOLS, SAMPLED, SamplingFields
from agentspec.protocol.tools import ToolNames, key_of
from agentspec.protocol.validation import (
    INERT,
    REQUIRED,
    TEXT,
    Body,
    Closed,
    Count,
    Model,
    Refused,
    Text,
    Texts,
    check_json,
    checked_length,
    must,
    one_of,
    read_one,
    read_parts,
    validated,
)

# Fields of chats that mean the same here; what a model or an upstream does not know, it refuses itself.
PASSED = SAMPLED | frozenset(
    "stream prediction chat_template_kwargs cache_salt vllm_xargs priority session_id prompt_cache_key".split()
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
_BETWEEN = "\n\n"  # blocks of a system prompt or of a user's message are texts of their own
_ERROR = "Error: "  # chats have no field for a tool call that failed


class _LaterConfig(Closed):
    """What a system message in the conversation may set."""

    effort: Annotated[Text, one_of(*EFFORTS)] | None = None


class _OutputConfig(_LaterConfig):
    format: dict[str, Any] | None = None


class _Choice(Model):
    type: Annotated[Text, one_of(*_CHOICES)] = REQUIRED
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Model):
    type: Annotated[Text, one_of("enabled", "adaptive", "disabled", "between_tools")] = REQUIRED
    budget_tokens: Count | None = None  # Claude Code sends 0 for none
    display: Annotated[Text, one_of("summarized", "omitted")] | None = None


class MessagesBody(SamplingFields, Body):
    inert: ClassVar[frozenset[str]] = PASSED | INERT
    model: str = ""
    max_tokens: Annotated[Count, must(lambda count: count > 0, " must be at least 1")] | None = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: _Choice | None = None
    stop_sequences: Texts | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()
    output_format: dict[str, Any] | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: Any = None  # what Anthropic's service trims by itself


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """What a request asks for that its chat has no field for.

    `thoughts`: whether the answer may show the model's thoughts; with `omitted` only that there were some.
    `prefilled`: the chat continues its last message. `thinking_budget`: the most tokens of thoughts. `names`: what the
    tools are called in the chat, where it limits names.
    """

    thoughts: bool = True
    omitted: bool = False
    prefilled: bool = False
    thinking_budget: int | None = None
    names: ToolNames = field(default_factory=ToolNames)


def parse_messages(body: Mapping[str, Any], *, templated: bool = True) -> tuple[dict[str, Any], MessagesRequest]:
    """Read a request as the body of a chat completion, and what that has no field for.

    `templated`: a chat template writes the prompt, which may know earlier thoughts and whether to think, and takes any
    name of a tool. Raises `InvalidRequestError` with `param` for a field that is wrong or cannot be honoured.
    """
    fields = MessagesBody.parse(body)
    if fields.max_tokens is None:
        raise InvalidRequestError("max_tokens is missing: the Messages API requires it", param="max_tokens")
    messages, effort = _chat_messages(fields)
    prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if not templated:
        messages = without_past_thoughts(messages)
    thinking = fields.thinking or _Thinking(type="enabled")
    chat = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat |= {"model": fields.model, "messages": messages, "max_tokens": fields.max_tokens}
    chat |= {"stop": [*fields.stop_sequences, *(fields.stop or ())]} if fields.stop_sequences else {}
    chat |= {"continue_final_message": True, "add_generation_prompt": False} if prefilled else {}
    chat |= _tools(fields)
    chat |= {} if effort is None else {"reasoning_effort": EFFORTS[effort] or "none"}
    for name, form in (("output_config.format", fields.output_config.format), ("output_format", fields.output_format)):
        chat |= {} if form is None else parse_format({"strict": True, **form}, name)
    if templated and fields.thinking is not None:  # as templates that know it read it, unless the client says otherwise
        own = fields.chat_template_kwargs or {}
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled", **own}
    return chat, MessagesRequest(
        names=ToolNames() if templated else _limited_names(chat),
        thoughts=thinking.type != "disabled",
        omitted=thinking.display == "omitted",
        prefilled=prefilled,
        thinking_budget=None if thinking.type == "disabled" else thinking.budget_tokens or None,
    )


class MessagesTool(Closed):
    """A function; it is shown even with `defer_loading`, which is for a search that only Anthropic's servers do."""

    inert: ClassVar[frozenset[str]] = frozenset("type cache_control defer_loading eager_input_streaming".split())
    name: Text = REQUIRED
    description: Text | None = None
    input_schema: dict[str, Any] = REQUIRED
    strict: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: Annotated[list[Any], must(lambda names: "direct" in names, " must hold 'direct'")] | None = None

    def function(self) -> dict[str, Any]:
        """The tool as chats have it. JSON Schema has a place of its own for examples."""
        examples = {"examples": self.input_examples} if self.input_examples else {}
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": {**self.input_schema, **examples}}
        return {"type": "function", "function": {**function, **({"strict": True} if self.strict else {})}}


def _tools(fields: MessagesBody) -> dict[str, Any]:
    """The fields of a chat that offer the tools and choose among them."""
    given = checked_length(fields.tools or [], "tools", MAX_TOOLS)
    check_json(given, "tools")
    tools = [read_one(_typed(tool), f"tools[{at}]", {"custom": MessagesTool}) for at, tool in enumerate(given)]
    choice = fields.tool_choice or _Choice(type="auto")
    if not tools:
        if choice.type in ("any", "tool"):
            raise InvalidRequestError("tool_choice asks for a tool, and tools has none", param="tool_choice")
        return {}
    chosen: Any = _CHOICES[choice.type]
    if chosen == "tool":
        chosen = {"type": "function", "function": {"name": validated(TEXT, choice.name, "tool_choice.name")}}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    named = {} if fields.tool_choice is None else {"tool_choice": chosen}
    return {"tools": [tool.function() for tool in tools], **named, **parallel}


def _typed(tool: Any) -> Any:
    """`tool` with the type that one without a type has."""
    return {**tool, "type": "custom"} if isinstance(tool, dict) and tool.get("type") is None else tool


def _limited_names(chat: Mapping[str, Any]) -> ToolNames:
    """Call the tools of `chat` as every server can, those in its conversation too; says what each name stands for."""
    offered = [tool["function"] for tool in chat.get("tools", ())]
    called = [call["function"] for message in chat["messages"] for call in message.get("tool_calls", ())]
    choice = chat.get("tool_choice")
    chosen = [choice["function"]] if isinstance(choice, dict) else []
    names = ToolNames.of(key_of(function["name"], None) for function in offered)
    for function in (*offered, *called, *chosen):
        function["name"] = names.of_key(key_of(function["name"], None))
    return names


class Block(Closed):
    inert: ClassVar[frozenset[str]] = frozenset(
        "type cache_control citations caller toolset_name transformations".split()
    )


class _Shown(Block):
    """A block that is a part of a chat message."""

    def part(self) -> dict[str, Any]:
        raise NotImplementedError


class _TextBlock(_Shown):
    text: Text = REQUIRED

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class _ReferenceBlock(_Shown):
    """A tool that a search has found. All tools are shown anyway."""

    tool_name: Text = REQUIRED

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.tool_name}


class _Source(Model):
    """An image, which only an upstream can look at; a file of Anthropic's is nowhere else."""

    type: Annotated[Text, one_of("base64", "url")] = REQUIRED
    url: Text | None = None
    data: Text | None = None
    media_type: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.url is None and None in (self.data, self.media_type):
            raise Refused(" must hold a url, or data and media_type")
        return self


class _ImageBlock(_Shown):
    source: _Source = REQUIRED

    def part(self) -> dict[str, Any]:
        source = self.source
        url = source.url or f"data:{source.media_type};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


_Passages = Annotated[
    list[_TextBlock], BeforeValidator(lambda value: [{"text": value}] if isinstance(value, str) else value)
]


class _Written(Model):
    """A document's own text, or its blocks."""

    type: Annotated[Text, must(("text", "content").__contains__, " must be text or content: PDFs are not read")] = (
        REQUIRED
    )
    data: Text = ""
    content: _Passages = Field(default=[])


class _DocumentBlock(_Shown):
    source: _Written = REQUIRED
    title: Text | None = None
    context: Text | None = None

    def part(self) -> dict[str, Any]:
        passages = [self.source.data, *(one.text for one in self.source.content)]
        return {"type": "text", "text": "\n".join(filter(None, (self.title, self.context, *passages)))}


class _SearchResult(_Shown):
    """Passages that the client has found."""

    source: Text = REQUIRED
    title: Text = REQUIRED
    content: _Passages = REQUIRED

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": "\n".join((self.title, self.source, *(one.text for one in self.content)))}


class _ThinkingBlock(Block):
    thinking: Text = REQUIRED
    signature: Any = None


class _RedactedBlock(Block):
    """Thoughts that only their author can read. They are left out."""

    data: Any = None


class _ToolUse(Block):
    id: Text = REQUIRED
    name: Text = REQUIRED
    input: dict[str, Any] = REQUIRED

    def call(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class _ToolResult(Block):
    tool_use_id: Text = REQUIRED
    content: Any = ""
    is_error: bool | None = None


_TEXTS: dict[str, type[Block]] = {"text": _TextBlock, "tool_reference": _ReferenceBlock}
_RESULT: dict[str, type[Block]] = {
    **_TEXTS,
    "image": _ImageBlock,
    "document": _DocumentBlock,
    "search_result": _SearchResult,
}
SAID: dict[str, type[Block]] = {**_RESULT, "tool_result": _ToolResult}
WRITTEN: dict[str, type[Block]] = {
    **_TEXTS,
    "thinking": _ThinkingBlock,
    "redacted_thinking": _RedactedBlock,
    "tool_use": _ToolUse,
}


def _parts(value: Any, name: str, kinds: Mapping[str, type[Block]]) -> list[dict[str, Any]]:
    return [block.part() for block in read_parts(value, name, kinds) if isinstance(block, _Shown)]


def _texts(parts: Sequence[dict[str, Any]], between: str) -> str:
    return between.join(part["text"] for part in parts if part["type"] == "text")


class _Turn(Closed):
    inert: ClassVar[frozenset[str]] = frozenset({"role"})
    content: Any = None

    def chats(self, name: str) -> Iterator[dict[str, Any]]:
        """The messages of a chat that this one, the field `name`, becomes."""
        raise NotImplementedError


class _SystemTurn(_Turn):
    """One without content only sets the effort."""

    output_config: _LaterConfig | None = None

    def chats(self, name: str) -> Iterator[dict[str, Any]]:
        parts = _parts(self.content, f"{name}.content", _TEXTS)
        if parts or self.output_config is None:
            yield {"role": "system", "content": _texts(parts, _BETWEEN)}


class _UserTurn(_Turn):
    """Results of tools are messages of their own, in order; the texts and images between them are the user's.

    Images of a result follow it as the user's, since a chat's tool messages carry text alone.
    """

    def chats(self, name: str) -> Iterator[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        blocks = read_parts(self.content, f"{name}.content", SAID)
        for index, block in enumerate(blocks):
            if isinstance(block, _Shown):
                said.append(block.part())
            elif isinstance(block, _ToolResult):
                if any(part["type"] == "text" for part in said):
                    yield _user(said)
                    said = []
                parts = _parts(block.content, f"{name}.content[{index}].content", _RESULT)
                text = (_ERROR if block.is_error else "") + _texts(parts, "\n")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
                said += [part for part in parts if part["type"] != "text"]
        if said or not blocks:
            yield _user(said)


def _user(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A user's message, of plain text where there is nothing else."""
    plain = all(part["type"] == "text" for part in parts)
    return {"role": "user", "content": _texts(parts, _BETWEEN) if plain else parts}


class _AssistantTurn(_Turn):
    """An earlier answer of the model."""

    def chats(self, name: str) -> Iterator[dict[str, Any]]:
        blocks = read_parts(self.content, f"{name}.content", WRITTEN)
        for index, block in enumerate(blocks):
            if isinstance(block, _ToolUse):
                check_json(block.input, f"{name}.content[{index}].input")
        text = _texts([block.part() for block in blocks if isinstance(block, _Shown)], "")
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock))
        calls = [block.call() for block in blocks if isinstance(block, _ToolUse)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        yield message | ({"tool_calls": calls} if calls else {})


# Claude Code marks messages that it inserts itself with roles of its own.
_TURNS: dict[str, type[_Turn]] = {
    "user": _UserTurn,
    "assistant": _AssistantTurn,
    "system": _SystemTurn,
    "ctx": _UserTurn,
    "msg": _UserTurn,
}


def _chat_messages(fields: MessagesBody) -> tuple[list[dict[str, Any]], str | None]:
    """The messages of the chat, and the effort that the request or a later system message in it asks for."""
    given = checked_length(fields.messages, "messages", MAX_MESSAGES)
    turns = [read_one(turn, f"messages[{at}]", _TURNS, "role") for at, turn in enumerate(given)]
    chats = [chat for at, turn in enumerate(turns) for chat in turn.chats(f"messages[{at}]")]
    if not chats:
        raise InvalidRequestError("messages must hold at least one message with content", param="messages")
    if system := _texts(_parts(fields.system or [], "system", _TEXTS), _BETWEEN):
        chats.insert(0, {"role": "system", "content": system})
    later = [turn.output_config for turn in turns if isinstance(turn, _SystemTurn) and turn.output_config]
    configs = [fields.output_config, *later]
    return chats, next((config.effort for config in reversed(configs) if config.effort), None)
