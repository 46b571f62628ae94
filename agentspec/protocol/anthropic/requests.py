"""Reads the bodies of `/v1/messages` and `/v1/messages/count_tokens` as bodies of chat completions.

Every field is acted on, known to be inert, or refused by its own name, for local models as for upstreams that answer
chats only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.tool_names import ToolNames, key_of
from agentspec.protocol.validation import (
    NOT_TEXT,
    Body,
    Count,
    Number,
    Texts,
    check_json,
    is_text,
    must,
    refuse_unknown,
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
PASSED = (
    "temperature top_p top_k stream seed min_p prediction latency_target_ms_per_token chat_template_kwargs"
    " cache_salt vllm_xargs priority session_id nvext prompt_cache_key".split()
)
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_THINKING = ("enabled", "adaptive", "disabled", "between_tools")
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class _MessagesBody(Body):
    """The fields that are read here; blocks, tools and objects are read by functions of their own."""

    model: str = ""
    max_tokens: Annotated[Count, must(lambda count: count > 0, " must be at least 1")] | None = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    stop_sequences: Texts | None = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field()] | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class MessagesLimits:
    """What one request may hold, and whether the model may be sent images.

    `templated`: a chat template writes the prompt, which may know earlier thoughts and whether to think, and takes any
    name of a tool.
    """

    max_messages: int
    images: bool = False
    templated: bool = True


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


def parse_messages(body: Mapping[str, Any], limits: MessagesLimits, *, count: bool = False) -> MessagesRequest:
    """Read a request, or with `count` one to count the tokens of.

    Raises `InvalidRequestError` with `param` for a field that is wrong or cannot be honoured.
    """
    fields = _MessagesBody.parse(body)
    if fields.max_tokens is None and not count:
        raise InvalidRequestError("max_tokens is missing: the Messages API requires it", param="max_tokens")
    messages = chat_messages(fields.messages, images=limits.images, most=limits.max_messages)
    prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if fields.system is not None:
        system = system_text(fields.system, "system")
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    if not limits.templated:
        messages = [{name: one[name] for name in one if name != "reasoning_content"} for one in messages]
    thinking = _thinking(fields.thinking)
    chat = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat |= {"model": fields.model, "messages": messages}
    chat |= {} if fields.max_tokens is None else {"max_tokens": fields.max_tokens}
    chat |= {"stop": list(fields.stop_sequences)} if fields.stop_sequences else {}
    chat |= {"continue_final_message": True, "add_generation_prompt": False} if prefilled else {}
    chat |= _tools(fields, MAX_TOOLS)
    chat |= _output(fields)
    told = _template_arguments(body, thinking)
    chat |= told if limits.templated else {}
    refuse_unknown(body, {*_MessagesBody.model_fields, *PASSED, *INERT})
    return MessagesRequest(
        chat,
        names=ToolNames() if limits.templated else limited_names(chat),
        stream=fields.stream,
        thoughts=thinking.get("type") != "disabled",
        omitted=thinking.get("display") == "omitted",
        prefilled=prefilled,
        thinking_budget=None if thinking.get("type") == "disabled" else thinking.get("budget_tokens") or None,
    )


def _tools(fields: _MessagesBody, most: int) -> dict[str, Any]:
    tools = chat_tools(fields.tools, most) if fields.tools is not None else []
    choice = chat_tool_choice(fields.tool_choice) if fields.tool_choice is not None else {}
    if not tools and choice.get("tool_choice") not in (None, "auto", "none"):
        raise InvalidRequestError("tool_choice asks for a tool, and tools has none", param="tool_choice")
    return {"tools": tools, **choice} if tools else {}


def _output(fields: _MessagesBody) -> dict[str, Any]:
    """`output_config`, and the older `output_format`, as `response_format` and `reasoning_effort`.

    The effort is the last one that a system message in the conversation sets, if one does.
    """
    config = _config(fields.output_config, "output_config", ("effort", "format"))
    effort, named = config.get("effort"), "output_config.effort"
    for index, message in enumerate(fields.messages):  # all of them were read: they are objects
        name = f"messages[{index}].output_config"
        later = _config(message.get("output_config"), name, ("effort",)).get("effort")
        effort, named = (effort, named) if later is None else (later, f"{name}.effort")
    place = "output_format" if fields.output_format is not None else "output_config.format"
    form = fields.output_format if fields.output_format is not None else config.get("format")
    chat: dict[str, Any] = {}
    if form is not None:
        chat["response_format"] = _response_format(form, place)
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise InvalidRequestError(f"{named} must be one of {', '.join(_EFFORTS)}", param=named)
        chat["reasoning_effort"] = _EFFORTS[effort]
    return chat


def _config(value: Any, name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The object `value`, which may set the `known` fields."""
    config = {} if value is None else validated(_OBJECT, value, name)
    refuse_unknown(config, known, name)
    return config


def _response_format(form: Any, name: str) -> dict[str, Any]:
    given = validated(_OBJECT, form, name)
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


# `defer_loading` saves tokens of a prompt by a search that only Anthropic's servers do: here all tools are shown.
_TOOL_INERT = {"cache_control", "defer_loading", "eager_input_streaming"}
_KNOWN = {"type", "name", "description", "input_schema", "input_examples", "strict", "allowed_callers"} | _TOOL_INERT
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(value: Any, most: int) -> list[dict[str, Any]]:
    """`tools` as functions. Raises `InvalidRequestError` for a tool of Anthropic's servers, named by its type."""
    if not isinstance(value, list):
        raise wrong_type("tools", "an array", value)
    if len(value) > most:
        raise InvalidRequestError(f"tools has {len(value)} entries; {most} are allowed", param="tools")
    check_json(value, "tools")
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def chat_tool_choice(value: Any) -> dict[str, Any]:
    """The fields `tool_choice` and `parallel_tool_calls` of a chat."""
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", "an object", value)
    kind, alone = value.get("type"), value.get("disable_parallel_tool_use")
    if not isinstance(alone, (bool, type(None))):
        raise wrong_type("tool_choice.disable_parallel_tool_use", "a boolean", alone)
    parallel = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        if not isinstance(value.get("name"), str):
            raise wrong_type("tool_choice.name", "a string", value.get("name"))
        return {"tool_choice": {"type": "function", "function": {"name": value["name"]}}, **parallel}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return {"tool_choice": _CHOICES[kind], **parallel}


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
    refuse_unknown(tool, _KNOWN, name)
    for key, kinds, wanted in (
        ("name", str, "a string"),
        ("description", (str, type(None)), "a string"),
        ("input_schema", dict, "an object"),
        ("strict", (bool, type(None)), "a boolean"),
        ("input_examples", (list, type(None)), "an array"),
        ("allowed_callers", (list, type(None)), "an array"),
    ):
        if not isinstance(tool.get(key), kinds):
            raise wrong_type(f"{name}.{key}", wanted, tool.get(key))
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        param = f"{name}.allowed_callers"
        raise InvalidRequestError(f"{param} must hold 'direct': no code calls tools here", param=param)
    schema = dict(tool["input_schema"])
    if tool.get("input_examples"):
        schema["examples"] = tool["input_examples"]  # JSON Schema's own place for them
    described = {"description": tool["description"]} if tool.get("description") else {}
    strict = {"strict": True} if tool.get("strict") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": schema, **strict}}


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
