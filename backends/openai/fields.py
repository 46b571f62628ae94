"""What an upstream is sent beside the request: who asks, how urgent it is, what is predicted, by the kind of server."""

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
from agentspec.types import Labels, check_latency_goal

Order = Literal["lowest_first", "highest_first"]
SESSION, PRIORITY, XARGS = "session_id", "priority", "vllm_xargs"
# Which end of the scale each kind serves first, unless its flags say otherwise.
ORDERS: Mapping[str, Order] = {"vllm": "lowest_first", "sglang": "highest_first"}
_SESSION_KINDS = ("vllm", "sglang")
# The field in which our drafter inside a server is told switches, and the routes that have it.
_SWITCHES = {"vllm": (XARGS, (CHAT, COMPLETIONS, RESPONSES)), "sglang": ("custom_params", (CHAT, COMPLETIONS))}
GOAL = "latency_target_ms_per_token"
"""The field of a body that holds the milliseconds per token after the first."""
LATENCY = "agentspec_latency_ms_per_token"
"""Its name in `vllm_xargs`, which `backends/vllm/proposer.py` reads."""
PREDICTION = "agentspec_prediction"
"""The name in `vllm_xargs` of the prediction's token ids, which `backends/vllm/proposer.py` reads."""
MAX_PREDICTED = 32_768
TOKENIZE_SECONDS = 2.0


def label_fields(labels: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that carry `labels` to our drafter in a vLLM server, in a body that already has the fields `given`.

    The client's own `vllm_xargs` stay, except the names that `labels` sets. If the client's are not an object, they are
    left for the server to refuse.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    ours = {f"agentspec_{name}": value for name, value in named.items() if value}
    theirs = given.get(XARGS) or {}
    return {XARGS: {**theirs, **ours}} if ours and isinstance(theirs, Mapping) else {}


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


def session_fields(kind: ServerKind | None, session: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The body's name of the session, for servers that know one; a client's own stays, unless it must be replaced."""
    if session is None or kind not in _SESSION_KINDS or given.get(SESSION) == session:
        return {}
    return {SESSION: session}


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
    order = ORDERS.get(kind or "") if settings.priority == "auto" else settings.priority
    if order is None:
        message = "priority cannot be told to this upstream: it is not known which end of the scale it serves first"
        raise InvalidRequestError(message, param=PRIORITY)
    return {PRIORITY: value if order == "lowest_first" else -value}


def goal_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` of a body with the fields `given`, with its latency goal; the client's own argument stays.

    Raises `InvalidRequestError` for a goal that is no number above 0.
    """
    goal, theirs = given[GOAL], given.get(XARGS) or {}
    check_latency_goal(goal)
    if not isinstance(theirs, Mapping) or LATENCY in theirs:
        return {}
    return {XARGS: {**theirs, LATENCY: float(goal)}}


async def prediction_fields(endpoint: Endpoint, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_xargs` of a body with the fields `given`, with the token ids of its `prediction`; empty without one.

    The server itself turns the text into tokens (`/tokenize`). If it cannot, the request goes without: only drafts are
    lost.
    """
    theirs = given.get(XARGS) or {}
    if given.get("prediction") is None or not isinstance(theirs, Mapping) or PREDICTION in theirs:
        return {}
    try:
        most = _most_tokens(given)
        text = parse_prediction(given["prediction"])[: most * TOKEN_CHARACTERS]
        tokens = await ServerTokenization(endpoint, model, TOKENIZE_SECONDS).tokenize(text)
    except (UpstreamError, InvalidRequestError):
        return {}
    return {XARGS: {**theirs, PREDICTION: tokens[:most]}} if tokens else {}


def _most_tokens(given: Mapping[str, Any]) -> int:
    """How many tokens the answer may have."""
    bounds = [given.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return min([MAX_PREDICTED, *(one for one in bounds if type(one) is int and one > 0)])
