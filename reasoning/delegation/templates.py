"""Chat templates that agentspec applies, for endpoints that only complete raw text and models without a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.backends.base import NONE
from agentspec.backends.chat_templates import rendered
from agentspec.errors import ConfigurationError, extra_of, install_advice
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
    """A Jinja template, in Jinja's sandbox, that renders messages as text. It sees `messages`, `tools`,
    `add_generation_prompt` and the request's template arguments. If it does not mention tools, the messages describe
    them in words.

    Raises `ConfigurationError` for a name that is neither built in nor a readable file, and for an invalid template.
    """

    def __init__(self, name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError as error:
            if not extra_of(error.name, ["proxy"]):
                raise
            raise ConfigurationError(f"chat templates applied here need jinja2; {install_advice('proxy')}") from None
        environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True)
        environment.globals["raise_exception"] = _refuse
        self.name = name
        try:
            source = BUILT_IN.get(name) or _read(name)
            self._knows_tools = "tools" in source
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ConfigurationError(f"chat template {name!r}: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt, up to the assistant's answer. Raises `InvalidRequestError` for messages the template refuses."""
        given = {**template_arguments, "add_generation_prompt": True}

        def apply(shown: list[dict[str, Any]], listed: list[dict[str, Any]] | None) -> str:
            shown = [{"content": "", **message} for message in shown]
            return self._template.render({**given, "messages": shown, "tools": listed})

        return rendered(apply, messages, tools, template_arguments, knows_tools=self._knows_tools)


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ConfigurationError(f"chat template {name!r}: not UTF-8: {error}") from None
    except OSError as error:
        known = ", ".join(BUILT_IN)
        raise ConfigurationError(f"chat template {name!r}: not one of {known}, and no file: {error.strerror}") from None


def _refuse(message: str) -> None:
    raise ValueError(message)
