"""Messages and tools as a model reads them: through its own chat template, or described where that knows no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from agentspec.backends.torch.tool_calls import HERMES, ToolFormat, format_of
from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, Message

_TOOLS = """You may call functions to answer. They are, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """The chat template's source; of several the one for tools where there are tools. Empty for none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
    return str(template)


def tool_format(tokenizer: Any, *, required: bool = True) -> ToolFormat | None:
    """The format of the calls that this model was taught, Hermes' for one that was taught none.

    Raises `InvalidRequestError`, where it is `required`, for a model that was taught a format which is not known here.
    """
    template = template_of(tokenizer, tools=True)
    format = format_of(template) if "tools" in template else HERMES
    if format is None and required:
        raise InvalidRequestError(
            "this model's chat template writes tool calls in a format that is not known here; known: Hermes, Llama 3, "
            "Mistral",
            param="tools",
        )
    return format


def render(tokenizer: Any, request: GenerateRequest, *, start: bool, continue_final: bool) -> str:
    """Messages through the model's own chat template (sandboxed): `start` opens an answer, `continue_final` leaves
    the last message open. Raises `InvalidRequestError` for what the template refuses.
    """
    template = template_of(tokenizer, tools=bool(request.tools))
    messages = [_plain(message) for message in request.messages or ()]
    if not template:
        message = "this model has no chat template: use completions with a plain prompt instead of messages"
        raise InvalidRequestError(message, param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    tools = [dict(tool) for tool in request.tools]
    if "tools" not in template:
        messages, tools = _described(messages, tools), []
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=start,
            continue_final_message=continue_final,
            **request.template_arguments,
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    return text


def _plain(message: Message) -> dict[str, Any]:
    """The message as templates expect it: text parts joined, the arguments of calls as objects instead of JSON text.

    Raises `InvalidRequestError` for parts that are not text, and for arguments that are no JSON object.
    """
    plain = dict(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    if "content" in message or "tool_calls" in plain:
        plain["content"] = _text(message.get("content"))
    return plain


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError("message content may hold text parts only", param="messages")
    return "".join(str(text) for text in texts)


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict) or not isinstance(function["name"], str):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise InvalidRequestError(
            "a tool call in messages needs a function with a name and arguments that are a JSON object",
            param="messages",
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without tools: they are described in the system message, calls and results become text."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    about = _TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if told[0].get("role") == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{about}"}, *told[1:]]
    return [{"role": "system", "content": about}, *told]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content', '')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    objects = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    written = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in objects]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": message["role"], "content": content}
