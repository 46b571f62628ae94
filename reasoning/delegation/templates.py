"""Chat templates applied here, for endpoints that only complete raw text and for models that have no template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.backends.base import NONE
from agentspec.backends.template_messages import described, plain
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

# Marks that chat templates set around turns: text of one model must not open a turn in another model's prompt.
_TURN_MARKS = re.compile(r"<(?=[|\uff5c]|(?:start|end)_of_turn|bos>|eos>|/?s>)|\[(?=/?INST\])")


class Template:
    """Messages as text, by a Jinja template that sees `messages`, `tools`, `add_generation_prompt` and what a request
    gives as template arguments. Sandboxed. To one that does not name tools they are described in words.

    Raises `ConfigurationError` for a name that is neither built in nor a readable file, and for what is no template.
    """

    def __init__(self, name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ConfigurationError(
                "chat templates applied here need jinja2: pip install 'agentspec[proxy]'"
            ) from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True)
        environment.globals["raise_exception"] = _refuse
        self.name = name
        self._errors: type[Exception] = TemplateError
        try:
            source = BUILT_IN.get(name) or _read(name)
            self._knows_tools = "tools" in source
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"chat template {name!r}: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt, ready for the assistant's answer. Raises `InvalidRequestError` for what the template refuses."""
        told, listed = [{"content": "", **plain(message)} for message in messages], [dict(tool) for tool in tools]
        if not self._knows_tools:
            told, listed = described(told, listed), []
        given = {**template_arguments, "messages": told, "tools": listed or None, "add_generation_prompt": True}
        try:
            return self._template.render(given)
        except (self._errors, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def escape_markers(text: str) -> str:
    """`text` without anything that a tokenizer would read as the mark of a turn."""
    return _TURN_MARKS.sub(lambda mark: mark.group() + " ", text)


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text()
    except OSError as error:
        known = ", ".join(BUILT_IN)
        raise ConfigurationError(f"chat template {name!r}: not one of {known}, and no file: {error.strerror}") from None


def _refuse(message: str) -> None:
    raise ValueError(message)
