"""Checks which fields of a request an upstream may get.

Fields that could make an upstream, or another gateway behind it, connect elsewhere or act as somebody else are refused:
by name (`field_names.py`), and by value where a value is an address. Texts, and schemas for texts, are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.backends.base import Backend, Forwards, is_forwarding
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.addresses import is_address, is_base64, is_inline, is_on
from agentspec.proxy.body.amounts import COUNTED_FIELDS
from agentspec.proxy.body.field_names import (
    LONGEST_NAME,
    is_denied,
    is_denied_in_message,
    is_denied_in_metadata,
    plain_name,
)
from agentspec.reasoning.strategy import Strategy


def _plain_names(names: str) -> frozenset[str]:
    return frozenset(map(plain_name, names.split()))


# Arguments of chat templates that published models read; templates are programs, and others may keep them busy.
TEMPLATE_ARGUMENTS = frozenset(
    "enable_thinking thinking thinking_mode thinking_budget reasoning_effort preserve_thinking clear_thinking"
    " add_vision_id date_string tools_in_user_message model_identity builtin_tools".split()
)
# These fields hold text, or a schema or grammar for text: no server takes an address from them.
_TEXT_FIELDS = frozenset(
    "model suffix stop bad_words user safety_identifier prompt_cache_key response_format guided_json guided_regex"
    " guided_choice guided_grammar guided_whitespace_pattern structured_outputs structural_tag regex ebnf json_schema"
    " grammar stop_regex logit_bias instructions stop_sequences output_config output_format".split()
)
# Servers written in Go read names in any case: "N" must not pass where "n" is bounded.
_SPELLINGS = {
    plain_name(name): name
    for name in (
        *_TEXT_FIELDS,
        *COUNTED_FIELDS,
        *"prompt input system prediction metadata chat_template_kwargs stream stream_options".split(),
        *"documents query queries text_1 text_2 vllm_xargs cache_salt text".split(),
        *"store background conversation previous_response_id".split(),
    )
}
_CALLS = frozenset({"tool_calls", "function_call", "arguments", "parameters", "input_schema", "input_examples"})
_MESSAGE_TEXT = frozenset(
    "role name content text prompt input prediction thinking refusal reasoning reasoning_content summary title context"
    " signature tool_call_id messages transcript".split()
)
_TOOL_TEXT = frozenset("name description title definition syntax pattern examples type".split())
_MEDIA = _plain_names(
    "url image_url input_image video_url audio_url file_url image images video videos audio audios file path"
)
_ENCODED = _plain_names("data file_data input_audio b64_json")


@dataclass(frozen=True, slots=True)
class _Region:
    """How a part of a request is checked: which names are denied, which strings are text, which are media."""

    denied: Callable[[str, Set[str]], bool]
    skipped: Set[str] = frozenset()
    text: Set[str] = frozenset()
    media: bool = False
    strings: bool = True  # whether strings are checked at all
    inner: Mapping[str, _Region] = field(default_factory=dict)  # parts of it that are checked by rules of their own


_OTHER = _Region(is_denied)
_TOOLS = _Region(is_denied, skipped=_CALLS, text=_TOOL_TEXT)
_MESSAGES = _Region(is_denied_in_message, skipped=_CALLS, text=_MESSAGE_TEXT, media=True)
# Items of the Responses API: results of calls are text, and so is what earlier answers cited and searched.
_ITEMS = replace(
    _MESSAGES,
    skipped=_CALLS | {"annotations", "action", "results"},
    text=_MESSAGE_TEXT | {"output", "encrypted_content", "call_id", "id", "arguments"},
    inner={"tools": _TOOLS},  # that the conversation adds, or that were searched for
)
# Of rerankers, and of chats about documents: texts, or parts as messages have them, with media that vLLM fetches.
_RANKED = frozenset("documents query queries text_1 text_2".split())
_REGIONS = {
    "text": _Region(is_denied, skipped=frozenset({"schema"}), text=_TOOL_TEXT),
    "input": _ITEMS,
    "metadata": _Region(is_denied_in_metadata, strings=False),
    "tools": _TOOLS,
    "functions": _TOOLS,
    "messages": replace(_MESSAGES, skipped=_CALLS | {"input"}),  # of a `tool_use` block, its arguments
    **dict.fromkeys(("prompt", "prediction", "system"), _MESSAGES),
    **dict.fromkeys(_RANKED, replace(_MESSAGES, text=_MESSAGE_TEXT | _RANKED)),
}


@dataclass(slots=True)
class _Level:
    """One array or object on the way to the present field: its items still to come, and the present one's key.

    `nearest` is the last name on the way; an object has names, an array has not.
    """

    region: _Region
    nearest: str
    items: Iterator[tuple[Any, Any]]
    named: bool
    key: Any = None


_Place = list[_Level]


class UpstreamFields:
    """The fields that the operator of one backend allows beyond the default."""

    def __init__(self, settings: OpenAISettings) -> None:
        self._allowed = frozenset(map(plain_name, settings.allow_fields))
        self._hosts = frozenset(host.lower() for host in settings.allow_media_hosts)
        self._priority = settings.priority != "off"
        self._arguments = TEMPLATE_ARGUMENTS | set(settings.allow_template_arguments)

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `InvalidRequestError`, whose `param` is the path of the field, for a field that is not allowed.

        Takes time and memory linear in the size of `fields`, whatever its nesting.
        """
        if is_address(str(fields.get("model", ""))):
            raise InvalidRequestError("model must be a name, not an address", param="model")
        if not isinstance(fields.get("metadata", {}), (dict, type(None))):
            raise InvalidRequestError("metadata must be an object", param="metadata")
        self.check_template_arguments(fields.get("chat_template_kwargs"))
        for name, value in fields.items():
            if (known := _SPELLINGS.get(plain_name(name[:128]), name)) != name:
                raise InvalidRequestError(f"{_shown(name)} must be spelled {known}", param=_shown(name))
            if name not in _TEXT_FIELDS and not (name == "priority" and self._priority):  # checked by its scale
                self._walk(name, value, _REGIONS.get(name, _OTHER))

    def check_template_arguments(self, arguments: Any) -> None:
        """Raise `InvalidRequestError` for an argument of the chat template that is not allowed."""
        for name in arguments if isinstance(arguments, dict) else ():
            if name not in self._arguments:
                param = f"chat_template_kwargs.{_shown(name)}"
                raise InvalidRequestError(
                    f"{param} is not among the template arguments that may be set (allow_template_arguments)",
                    param=param,
                )

    def _walk(self, name: str, value: Any, region: _Region) -> None:
        """Check all names and strings of the field `name`, in order, remembering only where it is."""
        place = [_Level(region, "", iter([(name, value)]), named=True)]
        while place:
            level = place[-1]
            region = level.region
            for key, value in level.items:
                level.key = key
                nearest = level.nearest
                if level.named:
                    nearest = key
                    if region.denied(key, self._allowed):
                        raise _refused(place)
                kind = type(value)
                if kind is str:
                    if region.strings and nearest not in region.text:
                        self._check_string(value, nearest, region, place)
                elif kind is dict and key not in region.skipped:
                    place.append(_Level(region.inner.get(key, region), nearest, iter(value.items()), named=True))
                    break
                elif kind is list and key not in region.skipped:
                    place.append(_Level(region.inner.get(key, region), nearest, enumerate(value), named=False))
                    break
            else:
                place.pop()

    def _check_string(self, text: str, nearest: str, region: _Region, place: _Place) -> None:
        plain = plain_name(nearest) if region.media and len(nearest) <= LONGEST_NAME else ""
        if plain in _MEDIA:
            harmless = is_inline(text)
        elif plain in _ENCODED:
            harmless = is_inline(text) or is_base64(text)
        elif region.media and nearest == "type":
            harmless = not region.denied(text, self._allowed)
        else:
            harmless = not is_address(text)
        if not harmless and not is_on(text, self._hosts):
            path = _path(place)
            wanted = "must be a data: URL" if plain in _MEDIA or plain in _ENCODED else "may not name an address"
            raise InvalidRequestError(f"{path} {wanted} (allow_media_hosts of the backend)", param=path)


def _refused(place: _Place) -> InvalidRequestError:
    path = _path(place)
    if path == "priority":
        why = "it would go before others' requests (priority of the backend lets clients stand back)"
    else:
        why = "upstreams are configured, not requested (allow_fields of the backend)"
    return InvalidRequestError(f"{path} is refused: {why}", param=path)


def _path(place: _Place) -> str:
    """The dotted path of the present field, of a deep one the last parts."""
    parts = (f".{_shown(level.key)}" if level.named else f"[{level.key}]" for level in place[-16:])
    return "".join(parts).removeprefix(".")


def _shown(name: object) -> str:
    return str(name)[:80].encode("ascii", "replace").decode()


def strategy_upstreams(backend: Backend) -> list[Forwards]:
    """The upstreams that a strategy asks with what a request wants of it; none for another backend."""
    roles = backend.roles.values() if isinstance(backend, Strategy) else ()
    found = [role.backend for role in roles if is_forwarding(role.backend)]
    pools = [role.backend.pool for role in roles if isinstance(role.backend, PoolBackend)]
    return [*found, *(member.backend for pool in pools for member, _ in pool.members())]
