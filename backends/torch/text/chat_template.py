"""Renders messages and tools by a model's own chat template, in the form that templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import check_json
from agentspec.types import GenerateRequest, Message

MAX_MESSAGES: Final = 10_000  # of a chat: a template may look at earlier messages for each of them
THOUGHTS: Final = "reasoning_content", "reasoning", "thinking"  # of an earlier answer, in templates
MAX_RENDERED: Final = 10_000_000  # characters of a prompt: more than the largest body of a request has by default


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """The source of the chat template (of several, with `tools`, the one for tools); empty if there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
    return str(template)


def render(tokenizer: Any, request: GenerateRequest, *, start: bool, continue_final: bool) -> str:
    """The prompt of a chat by the model's own template, in transformers' sandbox: `start` opens an answer,
    `continue_final` leaves the last message open. A template that does not know tools has them described in the
    messages.

    Raises `InvalidRequestError` for messages that the template refuses, for too many, and for too long a prompt.
    """
    source = template_of(tokenizer, tools=bool(request.tools))
    if not source:
        message = "this model has no chat template: use completions with a plain prompt instead of messages"
        raise InvalidRequestError(message, param="messages")
    messages = _checked(request)
    tools: list[dict[str, Any]] | None = [dict(tool) for tool in request.tools] or None
    if "tools" not in source and (tools or any("tool_calls" in one or one.get("role") == "tool" for one in messages)):
        from agentspec.backends.chat_templates import described

        messages, tools = described(messages, tools or []), None

    def apply(messages: list[dict[str, Any]]) -> str:
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=start,
                continue_final_message=continue_final,
                **request.template_arguments,
            )
        except Exception as error:  # whatever Python raises in a template, such as for a number divided by zero
            message = f"the chat template refuses these messages: {str(error)[:300] or type(error).__name__}"
            raise InvalidRequestError(message, param="messages") from error
        return str(text)

    if "tools" in source and any("tool_calls" in one for one in messages):
        from agentspec.backends.chat_templates import write_arguments

        write_arguments(messages, tokenizer, source)
    roles = [one.get("role") for one in messages]
    if "system" in roles[1:] or "developer" in roles:
        from agentspec.backends.chat_templates import in_place, takes

        messages = in_place(messages, takes=partial(takes, tokenizer, source))
    try:
        text = apply(messages)
    except InvalidRequestError:
        from agentspec.backends.chat_templates import simplified

        if (others := simplified(messages)) == messages:
            raise
        text = apply(others)
    if len(text) > MAX_RENDERED:
        raise InvalidRequestError(f"the prompt is longer than {MAX_RENDERED:,} characters", param="messages")
    return text


def _checked(request: GenerateRequest) -> list[dict[str, Any]]:
    if not request.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    check_json(request.messages, "messages")
    check_json(request.tools, "tools")
    check_json(request.template_arguments, "chat_template_kwargs")
    if len(request.messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages holds more than {MAX_MESSAGES:,} messages", param="messages")
    return [plain(message) for message in request.messages]


def plain(message: Message) -> dict[str, Any]:
    """The message as templates expect it: text parts joined, the arguments of calls as objects instead of JSON text.

    Raises `InvalidRequestError` for content parts other than text, and for arguments that are neither a text nor an
    object within the bounds of `check_json`.
    """
    plain = dict(message)
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        plain |= dict.fromkeys(THOUGHTS, thoughts)
    if message.get("tool_calls"):
        from agentspec.backends.chat_templates import parsed_call

        plain["tool_calls"] = [parsed_call(call) for call in message["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    if "content" in message or "tool_calls" in plain:
        plain["content"] = _joined_parts(message.get("content"))
    return plain


def _joined_parts(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError("message content may hold text parts only", param="messages")
    return "".join(str(text) for text in texts)
