"""Reads the bodies of `/v1/messages` and `/v1/messages/count_tokens` as bodies of chat completions.

Every field is acted on, known to be inert, or refused by its own name, for local models as for upstreams that answer
chats only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_MESSAGES, MAX_TOOLS, SAMPLED
from agentspec.protocol.tool_names import ToolNames, key_of
from agentspec.protocol.validation import (
    REQUIRED,
    Body,
    Closed,
    Count,
    Model,
    Number,
    Text,
    Texts,
    check_json,
    must,
    shown_name,
    validated,
    wrong_type,
)

# Settings of Anthropic's service: billing, regions, its own cache, what it trims by itself. The answer is the same.
INERT = frozenset(
    "metadata service_tier inference_geo speed diagnostics cache_control context_management user_profile_id"
    " workspace_id anthropic_version anthropic_beta betas".split()
)
# Fields of chats that mean the same here; what a model or an upstream does not know, it refuses itself.
PASSED = SAMPLED - {"stop"} | frozenset(
    "stream prediction latency_target_ms_per_token chat_template_kwargs"
    " cache_salt vllm_xargs priority session_id nvext prompt_cache_key".split()
)
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
_THINKING = ("enabled", "adaptive", "disabled", "between_tools")
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_TEXT: TypeAdapter[str] = TypeAdapter(Text)


class _LaterConfig(Closed):
    """What a system message in the conversation may set."""

    effort: Annotated[Text, must(lambda one: one in _EFFORTS, f" must be one of {', '.join(_EFFORTS)}")] | None = None


class _OutputConfig(_LaterConfig):
    format: dict[str, Any] | None = None


class _Choice(Model):
    type: Annotated[Text, must(lambda one: one in _CHOICES, " must be auto, any, tool or none")] = REQUIRED
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class _MessagesBody(Body):
    """The fields that are read here; messages, tools and `thinking` are read by functions of their own."""

    inert: ClassVar[frozenset[str]] = PASSED | INERT
    model: str = ""
    max_tokens: Annotated[Count, must(lambda count: count > 0, " must be at least 1")] | None = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: _Choice | None = None
    stop_sequences: Texts | None = None
    thinking: Any = None
    output_config: _OutputConfig = _OutputConfig()
    output_format: dict[str, Any] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request as a chat: `chat` is the body of a chat completion, which may continue the last message (`prefilled`).

    `thoughts`: whether the answer may show the model's thoughts; with `omitted` only that there were some.
    `thinking_budget`: the most tokens of thoughts, which chats have no field for. `names`: what the tools are called
    in the chat, where it limits names.
    """

    chat: dict[str, Any]
    stream: bool = False
    thoughts: bool = True
    omitted: bool = False
    prefilled: bool = False
    thinking_budget: int | None = None
    names: ToolNames = field(default_factory=ToolNames)

    def bare(self) -> MessagesRequest:
        """The same without the chat, which a long conversation fills and an answer does not need."""
        return replace(self, chat={})


def parse_messages(
    body: Mapping[str, Any], *, images: bool = False, templated: bool = True, count: bool = False
) -> MessagesRequest:
    """Read a request, or with `count` one to count the tokens of. `images`: whether the model may be sent images.

    `templated`: a chat template writes the prompt, which may know earlier thoughts and whether to think, and takes any
    name of a tool.

    Raises `InvalidRequestError` with `param` for a field that is wrong or cannot be honoured.
    """
    fields = _MessagesBody.parse(body)
    if fields.max_tokens is None and not count:
        raise InvalidRequestError("max_tokens is missing: the Messages API requires it", param="max_tokens")
    messages = chat_messages(fields.messages, images=images)
    prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if fields.system is not None:
        system = system_text(fields.system, "system")
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    if not templated:
        messages = [{name: one[name] for name in one if name != "reasoning_content"} for one in messages]
    thinking = _thinking(fields.thinking)
    chat = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat |= {"model": fields.model, "messages": messages}
    chat |= {} if fields.max_tokens is None else {"max_tokens": fields.max_tokens}
    chat |= {"stop": list(fields.stop_sequences)} if fields.stop_sequences else {}
    chat |= {"continue_final_message": True, "add_generation_prompt": False} if prefilled else {}
    chat |= _tools(fields)
    chat |= _output(fields)
    told = _template_arguments(body, thinking)
    chat |= told if templated else {}
    return MessagesRequest(
        chat,
        names=ToolNames() if templated else limited_names(chat),
        stream=fields.stream,
        thoughts=thinking.get("type") != "disabled",
        omitted=thinking.get("display") == "omitted",
        prefilled=prefilled,
        thinking_budget=None if thinking.get("type") == "disabled" else thinking.get("budget_tokens") or None,
    )


def _tools(fields: _MessagesBody) -> dict[str, Any]:
    tools = chat_tools(fields.tools) if fields.tools is not None else []
    choice = _tool_choice(fields.tool_choice) if fields.tool_choice is not None else {}
    if not tools and choice.get("tool_choice") not in (None, "auto", "none"):
        raise InvalidRequestError("tool_choice asks for a tool, and tools has none", param="tool_choice")
    return {"tools": tools, **choice} if tools else {}


def _tool_choice(choice: _Choice) -> dict[str, Any]:
    """The fields `tool_choice` and `parallel_tool_calls` of a chat."""
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return {"tool_choice": _CHOICES[choice.type], **parallel}
    if choice.name is None:
        raise wrong_type("tool_choice.name", "a string", None)
    return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}


def _output(fields: _MessagesBody) -> dict[str, Any]:
    """`output_config`, and the older `output_format`, as `response_format` and `reasoning_effort`.

    The effort is the last one that a system message in the conversation sets, if one does.
    """
    effort = fields.output_config.effort
    for index, message in enumerate(fields.messages):  # all of them were read: they are objects
        if (later := message.get("output_config")) is not None:
            effort = _LaterConfig.parse(later, f"messages[{index}].output_config").effort or effort
    chat: dict[str, Any] = {} if effort is None else {"reasoning_effort": _EFFORTS[effort]}
    if fields.output_format is not None:
        chat["response_format"] = _response_format(fields.output_format, "output_format")
    elif fields.output_config.format is not None:
        chat["response_format"] = _response_format(fields.output_config.format, "output_config.format")
    return chat


def _response_format(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        raise InvalidRequestError(f"{name}.type must be json_schema", param=f"{name}.type")
    schema = validated(_OBJECT, given.get("schema"), f"{name}.schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _thinking(value: Any) -> Mapping[str, Any]:
    """`thinking`, checked. Local models keep to its budget; elsewhere `max_tokens` alone bounds thoughts."""
    if value is None:
        return {}
    thinking = validated(_OBJECT, value, "thinking")
    if thinking.get("type") not in _THINKING:
        known = ", ".join(_THINKING)
        raise InvalidRequestError(f"thinking.type must be one of {known}", param="thinking.type")
    budget = thinking.get("budget_tokens")
    bounded = thinking["type"] == "enabled" or budget not in (None, 0)  # Claude Code sends 0 for none
    if bounded and (type(budget) is not int or budget < 1):
        raise InvalidRequestError(
            "thinking.budget_tokens must be a whole number above 0", param="thinking.budget_tokens"
        )
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise InvalidRequestError("thinking.display must be summarized or omitted", param="thinking.display")
    return thinking


def _template_arguments(body: Mapping[str, Any], thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Whether to think, as chat templates that know it are told; what the client sets there itself counts."""
    own = body.get("chat_template_kwargs")
    if not isinstance(own, dict | None):  # no matter who reads it: a model here or the tokenizer of an upstream
        raise wrong_type("chat_template_kwargs", "an object", own)
    if not thinking:
        return {}
    return {"chat_template_kwargs": {"enable_thinking": thinking["type"] != "disabled", **(own or {})}}


class _MessagesTool(Closed):
    """A function; it is shown even with `defer_loading`, which is for a search that only Anthropic's servers do."""

    inert: ClassVar[frozenset[str]] = frozenset("type cache_control defer_loading eager_input_streaming".split())
    name: Text = REQUIRED
    description: Text | None = None
    input_schema: dict[str, Any] = REQUIRED
    strict: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[Any] | None = None


def chat_tools(value: Any) -> list[dict[str, Any]]:
    """`tools` as functions. Raises `InvalidRequestError` for a tool of Anthropic's servers, named by its type."""
    if not isinstance(value, list):
        raise wrong_type("tools", "an array", value)
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(value)} entries; {MAX_TOOLS} are allowed", param="tools")
    check_json(value, "tools")
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def limited_names(chat: Mapping[str, Any]) -> ToolNames:
    """Call the tools of `chat` as every server can, those in its conversation too; says what each name stands for."""
    offered = [tool["function"] for tool in chat.get("tools", ())]
    called = [call["function"] for message in chat["messages"] for call in message.get("tool_calls", ())]
    choice = chat.get("tool_choice")
    chosen = [choice["function"]] if isinstance(choice, dict) else []
    names = ToolNames.of(key_of(function["name"], None) for function in offered)
    for function in (*offered, *called, *chosen):
        function["name"] = names.of_key(key_of(function["name"], None))
    return names


def _function(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(name, "an object", tool)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        shown = shown_name(str(kind))
        message = f"{name}: tools of type {shown!r} run on Anthropic's servers, or are known to its models alone"
        raise InvalidRequestError(message, param=f"{name}.type")
    given = _MessagesTool.parse(tool, name)
    if "direct" not in (given.allowed_callers or ["direct"]):
        param = f"{name}.allowed_callers"
        raise InvalidRequestError(f"{param} must hold 'direct': no code calls tools here", param=param)
    examples = {"examples": given.input_examples} if given.input_examples else {}  # JSON Schema's own place for them
    described = {"description": given.description} if given.description else {}
    strict = {"strict": True} if given.strict else {}
    function = {"name": given.name, **described, "parameters": {**given.input_schema, **examples}, **strict}
    return {"type": "function", "function": function}


# Claude Code marks messages that it inserts itself with roles of its own.
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
_BETWEEN = "\n\n"  # blocks of a system prompt or of a user's message are texts of their own
_ERROR = "Error: "  # chats have no field for a tool call that failed
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_IN_RESULT = ("text", "image")

Block = Mapping[str, Any]


class _Turn(Closed):
    role: Annotated[Text, must(lambda role: role in _ROLES, " must be user, assistant or system")] = REQUIRED
    content: Any = None


class _SystemTurn(_Turn):
    output_config: Any = None


class _Block(Closed):
    inert: ClassVar[frozenset[str]] = frozenset(
        "type cache_control citations caller toolset_name transformations".split()
    )


class _TextBlock(_Block):
    text: Text = REQUIRED


class _ImageBlock(_Block):
    source: dict[str, Any] = REQUIRED


class _ThinkingBlock(_Block):
    thinking: Text = REQUIRED
    signature: Any = None


class _RedactedBlock(_Block):
    data: Any = None


class _ToolUse(_Block):
    id: Text = REQUIRED
    name: Text = REQUIRED
    input: dict[str, Any] = REQUIRED


class _ToolResult(_Block):
    tool_use_id: Text = REQUIRED
    content: Any = None
    is_error: bool | None = None


_BLOCKS: dict[str, type[_Block]] = {
    "text": _TextBlock,
    "image": _ImageBlock,
    "thinking": _ThinkingBlock,
    "redacted_thinking": _RedactedBlock,
    "tool_use": _ToolUse,
    "tool_result": _ToolResult,
}


class _UrlSource(Model):
    """An image that the upstream fetches; a file of Anthropic's is nowhere else."""

    url: Text = REQUIRED


class _DataSource(Model):
    data: Text = REQUIRED
    media_type: Text = REQUIRED


_SOURCES: dict[str, type[Model]] = {"url": _UrlSource, "base64": _DataSource}


def system_text(value: Any, name: str) -> str:
    """The text of a system prompt: a string, or text blocks."""
    return _BETWEEN.join(block["text"] for block in _blocks(value, name, _OF_ROLE["system"]))


def chat_messages(value: Any, *, images: bool) -> list[dict[str, Any]]:
    """The field `messages` as the messages of a chat. `images` says whether the model may be sent any.

    A message with tool results becomes several, one that only sets the effort (`output_config`) none. Raises
    `InvalidRequestError` whose `param` is the place in `value`.
    """
    if not isinstance(value, list):
        raise wrong_type("messages", "an array", value)
    if not value:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages has {len(value)} entries; {MAX_MESSAGES} are allowed", param="messages")
    chats = [chat for index, one in enumerate(value) for chat in _message(one, f"messages[{index}]", images)]
    if not chats:
        raise InvalidRequestError("messages must hold at least one message with content", param="messages")
    return chats


def _message(value: Any, name: str, images: bool) -> Iterator[dict[str, Any]]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    turn = (_SystemTurn if value.get("role") == "system" else _Turn).parse(value, name)
    role, configures = _ROLES[turn.role], value.get("output_config") is not None
    kinds = _OF_ROLE[role] if images else tuple(kind for kind in _OF_ROLE[role] if kind != "image")
    blocks = list(_blocks(turn.content, f"{name}.content", kinds))
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
        yield {"type": "text", "text": validated(_TEXT, value, name)}
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
        return {"type": "text", "text": validated(_TEXT, block.get("tool_name"), f"{name}.tool_name")}
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        shown = shown_name(kind) if isinstance(kind, str) else "?"
        what = "images are not read by this model" if kind == "image" else f"a block of type {shown!r} is not supported"
        raise InvalidRequestError(f"{name}: {what} here; known: {known}", param=f"{name}.type")
    _BLOCKS[kind].parse(block, name)
    if kind == "tool_use":
        check_json(block["input"], f"{name}.input")
    if kind == "image":
        source = block["source"]
        if source.get("type") not in ("url", "base64"):
            raise InvalidRequestError(f"{name}.source.type must be base64 or url", param=f"{name}.source.type")
        _SOURCES[source["type"]].parse(source, f"{name}.source")
    return block
