"""Counts model calls on the step that makes them, for `agentspec.report()`, and sends their labels to a gateway."""

from __future__ import annotations

import html
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from agentspec.protocol.headers import label_headers
from agentspec.protocol.policy import StepPolicy
from agentspec.step.scope import current, current_labels, current_policy, entered
from agentspec.step.statistics import StepRow, StepStatistics
from agentspec.telemetry.tracing import trace_headers
from agentspec.types import Labels, Speculation, Usage

NO_STEP = "(no step)"
_NAMES = 2  # columns of names; the others are numbers
_GAP = 2  # blanks between columns


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A snapshot of the statistics. `print(report)` shows a table as wide as the terminal, a notebook all columns."""

    rows: tuple[StepRow, ...]
    statistics: StepStatistics

    def __iter__(self) -> Iterator[StepRow]:
        return iter(self.rows)

    def reset(self) -> None:
        """Delete the counts of the process. This snapshot keeps its rows."""
        self.statistics.reset()

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns
        columns = [[title, *(_cell(row, field) for row in self.rows)] for title, field in _COLUMNS]
        columns[:_NAMES] = [[_cut(cell, width // 5) for cell in names] for names in columns[:_NAMES]]
        shown = _fitting(columns, width)
        widths = [max(map(len, columns[number])) for number in shown]
        lines = zip(*(columns[number] for number in shown), strict=True)
        text = [(" " * _GAP).join(map(_aligned, line, widths, shown)).rstrip() for line in lines]
        if left := [title for number, (title, _) in enumerate(_COLUMNS) if number not in shown]:
            text += ["", _cut(f"Not shown: {', '.join(left)}", width)]
        return "\n".join(text if any(row.calls for row in self.rows) else [*text, _UNCOUNTED])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{title}</th>" for title, _ in _COLUMNS)
        rows = ("".join(f"<td>{html.escape(_cell(row, field))}</td>" for _, field in _COLUMNS) for row in self.rows)
        return f"<table><tr>{heads}</tr>{''.join(f'<tr>{cells}</tr>' for cells in rows)}</table>"


_UNCOUNTED = (
    "no model call was counted: ChatAgentSpec counts its own, AgentSpecMiddleware those of an agent of LangChain"
)
_COLUMNS = (
    ("workflow", "workflow"),
    ("step", "step"),
    ("runs", "runs"),
    ("errors", "errors"),
    ("seconds", "seconds"),
    ("calls", "calls"),
    ("failed", "failed_calls"),
    ("model s", "model_seconds"),
    ("prompt", "prompt_tokens"),
    ("tokens", "completion_tokens"),
    ("forwards", "verify_steps"),  # a step is one of a workflow here
    ("tokens/forward", "tokens_per_step"),
    ("rounds", "rounds"),
    ("drafted", "drafted"),
    ("accepted", "accepted"),
    ("delegated", "delegated_tokens"),
    ("early tools", "early_tools"),
    ("est. s saved", "estimated_seconds_saved"),
)
# Those that a narrow terminal shows first.
_FIRST = ("calls", "tokens", "errors", "failed", "est. s saved", "tokens/forward", "forwards", "model s", "accepted")


def _fitting(columns: list[list[str]], width: int) -> list[int]:
    """The positions of the columns that fit: names, then those that say something, the first of them first."""

    def rank(number: int) -> tuple[bool, int]:
        title, *cells = columns[number]
        return {*cells} <= {"0", "0.00", "-"}, _FIRST.index(title) if title in _FIRST else len(_FIRST)

    shown = list(range(_NAMES))
    for number in sorted(range(_NAMES, len(columns)), key=rank):
        if sum(max(map(len, columns[one])) + _GAP for one in (*shown, number)) - _GAP <= width:
            shown.append(number)
    return sorted(shown)


def _cell(row: StepRow, field: str) -> str:
    """A value as the table shows it; a lone surrogate in a name becomes a question mark."""
    value = getattr(row, field)
    if value is None:
        value = NO_STEP if field == "step" else "-"
    return (f"{value:.2f}" if isinstance(value, float) else str(value)).encode("utf-8", "replace").decode()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < _NAMES else cell.rjust(width)


@dataclass(slots=True)
class CallMeter:
    """What a model call cost: `usage` as its answer says, unless `observe` has counted it while it was made."""

    usage: Usage | None = None
    counted: bool = False


statistics = StepStatistics()
_meter: ContextVar[CallMeter | None] = ContextVar("agentspec_meter", default=None)


@contextmanager
def model_call(labels: Labels, policy: StepPolicy, early_tools: int = 0) -> Iterator[CallMeter]:
    """Label the model call made inside, and count it once: by the meter unless the model's client counts it.

    Labels that are None are inherited, and so is what `policy` leaves open. `early_tools` were used before the call.
    """
    meter, began, failed, outer = CallMeter(), time.perf_counter(), False, _meter.get()
    scope = replace(current.get().narrowed(labels, policy), early_tools=early_tools)
    if early_tools:
        statistics.add((scope.labels.workflow, scope.labels.step), early_tools=early_tools)
    _meter.set(meter)
    try:
        with entered(scope):
            yield meter
    except Exception:
        failed = True
        raise
    finally:
        _meter.set(outer)
        if not meter.counted:
            observe(meter.usage, None, time.perf_counter() - began, labels=scope.labels, failed=failed)


@contextmanager
def unmetered() -> Iterator[None]:
    """Calls made inside are counted apart from the model call that surrounds the block."""
    outer = _meter.get()
    _meter.set(None)
    try:
        yield
    finally:
        _meter.set(outer)


def observe(
    usage: Usage | None,
    speculation: Speculation | None,
    seconds: float,
    *,
    labels: Labels | None = None,
    failed: bool = False,
) -> None:
    """Count one model call of `seconds` seconds on the current step, or on the step that `labels` names."""
    labels = current_labels() if labels is None else labels
    if (meter := _meter.get()) is not None:
        meter.counted = True
    statistics.add_call((labels.workflow, labels.step), usage, speculation, seconds, failed_calls=failed)


def report() -> Report:
    """What each step cost so far in this process, and what speculation did for it."""
    return Report(tuple(statistics.rows()), statistics)


def headers() -> dict[str, str]:
    """The headers that send the current labels, policy and trace to a gateway. What is not ASCII is percent-encoded."""
    policy = current_policy()
    speculation, store = policy.speculation is not False, policy.store is not False
    early = current.get().early_tools
    labels = label_headers(current_labels(), speculation=speculation, store=store, early_tools=early, keep=" ")
    return labels | policy.headers() | trace_headers()


def httpx_hooks() -> dict[str, list[Callable[[Any], Any]]]:
    """`event_hooks` for a synchronous httpx or httpx2 client, such as the one inside an OpenAI client.

    Requests get the current labels and policy as headers.
    """
    return {"request": [_send_labels]}


def async_httpx_hooks() -> dict[str, list[Callable[[Any], Any]]]:
    """`httpx_hooks` for an asynchronous client."""

    async def label(request: Any) -> None:
        _send_labels(request)

    return {"request": [label]}


def _send_labels(request: Any) -> None:
    for name, value in headers().items():
        request.headers.setdefault(name, value)
