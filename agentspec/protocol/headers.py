"""The `x-agentspec-*` headers: a request's labels, switches and policy, and the strategy that wrote an answer."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote, unquote

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, Labels

PREFIX = "x-agentspec-"
MAX_LABEL = 256
MAX_PRIORITY = 2**31 - 1
STRATEGY_HEADER = f"{PREFIX}strategy"
PREFILL_HEADER = f"{PREFIX}prefill"
_REQUEST_NAMES = (
    *("session", "workflow", "step", "speculation", "store", "prefill", "strategy"),
    *("latency-ms-per-token", "deadline-s", "priority"),
)
_NEAR = 0.75  # from this ratio on difflib takes one name for a misspelt other
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_LABEL


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_priority(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_PRIORITY


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("strategy", "model"), (f"a name of 1 to {MAX_LABEL} characters", _is_name)),
    **dict.fromkeys(("latency_ms_per_token", "deadline_s"), ("a number above 0", _is_above_0)),
    "priority": ("a whole number from 0, served first", _is_priority),
    **dict.fromkeys(("store", "speculation"), ("true or false", _is_switch)),
}


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How the model calls of a step are to be served. None of it changes what a model would answer, but the choice of
    `model` and of `strategy`. What is None is left to the step or workflow around it.

    `strategy` is a kind of strategy ("specreason"), the name of a `[models.NAME]` table with one, or "plain" for none.
    `latency_ms_per_token` is what a stream should keep after its first token, `deadline_s` the seconds from now in
    which the step should be over: both are goals, and no call is refused for them. Calls with a lower `priority` are
    served first; 0 is the first. `store=False` keeps no tokens, `speculation=False` drafts none.

    Raises `InvalidRequestError`, with `param` naming the field, for a value outside its range.
    """

    strategy: str | None = None
    model: str | None = None
    latency_ms_per_token: float | None = None
    deadline_s: float | None = None
    priority: int | None = None
    store: bool | None = None
    speculation: bool | None = None

    def __post_init__(self) -> None:
        for name, (rule, holds) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise InvalidRequestError(f"{name} must be {rule}, not {value!r:.100}", param=name)

    def inside(self, around: StepPolicy) -> StepPolicy:
        """This policy, with what it leaves open taken from the policy `around` it."""
        names = [field.name for field in fields(self)]
        return StepPolicy(**{name: _given(getattr(self, name), getattr(around, name)) for name in names})

    def headers(self) -> dict[str, str]:
        """The headers that carry all but the model, which a request names, and the switches, which have their own."""
        given = {} if self.strategy is None else {f"{PREFIX}strategy": quote(self.strategy, safe=_PRINTABLE)}
        numbers = {name: getattr(self, name) for name in ("latency_ms_per_token", "deadline_s", "priority")}
        return given | {_header(name): f"{value:.10g}" for name, value in numbers.items() if value is not None}


ANY = StepPolicy()


def label_headers(
    labels: Labels, *, speculation: bool = True, store: bool = True, prefill: bool = True, keep: str = ""
) -> dict[str, str]:
    """Labels and switches as headers. `%`, blanks and non-ASCII characters not in `keep`, and blanks at either end, are
    percent-encoded. A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    """
    named = {field.name: getattr(labels, field.name) for field in fields(labels)}
    headers = {f"{PREFIX}{name}": _quoted(value, keep) for name, value in named.items() if value}
    switches = {"speculation": speculation, "store": store, "prefill": prefill}
    return headers | {f"{PREFIX}{name}": "off" for name, on in switches.items() if not on}


def read_labels(headers: Mapping[str, str]) -> Labels:
    """The labels of a request. Raises `InvalidRequestError` that names the wrong header."""
    return Labels(**{field.name: _label(headers, field.name) for field in fields(Labels)})


def read_switch(headers: Mapping[str, str], name: str) -> bool:
    """A switch, which is on unless its header says `off`. Raises `InvalidRequestError` for another value."""
    header = PREFIX + name
    value = headers.get(header, "on").strip().lower()
    if value not in ("on", "off"):
        raise InvalidRequestError(f"{header} must be 'on' or 'off'", param=header)
    return value == "on"


def switched_off(*, store: bool, speculation: bool) -> tuple[str, ...]:
    """The names of the switches that are off for a request."""
    return tuple(name for name, on in (("store", store), ("speculation", speculation)) if not on)


def read_policy(headers: Mapping[str, str]) -> StepPolicy:
    """The policy in a request's headers (lower case). Raises `InvalidRequestError` that names the wrong header."""
    read: dict[str, Any] = {
        "strategy": _label(headers, "strategy"),
        "latency_ms_per_token": _number(headers, "latency_ms_per_token", float),
        "deadline_s": _number(headers, "deadline_s", float),
        "priority": _number(headers, "priority", int),
    }
    if all(value is None for value in read.values()):
        return ANY
    try:
        return StepPolicy(**read)
    except InvalidRequestError as error:
        header = _header(str(error.param))
        raise InvalidRequestError(error.message.replace(str(error.param), header, 1), param=header) from None


def policy_of(request: GenerateRequest) -> StepPolicy:
    """What `request` asks of the gateway that may answer it."""
    return StepPolicy(
        strategy=request.strategy,
        latency_ms_per_token=request.latency_target_ms_per_token,
        deadline_s=request.deadline_s,
        priority=request.priority or None,
    )


def refuse_misspelt(headers: Iterable[str]) -> None:
    """Raise `InvalidRequestError` for a header (lower case) with a name that is nearly one of ours: a store that should
    be off would be on. Other names may belong to an upstream.
    """
    for header in headers:
        name = header[:MAX_LABEL].removeprefix(PREFIX)
        if name in _REQUEST_NAMES or not header.startswith(PREFIX):
            continue
        if near := difflib.get_close_matches(name, _REQUEST_NAMES, n=1, cutoff=_NEAR):
            hint = f"no header {header[:80]!r} is known; did you mean {PREFIX + near[0]!r}?"
            raise InvalidRequestError(hint, param=header[:80])


def strategy_headers(summary: str, *, lossy: bool, speculation: bool) -> dict[str, str]:
    """The header that names an answer's strategy: `lossy` if the answer may differ from the base model's."""
    if not lossy:
        return {f"{PREFIX}lossless": summary}
    return {f"{PREFIX}lossy": summary} if speculation else {}


def _label(headers: Mapping[str, str], name: str) -> str | None:
    """The label in the header of ours that ends in `name`, percent-decoded; None if it is empty."""
    header = PREFIX + name
    given = headers.get(header, "")
    if not given.isascii():
        raise InvalidRequestError(f"{header} must be percent-encoded UTF-8, as in %C3%A9", param=header)
    try:
        value = unquote(given, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{header} is not percent-encoded UTF-8", param=header) from None
    if len(value) > MAX_LABEL or not value.isprintable():
        raise InvalidRequestError(f"{header} must be at most {MAX_LABEL} printable characters", param=header)
    return value or None


def _quoted(value: str, keep: str) -> str:
    text = quote(value, _PRINTABLE + keep, errors="replace")
    return re.sub("^ +| +$", lambda blanks: "%20" * len(blanks[0]), text)


def _number(headers: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float | None:
    given = headers.get(_header(name), "").strip()
    try:
        return kind(given) if given else None
    except ValueError:
        raise InvalidRequestError(f"{_header(name)} must be a number", param=_header(name)) from None


def _header(name: str) -> str:
    return PREFIX + name.replace("_", "-")


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
