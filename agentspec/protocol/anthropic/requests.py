"""Reads the bodies of `/v1/messages` and `/v1/messages/count_tokens` as bodies of chat completions.

Every field is acted on, known to be inert, or refused by its own name, for local models as for upstreams that answer
chats only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.content import chat_messages, system_text
from agentspec.protocol.anthropic.tools import chat_tool_choice, chat_tools, limited_names
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.tool_names import ToolNames
from agentspec.protocol.validation import (
    Body,
    Count,
    Number,
    Texts,
    must,
    refuse_unknown,
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
