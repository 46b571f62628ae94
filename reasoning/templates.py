"""Chat templates applied here, for endpoints that only complete raw text and for models that have no template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.types import Message

PLAIN = """\
{%- for message in messages %}{{ message['role'].capitalize() }}: {{ message['content'] }}

{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"""
CHATML = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}


class Template:
    """Messages as text, by a Jinja template that sees `messages` and `add_generation_prompt`. Sandboxed.

    Raises `ConfigurationError` for a name that is neither built in nor a readable file, and for what is no template.
    """

    def __init__(self, name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ConfigurationError("chat templates applied here need jinja2: pip install jinja2") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True)
        environment.globals["raise_exception"] = _refuse
        self._errors: type[Exception] = TemplateError
        try:
            self._template = environment.from_string(BUILT_IN.get(name) or _read(name))
        except TemplateError as error:
            raise ConfigurationError(f"chat template {name!r}: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, ready for the assistant's answer. Raises `InvalidRequestError` for what the template refuses."""
        try:
            return self._template.render(messages=[_plain(m) for m in messages], add_generation_prompt=True)
        except (self._errors, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text()
    except OSError as error:
        known = ", ".join(BUILT_IN)
        raise ConfigurationError(f"chat template {name!r}: not one of {known}, and no file: {error.strerror}") from None


def _refuse(message: str) -> None:
    raise ValueError(message)


def _plain(message: Message) -> dict[str, Any]:
    return {**message, "content": text_of(message)}


def text_of(message: Message) -> str:
    """The text of a message, parts joined. Raises `InvalidRequestError` for parts that are not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError("message content may hold text parts only", param="messages")
    return "".join(str(text) for text in texts)
