"""What an OpenAI chat request says beside its messages: tools, templates, reasoning, and the messages themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.fields import Fields, array, boolean, mapping, string, take_rules, take_service, text_parts
from agentspec.types import GenerateRequest

MAX_TOOLS = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# `name` labels a speaker for hosted models; no chat template that the local engine runs reads it.
_MESSAGE_FIELDS = ("role", "content", "name")
_ROLE_FIELDS = {"assistant": ("tool_calls", "reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def take_chat(fields: Fields, given: GenerateRequest) -> dict[str, Any]:
    """The fields of a `GenerateRequest` that only chat requests have; those of `given` where nothing is said."""
    tools = fields.take("tools", _tools, given.tools)
    choice = fields.take("tool_choice", _tool_choice, given.tool_choice)
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none") and (not tools or choice not in ("required", *names)):
        raise InvalidRequestError("tool_choice asks for a tool that tools does not have", param="tool_choice")
    parallel = fields.take("parallel_tool_calls", boolean, given.parallel_tool_calls)
    fields.take_only("functions", [])
    fields.take_only("function_call", "none", "auto")
    fields.take_only("modalities", ["text"])
    fields.take_only("reasoning_effort", "none")
    return {
        "tools": tools,
        "tool_choice": choice if tools else "auto",
        "parallel_tool_calls": parallel or not tools,
        "template_arguments": fields.take("chat_template_kwargs", _template_arguments, given.template_arguments),
        "split_reasoning": fields.take("include_reasoning", boolean, given.split_reasoning),
    }


def take_start(fields: Fields, last_role: str | None, given: GenerateRequest) -> dict[str, Any]:
    """Whether the last message, of role `last_role`, is continued, and whether the template opens an answer.

    vLLM's rule: a continued message leaves no room for the start of a new one.
    """
    continued = fields.take("continue_final_message", boolean, given.continue_final)
    started = fields.take("add_generation_prompt", boolean, given.start_answer and not continued)
    if continued and started:
        raise InvalidRequestError(
            "set either continue_final_message or add_generation_prompt, not both", param="add_generation_prompt"
        )
    if continued and last_role != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of role assistant", param="continue_final_message"
        )
    return {"continue_final": continued, "start_answer": started or continued}


def with_extra(request: GenerateRequest) -> GenerateRequest:
    """`request` with those fields of its `extra` in their places that the local engine acts on.

    Raises `InvalidRequestError` for the others: what would change the answer is not ignored in silence.
    """
    if not request.extra:
        return request
    fields = Fields(request.extra)
    fields.take("stream_options", mapping, dict[str, Any]())
    messages = request.messages
    last = None if messages is None else str(messages[-1].get("role")) if messages else None
    changed = {
        "sampling": replace(request.sampling, **take_rules(fields, request.sampling)),
        "return_prompt": fields.take("return_token_ids", boolean, request.return_prompt),
        **take_service(fields, request),
        **(take_chat(fields, request) if messages is not None else {}),
        **(take_start(fields, last, request) if messages is not None else {}),
    }
    fields.finish()
    return replace(request, extra={}, **changed)


def message_of(name: str, value: Any) -> dict[str, Any]:
    """One message as a chat template reads it. Raises `InvalidRequestError` naming what is wrong below `name`."""
    message = mapping(name, value)
    role = string(f"{name}.role", message.get("role"))
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequestError(f"{name}.role is not supported by this model; known: {known}", param=f"{name}.role")
    for key, given in message.items():
        if key not in (*_MESSAGE_FIELDS, *_ROLE_FIELDS.get(role, ())) and given not in (None, [], ""):
            shown = f"{name}.{key[:80]}".encode("ascii", "replace").decode()
            raise InvalidRequestError(f"{shown} is not supported by this model", param=shown)
    read = _OF_ROLE.get(role)
    own = {} if read is None else read(name, message)
    content = message.get("content")
    text = "" if content is None and "tool_calls" in own else text_parts(f"{name}.content", content)
    return {"role": ROLES[role], **own, "content": text}


def _assistant(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Calls and thoughts of an earlier answer."""
    own: dict[str, Any] = {}
    if calls := message.get("tool_calls"):
        listed = array(f"{name}.tool_calls", calls)
        own["tool_calls"] = [_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(listed)]
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        own["reasoning_content"] = string(f"{name}.reasoning_content", thoughts)
    return own


def _result(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Which call a tool's result belongs to."""
    own = {"tool_call_id": string(f"{name}.tool_call_id", message.get("tool_call_id"))}
    if message.get("name") is not None:
        own["name"] = string(f"{name}.name", message["name"])
    return own


_OF_ROLE = {"assistant": _assistant, "tool": _result}


def _call(name: str, value: Any) -> dict[str, Any]:
    call = mapping(name, value)
    function = mapping(f"{name}.function", call.get("function"))
    called = {
        "name": string(f"{name}.function.name", function.get("name")),
        "arguments": string(f"{name}.function.arguments", function.get("arguments")),
    }
    return {"id": string(f"{name}.id", call.get("id")), "type": "function", "function": called}


def _tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    if len(array(name, value)) > MAX_TOOLS:
        raise InvalidRequestError(f"{name} has {len(value)} entries; {MAX_TOOLS} are allowed", param=name)
    tools = tuple(_tool(f"{name}[{index}]", tool) for index, tool in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param=name)
    return tools


def _tool(name: str, value: Any) -> dict[str, Any]:
    tool = mapping(name, value)
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f"{name}.type must be 'function'", param=f"{name}.type")
    function = mapping(f"{name}.function", tool.get("function"))
    called = string(f"{name}.function.name", function.get("name"))
    if not _TOOL_NAME.fullmatch(called) or called in ("auto", "none", "required"):
        raise InvalidRequestError(
            f"{name}.function.name must be 1 to 64 letters, digits, '_', '-' or '.'", param=f"{name}.function.name"
        )
    if function.get("parameters") is not None:
        mapping(f"{name}.function.parameters", function["parameters"])
    kept = {key: one for key, one in function.items() if one is not None}
    return {"type": "function", "function": kept}


def _tool_choice(name: str, value: Any) -> str:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise InvalidRequestError(f"{name} must be none, auto, required or an object that names a tool", param=name)
        return value
    choice = mapping(name, value)
    return string(f"{name}.function.name", mapping(f"{name}.function", choice.get("function")).get("name"))


# What the template's own caller decides, and how it is called.
_FIXED = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding"
    " truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def _template_arguments(name: str, value: Any) -> Mapping[str, Any]:
    arguments = mapping(name, value)
    for key in arguments:
        if key in _FIXED or not key.isidentifier():
            raise InvalidRequestError(f"{name} may not set {key[:80]!r}", param=name)
    return arguments
