"""Renders messages and tools by the model's chat template, or describes tools in text if the template has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.backends.chat_templates import rendered
from agentspec.backends.torch.text.tool_parser import HERMES, ToolFormat, format_of
from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """The source of the chat template (of several, with `tools`, the one for tools); empty if there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
    return str(template)


def tool_format(tokenizer: Any, *, required: bool = True) -> ToolFormat | None:
    """The tool call format of the model's chat template; Hermes' if the template has no tools.

    For a format not known here, raises `InvalidRequestError` if a format is `required`, else returns None.
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
    """Render messages by the model's own chat template, in transformers' sandbox: `start` opens an answer,
    `continue_final` leaves the last message open. Raises `InvalidRequestError` for messages that the template refuses.
    """
    source = template_of(tokenizer, tools=bool(request.tools))
    if not source:
        message = "this model has no chat template: use completions with a plain prompt instead of messages"
        raise InvalidRequestError(message, param="messages")
    if not request.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")

    def apply(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=start,
            continue_final_message=continue_final,
            **request.template_arguments,
        )
        return str(text)

    knows_tools = "tools" in source
    return rendered(apply, request.messages, request.tools, request.template_arguments, knows_tools=knows_tools)
