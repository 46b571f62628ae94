"""`@step` labels the model calls inside a function with their step and workflow, and counts what they cost.

Labels are context variables, so they follow asyncio tasks, and threads started through `copy_context`.
`ChatAgentSpec` reads the labels itself; a plain OpenAI client needs `httpx_hooks`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

from agentspec.protocol.headers import label_headers
from agentspec.step.report import Report, StepRow, StepStatistics
from agentspec.step.response_tap import ResponseTap, tap
from agentspec.types import Labels, Speculation, Usage

__all__ = [
    "Report",
    "StepRow",
    "async_httpx_hooks",
    "current_labels",
    "current_model",
    "current_speculation",
    "headers",
    "httpx_hooks",
    "observe",
    "report",
    "step",
    "workflow",
]

WORKFLOW_KEY = "agentspec_workflow"  # key in a LangChain run's metadata for the workflow of its model calls
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Scope:
    labels: Labels
    speculation: bool | None
    model: str | None = None


@dataclass(slots=True)
class CallMeter:
    """What a model call cost: `usage` as its answer says, unless `observe` has counted it while it was made."""

    usage: Usage | None = None
    counted: bool = False


_OUTSIDE = _Scope(Labels(), None)
_scope: ContextVar[_Scope] = ContextVar("agentspec_scope", default=_OUTSIDE)
_meter: ContextVar[CallMeter | None] = ContextVar("agentspec_meter", default=None)
_statistics = StepStatistics()


def step(
    name: str,
    *,
    workflow: str | None = None,
    session: str | None = None,
    speculation: bool | None = None,
    model: str | None = None,
) -> Callable[[F], F]:
    """Decorate a function, coroutine function or (async) generator function; its model calls carry these labels.

    Omitted labels are inherited from the step or workflow around the call. `speculation=False` turns drafting off
    inside; it never changes an answer. Inside, `ChatAgentSpec` uses `model` instead of its own model, unless a call
    names one. The function keeps its signature, so LangGraph still accepts it as a node.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'write @step("name") with a name that is not empty, not {name!r}')

    def inner() -> _Scope:
        return _narrowed(step=name, workflow=workflow, session=session, speculation=speculation, model=model)

    def decorate(function: F) -> F:
        wrap = _function
        if inspect.isasyncgenfunction(function):
            wrap = _async_generator
        elif inspect.isgeneratorfunction(function):
            wrap = _generator
        elif inspect.iscoroutinefunction(function):
            wrap = _coroutine
        return cast(F, wrap(function, inner))

    return decorate


@contextmanager
def workflow(name: str, *, session: str | None = None, speculation: bool | None = None) -> Iterator[None]:
    """Label every model call inside the block with this workflow and, if given, session."""
    around = _scope.get()
    _scope.set(_narrowed(workflow=name, session=session, speculation=speculation))
    try:
        yield
    finally:
        _scope.set(around)  # not reset(): a block in an asynchronous generator may end in another context


@contextmanager
def model_call(labels: Labels) -> Iterator[CallMeter]:
    """Label the model call made inside, and count it once: by the meter unless the model's client counts it."""
    meter, began, failed = CallMeter(), time.perf_counter(), False
    around, outer = _scope.get(), _meter.get()
    _scope.set(replace(around, labels=labels))
    _meter.set(meter)
    try:
        yield meter
    except Exception:
        failed = True
        raise
    finally:
        _scope.set(around)
        _meter.set(outer)
        if not meter.counted:
            observe(meter.usage, None, time.perf_counter() - began, labels=labels, failed=failed)


def current_labels() -> Labels:
    """The labels that a model call made now would carry."""
    return _scope.get().labels


def current_speculation() -> bool | None:
    """Whether the surrounding steps request speculation; None if no step sets it."""
    return _scope.get().speculation


def current_model() -> str | None:
    """The model that the surrounding steps request; None if no step names one."""
    return _scope.get().model


def headers(labels: Labels | None = None, *, speculation: bool | None = None) -> dict[str, str]:
    """The headers that send `labels`, by default the current ones, to a gateway. Non-ASCII is percent-encoded."""
    labels = current_labels() if labels is None else labels
    speculation = current_speculation() if speculation is None else speculation
    return label_headers(labels, speculation=speculation is not False, keep=" ")


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
    _statistics.add_call((labels.workflow, labels.step), usage, speculation, seconds, failed=failed)


def report() -> Report:
    """What each step cost so far in this process, and what speculation did for it."""
    return Report(tuple(_statistics.rows()), _statistics)


def httpx_hooks() -> dict[str, list[Callable[[Any], Any]]]:
    """`event_hooks` for a synchronous httpx or httpx2 client, such as the one inside an OpenAI client.

    Requests get the current labels as headers. Each response is counted on the step that sent the request, while the
    client reads it.
    """
    return {"request": [_send_labels], "response": [_observe_response]}


def async_httpx_hooks() -> dict[str, list[Callable[[Any], Any]]]:
    """`httpx_hooks` for an asynchronous client."""

    async def label(request: Any) -> None:
        _send_labels(request)

    async def observed(response: Any) -> None:
        _observe_response(response, asynchronous=True)

    return {"request": [label], "response": [observed]}


_STARTED = "agentspec.started"


def _send_labels(request: Any) -> None:
    for name, value in headers().items():
        request.headers.setdefault(name, value)
    request.extensions[_STARTED] = (time.perf_counter(), current_labels())


def _observe_response(response: Any, *, asynchronous: bool = False) -> None:
    started = response.request.extensions.get(_STARTED)
    kind = response.headers.get("content-type", "")
    if started is None or response.request.method != "POST" or not kind.startswith(_ANSWERS):
        return
    began, labels = started

    def done(reader: ResponseTap, failed: bool) -> None:
        observe(*reader.finish(), time.perf_counter() - began, labels=labels, failed=failed)

    tap(response, done, asynchronous=asynchronous)


_ANSWERS = ("application/json", "text/event-stream")


def _narrowed(*, speculation: bool | None, model: str | None = None, **labels: str | None) -> _Scope:
    around = _scope.get()
    given = {name: value for name, value in labels.items() if value is not None}
    return _Scope(
        replace(around.labels, **given),
        around.speculation if speculation is None else speculation,
        around.model if model is None else model,
    )


class _StepRun:
    """One run of a step's body. Each `with` enters the scope again: a generator's body runs in its caller's context."""

    def __init__(self, scope: _Scope) -> None:
        self._inner = scope
        self._seconds = 0.0
        self._failed = False

    def __enter__(self) -> None:
        self._around = _scope.get()
        _scope.set(self._inner)
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._seconds += time.perf_counter() - self._began
        self._failed = isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration))
        _scope.set(self._around)

    def record(self) -> None:
        labels = self._inner.labels
        _statistics.add_run((labels.workflow, labels.step), self._seconds, failed=self._failed)


def _function(function: Any, inner: Callable[[], _Scope]) -> Any:
    @wraps(function)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        run = _StepRun(inner())
        try:
            with run:
                return function(*args, **kwargs)
        finally:
            run.record()

    return run_step


def _coroutine(function: Any, inner: Callable[[], _Scope]) -> Any:
    @wraps(function)
    async def run_step(*args: Any, **kwargs: Any) -> Any:
        run = _StepRun(inner())
        try:
            with run:
                return await function(*args, **kwargs)
        finally:
            run.record()

    return run_step


def _generator(function: Any, inner: Callable[[], _Scope]) -> Any:
    @wraps(function)
    def run_step(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        run, body = _StepRun(inner()), function(*args, **kwargs)
        resume, value = body.send, None
        try:
            while True:
                with run:
                    item = resume(value)
                try:
                    resume, value = body.send, (yield item)
                except GeneratorExit:
                    with run:
                        body.close()
                    raise
                except BaseException as error:
                    resume, value = body.throw, error
        except StopIteration as stop:
            return stop.value
        finally:
            run.record()

    return run_step


def _async_generator(function: Any, inner: Callable[[], _Scope]) -> Any:
    @wraps(function)
    async def run_step(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        run, body = _StepRun(inner()), function(*args, **kwargs)
        resume, value = body.asend, None
        try:
            while True:
                with run:
                    item = await resume(value)
                try:
                    resume, value = body.asend, (yield item)
                except GeneratorExit:
                    with run:
                        await body.aclose()
                    raise
                except BaseException as error:
                    resume, value = body.athrow, error
        except StopAsyncIteration:
            return
        finally:
            run.record()

    return run_step
