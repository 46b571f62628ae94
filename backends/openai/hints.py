"""What an upstream is told about who asks and how urgent it is, in the words of each kind of server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal
from urllib.parse import quote

from agentspec.backends.base import CHAT, COMPLETIONS, RESPONSES
from agentspec.backends.openai.server_kind import ServerKind
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.protocol.headers import SESSION_FINAL, SESSION_PARENT

Order = Literal["lowest_first", "highest_first"]
SESSION, PRIORITY, NVEXT = "session_id", "priority", "nvext"
# Which end of the scale each kind serves first, unless its flags say otherwise.
ORDERS: Mapping[str, Order] = {"vllm": "lowest_first", "sglang": "highest_first"}
_SESSION_KINDS = ("vllm", "sglang")
# The field in which our drafter inside a server is told switches, and the routes that have it.
_SWITCHES = {"vllm": ("vllm_xargs", (CHAT, COMPLETIONS, RESPONSES)), "sglang": ("custom_params", (CHAT, COMPLETIONS))}


def session_fields(kind: ServerKind | None, session: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The body's name of the session, for servers that know one; a client's own stays, unless it must be replaced."""
    if session is None or kind not in _SESSION_KINDS or given.get(SESSION) == session:
        return {}
    return {SESSION: session}


def switched_off(*, store: bool, speculation: bool) -> tuple[str, ...]:
    """The names of the switches that are off for a request."""
    return tuple(name for name, on in (("store", store), ("speculation", speculation)) if not on)


def takes_switches(kind: str | None, path: str) -> bool:
    """Whether a server of that kind can be told, at that route, what is switched off for a request."""
    return kind in _SWITCHES and path in _SWITCHES[kind][1]


def switch_fields(kind: ServerKind | None, path: str, off: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The field that tells our drafter what is `off`: `store`, `speculation`. One that is no object is left for the
    server to refuse.
    """
    if kind is None or not takes_switches(kind, path):
        return {}
    field = _SWITCHES[kind][0]
    theirs = given.get(field) or {}
    return {field: {**theirs, **{f"agentspec_{name}": "off" for name in off}}} if isinstance(theirs, Mapping) else {}


def priority_fields(settings: OpenAISettings, kind: ServerKind | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """`priority`, which a client gives as 0, served first, or more, on the scale of the server.

    Raises `InvalidRequestError` for another value, and where the server's scale is not known.
    """
    value = given.get(PRIORITY)
    if value is None or settings.priority == "off":
        return {}
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidRequestError("priority must be a whole number from 0, served first", param=PRIORITY)
    if settings.server_kind == "dynamo":
        return {PRIORITY: None, **hint_fields({"priority": -value}, given)}
    order = ORDERS.get(kind or "") if settings.priority == "auto" else settings.priority
    if order is None:
        message = "priority cannot be told to this upstream: it is not known which end of the scale it serves first"
        raise InvalidRequestError(message, param=PRIORITY)
    return {PRIORITY: value if order == "lowest_first" else -value}


def hint_fields(hints: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Dynamo's hints about a request, beside those that the client gives itself."""
    own = given.get(NVEXT) or {}
    theirs = own.get("agent_hints") or {} if isinstance(own, Mapping) else None
    if not hints or not isinstance(theirs, Mapping):
        return {}
    return {NVEXT: {**own, "agent_hints": {**hints, **theirs}}}


def session_headers(
    settings: OpenAISettings, kind: ServerKind | None, session: str | None, parent: str | None, final: str
) -> dict[str, str]:
    """The headers by which routers keep a session on one server: its name, that of its `parent`, and whether the client
    says that this is its last request (`final`).
    """
    if session is None or not settings.session_names:
        return {}
    name = _as_header(session)
    told = dict.fromkeys(settings.session_headers, name)
    if kind == "sglang":
        told["x-smg-routing-key"] = name
    if settings.server_kind == "dynamo":
        told |= {"x-dynamo-session-id": name} | ({SESSION_PARENT: _as_header(parent)} if parent else {})
        told |= {SESSION_FINAL: final} if final in ("true", "false") else {}
    return told


def _as_header(name: str) -> str:
    return quote(name, safe=" !#$&'()*+,/:;=?@[]")
