"""`@step` labels the model calls inside a function with their step and workflow, and counts what they cost."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, TypeVar, cast

from agentspec.protocol.policy import StepPolicy
from agentspec.step.report import statistics
from agentspec.step.scope import CallScope, current
from agentspec.telemetry import tracing
from agentspec.telemetry.safe_errors import error_name
from agentspec.types import Labels

WORKFLOW_KEY = "agentspec_workflow"  # key in a LangChain run's metadata for the workflow of its model calls
T = TypeVar("T")


def step(
    name: str,
    *,
    workflow: str | None = None,
    session: str | None = None,
    speculation: bool | None = None,
    model: str | None = None,
    deadline_s: float | None = None,
    priority: int | None = None,
    store: bool | None = None,
) -> Callable[[T], T]:
    """Decorate a function, coroutine function, (async) generator function or callable object; the model calls
    inside carry these labels.

    Omitted labels are inherited from the step or workflow around the call. The other options are those of
    `StepPolicy`, and inherited likewise: `ChatAgentSpec` follows them, unless a call itself names another model, and
    other clients send them to a gateway. The function keeps its signature, so LangGraph still accepts it as a node. It
    stands below `@tool`. Raises `InvalidRequestError` for a value outside its
    range.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'write @step("name") with a name that is not empty, not {name!r}')
    labels = Labels(session, workflow, name)
    policy = StepPolicy(model, deadline_s, priority, store, speculation)

    def inner() -> CallScope:
        return current.get().narrowed(labels, policy)

    def decorate(function: T) -> T:
        return cast(T, _decorated(function, inner, name))

    return decorate


def _decorated(function: Any, inner: Callable[[], CallScope], name: str) -> Any:
    if not callable(function) or isinstance(function, (staticmethod, classmethod)):
        advice = f"not {function!r}; it stands below @tool, @staticmethod and @classmethod"
        raise TypeError(f"@step({name!r}) decorates functions and callable objects, {advice}")
    wrap = _wrapper_of(function)
    if wrap is _function and not inspect.isroutine(function) and not isinstance(function, (type, partial)):
        wrap = _wrapper_of(function.__call__)
    stepped = wrap(function, lambda: _StepRun(inner()))
    if not hasattr(function, "__name__"):
        stepped.__name__ = stepped.__qualname__ = type(function).__name__
    return stepped


def _wrapper_of(function: Any) -> Callable[[Any, Begin], Any]:
    if inspect.isasyncgenfunction(function):
        return _async_generator
    if inspect.isgeneratorfunction(function):
        return _generator
    return _coroutine if inspect.iscoroutinefunction(function) else _function


class _StepRun:
    """One run of a step's body. Each `with` enters the scope again: a generator's body runs in its caller's context."""

    def __init__(self, scope: CallScope) -> None:
        self._inner = scope
        self._seconds = 0.0
        self._failed: str | None = None
        labels = scope.labels
        named = {"gen_ai.agent.name": labels.step, "gen_ai.workflow.name": labels.workflow}
        self._span = tracing.start("invoke_agent", labels.step, {**named, "gen_ai.conversation.id": labels.session})

    def __enter__(self) -> None:
        self._around = current.get()
        current.set(self._inner)
        self._within = tracing.within(self._span)
        self._within.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._seconds += time.perf_counter() - self._began
        failed = isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration))
        self._failed = error_name(error) if failed and error is not None else None
        self._within.__exit__(None, None, None)
        current.set(self._around)

    def record(self) -> None:
        """Count the run, and end its span."""
        labels = self._inner.labels
        failed = self._failed is not None
        statistics.add((labels.workflow, labels.step), runs=1, errors=failed, seconds=self._seconds)
        if self._span is not None:
            self._span.end(self._failed)


Begin = Callable[[], _StepRun]


def _function(function: Any, begin: Begin) -> Any:
    @wraps(function)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        run, later = begin(), False
        try:
            with run:
                result = function(*args, **kwargs)
            later = inspect.iscoroutine(result)  # of a function below another decorator
            return _awaited(result, run) if later else result
        finally:
            if not later:
                run.record()

    return run_step


async def _awaited(body: Coroutine[Any, Any, Any], run: _StepRun) -> Any:
    try:
        with run:
            return await body
    finally:
        run.record()


def _coroutine(function: Any, begin: Begin) -> Any:
    @wraps(function)
    async def run_step(*args: Any, **kwargs: Any) -> Any:
        run = begin()
        return await _awaited(function(*args, **kwargs), run)

    return run_step


def _generator(function: Any, begin: Begin) -> Any:
    @wraps(function)
    def run_step(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        run, body = begin(), function(*args, **kwargs)
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


def _async_generator(function: Any, begin: Begin) -> Any:
    @wraps(function)
    async def run_step(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        run, body = begin(), function(*args, **kwargs)
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
