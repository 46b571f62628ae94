"""The fields added to a request by the kind of server: labels, priority, prediction, switches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal

from agentspec.backends.base import CHAT, COMPLETIONS, RESPONSES
from agentspec.backends.http import Endpoint
from agentspec.backends.openai.server_kind import ServerKind
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.prediction import TOKEN_CHARACTERS
from agentspec.protocol.messages import parse_prediction
from agentspec.types import Labels

Order = Literal["lowest_first", "highest_first"]
SESSION, PRIORITY, XARGS = "session_id", "priority", "vllm_xargs"
# The end of the scale that each kind serves first, unless its flags say otherwise.
ORDERS: Mapping[str, Order] = {"vllm": "lowest_first", "sglang": "highest_first"}
# The field that carries switches to our drafter inside a server, and the routes that have it.
_SWITCHES = {"vllm": (XARGS, (CHAT, COMPLETIONS, RESPONSES)), "sglang": ("custom_params", (CHAT, COMPLETIONS))}
PREDICTION = "agentspec_prediction"  # its token ids in `vllm_xargs`, which `backends/vllm/proposer.py` reads
MAX_PREDICTED = 32_768
TOKENIZE_SECONDS = 2.0


def label_fields(labels: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that carry `labels` to our drafter in a vLLM server, in a body that already has the fields `given`."""
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    return _added(XARGS, {f"agentspec_{name}": value for name, value in named.items() if value}, given)


def _added(name: str, ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The object `name` of a body with the fields `given`, with `ours` added; the client's other members stay. If the
    client's is no object, nothing is added, so that the server refuses it.
    """
    theirs = given.get(name) or {}
    return {name: {**theirs, **ours}} if ours and isinstance(theirs, Mapping) else {}


def labels_in(given: Mapping[str, Any]) -> Labels:
    """The labels that a body with the fields `given` carries already."""
    theirs = given.get(XARGS)
    if not isinstance(theirs, Mapping):
        return Labels()
    found = {field.name: theirs.get(f"agentspec_{field.name}") for field in fields(Labels)}
    return Labels(**{name: str(value) for name, value in found.items() if value})


def token_id_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for token ids in the answer. Empty with `echo`, since token ids would replace its text."""
    return {} if "return_token_ids" in given or given.get("echo") else {"return_token_ids": True}


def system_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The messages with the role `user` for system messages further on, each where it stands."""
    messages = given.get("messages")
    if not isinstance(messages, list):
        return {}
    later = [isinstance(one, Mapping) and one.get("role") in ("system", "developer") for one in messages[1:]]
    changed = [
        {**one, "role": "user"} if is_system else one for is_system, one in zip(later, messages[1:], strict=True)
    ]
    return {"messages": [messages[0], *changed]} if any(later) else {}


def takes_switches(kind: str | None, path: str) -> bool:
    """Whether requests of that route can carry switches to a server of that kind."""
    return kind in _SWITCHES and path in _SWITCHES[kind][1]


def switch_fields(kind: ServerKind | None, path: str, off: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The field that carries to our drafter what is `off`: `store`, `share`, `speculation`."""
    if kind is None or not takes_switches(kind, path):
        return {}
    return _added(_SWITCHES[kind][0], {f"agentspec_{name}": "off" for name in off}, given)


def priority_fields(settings: OpenAISettings, kind: ServerKind | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """`priority`, which a client gives as 0, served first, or more, on the scale of the server.

    Raises `InvalidRequestError` for another value, and where the server's scale is not known.
    """
    value = given.get(PRIORITY)
    if value is None or settings.priority == "off":
        return {}
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidRequestError("priority must be a whole number from 0, served first", param=PRIORITY)
    order = ORDERS.get(kind or "") if settings.priority == "auto" else settings.priority
    if order is None:
        message = "priority cannot be sent to this upstream: it is not known which end of the scale it serves first"
        raise InvalidRequestError(message, param=PRIORITY)
    return {PRIORITY: value if order == "lowest_first" else -value}


async def prediction_fields(endpoint: Endpoint, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` with the token ids of the body's `prediction`, as the server's `/tokenize` makes them. If it cannot,
    the request is sent without: only drafts are lost.
    """
    theirs = given.get(XARGS)
    if isinstance(theirs, Mapping) and PREDICTION in theirs:
        return {}
    try:
        most = _most_tokens(given)
        text = parse_prediction(given["prediction"])[: most * TOKEN_CHARACTERS]
        tokens = await ServerTokenization(endpoint, model, TOKENIZE_SECONDS).tokenize(text)
    except (UpstreamError, InvalidRequestError):
        return {}
    return _added(XARGS, {PREDICTION: tokens[:most]}, given) if tokens else {}


def _most_tokens(given: Mapping[str, Any]) -> int:
    """How many tokens the answer may have."""
    bounds = [given.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return min([MAX_PREDICTED, *(one for one in bounds if type(one) is int and one > 0)])
