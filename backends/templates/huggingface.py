"""Renders chat templates of models as transformers' `apply_chat_template` does, in a sandbox with bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.utils import Namespace

from agentspec.backends.templates.sandbox import BoundedEnvironment

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_COMPILED: Final = 16


def rendered(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
    *,
    start: bool,
    continue_final: bool,
) -> str:
    """The text of `messages`, whose values are JSON; `start` opens an answer, `continue_final` leaves the last message
    open. Raises what a template raises, and `ValueError` if the last message cannot be continued.
    """
    chat = [_with_reasoning({key: _plain(one) for key, one in said.items() if one is not None}) for said in messages]
    final = _tagged(chat, source) if continue_final else ""
    template = _template(source)
    given = {
        **_plain(dict(arguments)),
        "messages": chat,
        "tools": _plain(tools),
        "documents": None,
        "add_generation_prompt": start,
    }
    text = _ENVIRONMENT.render(template, given)
    return _untagged(text, final) if continue_final else text


def _template(source: str) -> jinja2.Template:
    found = _compiled(source)
    if isinstance(found, Exception):
        raise found.with_traceback(None)
    return found


@lru_cache(_COMPILED)
def _compiled(source: str) -> jinja2.Template | Exception:
    """The compiled template, or why it cannot be compiled: found out once, since both take time."""
    try:
        return _ENVIRONMENT.load(source)
    except Exception as error:
        return error


def _tagged(chat: list[dict[str, Any]], source: str) -> str:
    """Mark the end of the last message's content, and return the content."""
    content = chat[-1].get("content")
    if content is None or "content" not in source:
        raise ValueError("the last message has no content to continue, or the template does not show it")
    if not isinstance(content, list):
        chat[-1]["content"] = content + _TAG
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _TAG
            return text
    raise ValueError("the last message has no text to continue")


def _untagged(text: str, final: str) -> str:
    """The text up to the end of the last message. A template may have stripped the blanks at its end."""
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the last message cannot be continued, since the template does not show it as it is")
    end = text.rindex(_TAG.strip())
    return text[:end] if text[end : end + len(_TAG)] == _TAG else text[:end].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has every name that templates read it by."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A JSON value without subclasses, whose methods the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else [_plain(one) for one in value]


class GenerationTag(jinja2.ext.Extension):
    """The tag `generation`, which marks the assistant's words for training and shows its body here."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Any) -> str:
        return str(caller())


class TemplateDict:
    """`dict` in templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """`namespace` in templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson`, which escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 200:  # the C library's time and memory for long formats are not bounded
        raise ValueError("strftime_now takes formats of at most 200 characters")
    return datetime.now().strftime(format)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = TemplateDict()
    environment.plain_functions = (TemplateDict,)
    environment.globals["namespace"] = TemplateNamespace
    environment.guard_filters()
    return environment


_ENVIRONMENT: Final = _environment()
