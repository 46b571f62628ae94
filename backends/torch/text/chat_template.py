"""Renders messages and tools by the model's chat template, or describes tools in text if the template has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentspec.backends.templates.huggingface import rendered
from agentspec.backends.templates.messages import described, plain
from agentspec.backends.torch.text.tool_parser import HERMES, ToolFormat, format_of
from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_values import check_json
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
    """Render messages by the model's own chat template, in a sandbox that bounds its time and output: `start` opens an
    answer, `continue_final` leaves the last message open. Raises `InvalidRequestError` for messages that the template
    refuses, and for a template that goes beyond the bounds.
    """
    source = template_of(tokenizer, tools=bool(request.tools))
    check_json(request.messages or (), "messages")
    check_json(request.tools, "tools")
    check_json(request.template_arguments, "chat_template_kwargs")
    messages = [plain(message) for message in request.messages or ()]
    if not source:
        message = "this model has no chat template: use completions with a plain prompt instead of messages"
        raise InvalidRequestError(message, param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    tools = [dict(tool) for tool in request.tools]
    if "tools" not in source:
        messages, tools = described(messages, tools), []
    try:
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:  # code, no template
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=start,
                    continue_final_message=continue_final,
                    **request.template_arguments,
                )
            )
        arguments = {**tokenizer.special_tokens_map, **request.template_arguments}
        return rendered(source, messages, tools or None, arguments, start=start, continue_final=continue_final)
    except Exception as error:  # whatever Python raises in a template, such as for a number divided by zero
        message = f"the chat template refuses these messages: {str(error)[:300] or type(error).__name__}"
        raise InvalidRequestError(message, param="messages") from error
