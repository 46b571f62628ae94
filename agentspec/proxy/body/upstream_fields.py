"""Checks which fields of a request an upstream may get.

Fields must be on the list (`allowed_fields.py`). Values that a server may fetch, in media, in tools and in fields that
are no text, may not name an address, since they could make the upstream connect elsewhere. Texts, and schemas for
texts, are passed on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from starlette.types import Scope

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError, suggestion
from agentspec.proxy.body import allowed_fields as allowed

_HEAD = 256  # characters of a value that decide what it is
# What URL parsers skip: blanks and controls in front, tabs and line ends everywhere.
_SKIPPED = re.compile("[\t\r\n]|^[\x00-\x20\x7f\ufeff\u200b-\u200f\u2060]+")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:[/\\]|[/\\]{2}|(?:file|gopher|dict|ldap|jar|netdoc|unix):", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]*+")
_SAFE_URL = re.compile(r"[!-\[\]-~]+")  # printable ASCII without blanks and backslashes, which parsers read differently
_PORTS = {"http": 80, "https": 443}


def is_address(text: str) -> bool:
    """Whether `text` begins like a URL of any scheme, or like a network path. A `data:` URL names no place."""
    start = text[:_HEAD]
    if start.isascii() and ":" not in start and "/" not in start and "\\" not in start:
        return False
    return _ADDRESS.match(_head(text)) is not None


def is_inline(text: str) -> bool:
    return _head(text)[:5].lower() == "data:"


def is_on(url: str, hosts: Set[str]) -> bool:
    """Whether `url` is an http or https URL on one of `hosts`: names in lower case, with `:port` for unusual ports."""
    if not hosts or not _SAFE_URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    usual = _PORTS.get(parts.scheme)
    if usual is None or not parts.hostname or "@" in parts.netloc:
        return False
    return (parts.hostname if port in (None, usual) else f"{parts.hostname}:{port}") in hosts


def _head(text: str) -> str:
    head = text[:_HEAD]
    return _SKIPPED.sub("", head if head.isascii() else unicodedata.normalize("NFKC", head))


MAX_QUERY_BYTES = 8192
_QUERY = re.compile(rb"[!-~]*")
# Azure's version, Anthropic's `?beta=true`, and what lists and streams are asked for by their page and place.
_NAMES = frozenset(
    "api-version beta stream include include[] starting_after limit after before after_id before_id order".split()
)


def check_query(scope: Scope) -> None:
    """Raise `InvalidRequestError` for a query that an HTTP client could not send, or that names another address."""
    query: bytes = scope.get("query_string", b"")
    if len(query) > MAX_QUERY_BYTES or not _QUERY.fullmatch(query):
        raise InvalidRequestError(f"the query must be at most {MAX_QUERY_BYTES} percent-encoded ASCII characters")
    for name, text in parse_qsl(query.decode(), keep_blank_values=True, errors="replace"):
        if name not in _NAMES or is_address(text):
            shown = _shown(name)
            raise InvalidRequestError(f"the query parameter {shown!r} is unknown or holds an address", param=shown)


class UpstreamFields:
    def __init__(self, settings: OpenAISettings) -> None:
        self._hosts = frozenset(host.lower() for host in settings.allow_media_hosts)
        self._kinds = {"vllm", "sglang"} if settings.server_kind == "auto" else {settings.server_kind} - {"other"}
        self._added = frozenset(settings.allow_fields) | ({"priority"} if settings.priority != "off" else set())
        self._arguments = allowed.TEMPLATE_ARGUMENTS | set(settings.allow_fields)

    def check(self, fields: Mapping[str, Any], path: str) -> None:
        """Raise `InvalidRequestError` that names the field for what is not allowed in a request to `path`. Takes time
        and memory linear in the size of `fields`.
        """
        if is_address(str(fields.get("model", ""))):
            raise InvalidRequestError("model must be a name, not an address", param="model")
        self._check_names(fields, path)
        self.check_template_arguments(fields.get("chat_template_kwargs"))
        for name in ("tools", "input"):
            self._check_tools(fields.get(name), name)
        for name, value in fields.items():
            if name not in allowed.TEXT_FIELDS:
                self._walk({name: value}, allowed.REGIONS.get(name, allowed.OTHER))

    def check_template_arguments(self, arguments: Any) -> None:
        """Raise `InvalidRequestError` for an argument of the chat template that is not allowed."""
        for name in arguments if isinstance(arguments, dict) else ():
            if name not in self._arguments:
                param = f"chat_template_kwargs.{_shown(str(name))}"
                raise InvalidRequestError(
                    f"{param} is not among the template arguments that may be set (allow_fields of the backend)",
                    param=param,
                )

    def _check_names(self, fields: Mapping[str, Any], path: str) -> None:
        api = allowed.BY_API.get(path, allowed.OTHER_ROUTES)
        known = api.union(self._added, *(allowed.BY_KIND[kind] for kind in self._kinds))
        for name in fields:
            if name not in known:
                raise _refused(name, suggestion(name, known))
        metadata = fields.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise InvalidRequestError("metadata must be an object", param="metadata")
        for parent, inner in (("metadata", metadata), ("vllm_xargs", fields.get("vllm_xargs"))):
            for name in inner if isinstance(inner, dict) else ():
                if name in allowed.TRANSFERS or (parent == "metadata" and allowed.ACCOUNTS.fullmatch(name[:128])):
                    raise _refused(f"{parent}.{name}")

    def _check_tools(self, tools: Any, path: str) -> None:
        """Check the types of tools, and of those inside them: in namespaces, and in items of the conversation."""
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            place = f"{path}[{index}]"
            if not isinstance(tool, dict):
                continue
            kind = tool.get("type")
            if path != "input" and isinstance(kind, str) and not self._is_tool(kind):
                raise _refused(f"{place}.type")
            self._check_tools(tool.get("tools"), f"{place}.tools")

    def _is_tool(self, kind: str) -> bool:
        """Whether the type is known. Those of Anthropic's and some of OpenAI's tools end in a date."""
        return (
            kind in allowed.TOOL_TYPES or kind in self._added or re.fullmatch(r"[a-z_]+_\d[\d_]{7,9}", kind) is not None
        )

    def _walk(self, value: Any, region: allowed.Region, nearest: str = "", path: str = "") -> None:
        """Check all strings in an object or array, in order; `nearest` is the last name on the way to it."""
        named = type(value) is dict
        text = _text_of(value) if named else frozenset()
        for key, one in cast("Iterable[tuple[Any, Any]]", value.items() if named else enumerate(value)):
            name = key if named else nearest
            if region.media and named and allowed.TENSORS.fullmatch(key) and key not in self._added:
                raise _refused(_below(path, key))
            if type(one) is str:
                if name not in region.text and key not in text and not self._is_harmless(one, name, region):
                    where, shown = _below(path, key), allowed.MEDIA | allowed.ENCODED
                    wanted = "must be a data: URL" if region.media and name in shown else "may not name an address"
                    raise InvalidRequestError(f"{where} {wanted} (allow_media_hosts of the backend)", param=where)
            elif type(one) in (dict, list) and key not in region.skipped:
                self._walk(one, region.inner.get(key, region), name, _below(path, key))

    def _is_harmless(self, text: str, nearest: str, region: allowed.Region) -> bool:
        """Whether a server that reads this string fetches nothing, or from allowed hosts alone."""
        media = region.media
        if media and nearest in allowed.MEDIA:
            harmless = is_inline(text)
        elif media and nearest in allowed.ENCODED:
            harmless = is_inline(text) or _BASE64.fullmatch(text) is not None
        elif media and nearest == "type":
            harmless = not allowed.TENSORS.fullmatch(text) or text in self._added
        else:
            harmless = not is_address(text)
        return harmless or is_on(text, self._hosts)


def _text_of(value: Mapping[str, Any]) -> Set[str]:
    kind = value.get("type")
    return allowed.TEXT_BY_TYPE.get(kind, frozenset()) if isinstance(kind, str) else frozenset()


def _refused(path: str, hint: str = "") -> InvalidRequestError:
    path = _shown(path)
    if path == "priority":
        why = "it would go before others' requests (priority of the backend lets clients stand back)"
    else:
        why = f"it is not among the fields that are passed on{hint} (allow_fields of the backend adds one)"
    return InvalidRequestError(f"{path} is refused: {why}", param=path)


def _below(path: str, key: object) -> str:
    """The dotted path of a value in the one at `path`."""
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{_shown(str(key))}".removeprefix(".")


def _shown(name: object) -> str:
    return str(name)[:80].encode("ascii", "replace").decode()
