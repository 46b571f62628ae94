"""Counts model calls on the step that makes them, and sends their labels and policy to a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentspec.protocol.headers import StepPolicy, label_headers
from agentspec.step.report import Report, StepStatistics
from agentspec.step.scope import current, current_labels, current_policy, current_speculation, entered
from agentspec.types import Labels, Speculation, Usage


@dataclass(slots=True)
class CallMeter:
    """What a model call cost: `usage` as its answer says, unless `observe` has counted it while it was made."""

    usage: Usage | None = None
    counted: bool = False


statistics = StepStatistics()
_meter: ContextVar[CallMeter | None] = ContextVar("agentspec_meter", default=None)


@contextmanager
def model_call(labels: Labels, policy: StepPolicy) -> Iterator[CallMeter]:
    """Label the model call made inside, and count it once: by the meter unless the model's client counts it.

    Labels that are None are inherited, and so is what `policy` leaves open.
    """
    meter, began, failed, outer = CallMeter(), time.perf_counter(), False, _meter.get()
    scope = current.get().narrowed(labels, policy)
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
    statistics.add_call((labels.workflow, labels.step), usage, speculation, seconds, failed=failed)


def report() -> Report:
    """What each step cost so far in this process, and what speculation did for it."""
    return Report(tuple(statistics.rows()), statistics)


def headers(labels: Labels | None = None, *, speculation: bool | None = None) -> dict[str, str]:
    """The headers that send `labels`, by default the current ones, and the current policy to a gateway.

    What is not ASCII is percent-encoded.
    """
    labels = current_labels() if labels is None else labels
    speculation = current_speculation() if speculation is None else speculation
    policy = current_policy()
    named = label_headers(labels, speculation=speculation is not False, store=policy.store is not False, keep=" ")
    return named | policy.headers()


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
