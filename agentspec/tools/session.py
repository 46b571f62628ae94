"""One agent's session: predicts before each turn, starts what pays, and hands over what the model then calls."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from agentspec.telemetry import tracing
from agentspec.tools.history import ToolCall, ToolHistory, canonical, is_json
from agentspec.tools.model import PER_TURN, TURN, CallForecast, OpenForecasts
from agentspec.tools.policy import ToolSpec
from agentspec.tools.speculative_call import CallFailedError, Outcome, SpeculativeCall, ToolEvent, contained

if TYPE_CHECKING:
    from agentspec.tools.policy import AgentCaller
    from agentspec.tools.speculator import ToolSpeculator

Invoke = Callable[[ToolCall], Any]
AsyncInvoke = Callable[[ToolCall], Awaitable[Any]]
Way = Callable[[ToolCall], tuple[Invoke, bool]]
"""What runs a call, and whether that is a coroutine function."""

_MOST_RESULTS = 64  # of a session that wait for their calls


class ToolSession:
    """A session of an agent, from `ToolSpeculator.session`. Thread-safe.

    Report what is said and returned, call `begin_turn` before the model and `end_turn` with the calls that it made,
    and run tools by `run` or `arun`.
    """

    def __init__(self, speculator: ToolSpeculator, caller: AgentCaller) -> None:
        self.caller = caller
        self._policy = speculator.policy
        self._speculator = speculator
        self._epoch = epoch_of(caller.tenant, caller.session)
        self._lock = threading.RLock()
        self._history = ToolHistory()
        self._started: dict[str, SpeculativeCall] = {}
        self._turn: tuple[float, CallForecast] | None = None  # when the model's turn began, and what was predicted
        self._open = OpenForecasts(self._policy.max_age)
        self._stores = True  # whether the turn may be learned
        self._tools: dict[str, ToolSpec] = {}
        self.functions: Mapping[str, Any] = {}  # what runs for each name that is offered
        self.followed: list[str] = []  # what marks the messages that an adapter has reported
        self._used = 0  # early results since `take_used`

    def offers(self, tools: Sequence[ToolSpec], functions: Mapping[str, Any] | None = None) -> None:
        """The tools that the model can call from now on. Calls of others count as calls that may change something.

        `functions` are what runs for each name: what was started of a tool that runs another object now is dropped.
        """
        self._policy.offered([tool.name for tool in tools])
        with self._lock:
            self._tools = {tool.name: tool for tool in tools}
            before, self.functions = self.functions, dict(functions or {})
            for early in list(self._started.values()):
                name = early.call.name
                if before.get(name) is not self.functions.get(name):
                    self._drop(early, "stale")

    def says(self, text: str) -> None:
        """The user said something."""
        with self._lock, contained("following a session"):
            self._history.says(text)

    def restart(self) -> None:
        """The conversation begins again: report it from its beginning. What was started is dropped."""
        with self._lock:
            self._drop_all()
            self._history, self._open = ToolHistory(), OpenForecasts(self._policy.max_age)

    def recalls(self, calls: Sequence[ToolCall]) -> None:
        """Earlier calls of a conversation that is reported again; they teach nothing."""
        with self._lock:
            for call in calls:
                with contained("following a session"):
                    if is_json(call.arguments):
                        self._history.makes(call)

    def returns(self, tool: str, content: str) -> None:
        """A tool returned `content`, as the model reads it."""
        with self._lock, contained("following a session"):
            self._history.returns(tool, content)

    def begin_turn(self, invoke: Invoke) -> list[ToolCall]:
        """Predict the calls of the model's next turn, and start in threads those that pay; returns what was started."""
        return self._begin(lambda _: (invoke, False))

    async def abegin_turn(
        self, invoke: AsyncInvoke, in_thread: Callable[[ToolCall], Invoke | None] = lambda _: None
    ) -> list[ToolCall]:
        """`begin_turn` in an event loop: tools run as its tasks, those for which `in_thread` has a function in threads.

        A thread whose result is dropped runs on, and counts as running until its end.
        """

        def way(call: ToolCall) -> tuple[Invoke, bool]:
            blocking = in_thread(call)
            return (invoke, True) if blocking is None else (blocking, False)

        return self._begin(way)

    def end_turn(self, calls: Sequence[ToolCall], *, store: bool = True) -> None:
        """The model has made these calls, in this order; none if it answered. Without `store` it teaches nothing."""
        with self._lock:
            self._stores = store
            if self._may_change(calls):
                self._epoch.advance()
            with contained("learning a turn"):
                self._learn([call for call in calls if is_json(call.arguments)])
            self.recalls(calls)
            self.drop_old()

    def abandon_turn(self) -> None:
        """The model's call failed, or its answer cannot be read: drop what was started and what was read before."""
        with self._lock:
            self._epoch.advance()
            self._drop_all()
            self._turn = None

    def run(self, call: ToolCall, invoke: Invoke) -> Any:
        """The result of a call that the model made: that of an early start if there is one to use, else of `invoke`."""
        early, called_at = self._taken(call), time.monotonic()
        if early is not None:
            try:
                result = early.wait()
            except CallFailedError:
                self._drop(early, "failed")
            else:
                if self._hand_over(early, called_at):
                    return result
        with self._ordinary(call):
            return invoke(call)

    async def arun(self, call: ToolCall, invoke: AsyncInvoke) -> Any:
        """`run` in an event loop."""
        early, called_at = self._taken(call), time.monotonic()
        if early is not None:
            try:
                result = await early.arrive()
            except CallFailedError:
                self._drop(early, "failed")
            except BaseException:  # the waiter was cancelled
                self._drop(early, "waste")
                raise
            else:
                if self._hand_over(early, called_at):
                    return result
        with self._ordinary(call):
            return await invoke(call)

    def drop_old(self) -> None:
        """Drop what is void, or too old to be used."""
        if not self._started:
            return
        now = time.monotonic()
        with self._lock:
            for early in list(self._started.values()):
                if early.epoch != self._epoch.number:
                    self._drop(early, "stale")
                elif now - early.started_at >= self._policy.max_age:
                    self._drop(early, "waste")

    def take_used(self) -> int:
        """How many early results were used since the last call."""
        with self._lock:
            used, self._used = self._used, 0
        return used

    def close(self) -> None:
        """Drop what was started and is not used."""
        with self._lock:
            self._drop_all()

    # Before a turn.

    def _begin(self, way: Way) -> list[ToolCall]:
        with self._lock:
            self.drop_old()
            self._turn = None
            with contained("predicting a turn"):
                return self._start_predicted(way)
            self._drop_all()
            return []

    def _start_predicted(self, way: Way) -> list[ToolCall]:
        tools = self._early()
        if not tools:
            return []
        forecast, chosen = self._speculator.forecast(self.caller, self._history, tools)
        self._turn = time.monotonic(), forecast
        allowed = (one.call for one in chosen if one.call.name in tools)  # whatever a predictor says
        return list(islice((call for call in allowed if self._start(call, way)), PER_TURN))

    def _start(self, call: ToolCall, way: Way) -> bool:
        epoch, free = self._epoch.number, self._speculator.free
        call = ToolCall(call.name, deepcopy(dict(call.arguments)))  # a tool may change what it is given
        key = _key(call)
        if key is None or self._is_there(key) or self._epoch.writing_now or not free.acquire(blocking=False):
            return False
        try:
            invoke, as_task = way(call)
            early = SpeculativeCall(call, key, epoch, free.release, invoke, as_task=as_task)
        except Exception as error:
            free.release()
            if isinstance(error, RuntimeError):  # no further thread can be started
                return False
            raise
        self._started[key] = early
        self._report("start", early, 0.0)
        while len(self._started) > _MOST_RESULTS:
            self._drop(next(iter(self._started.values())), "waste")
        return True

    def _is_there(self, key: str) -> bool:
        """Whether a result of this call waits, or is on its way. One that will never come is dropped."""
        early = self._started.get(key)
        if early is not None and early.failed:
            self._drop(early, "failed")
            return False
        return early is not None

    def _early(self) -> frozenset[str]:
        """The tools that may run early."""
        policy = self._policy
        return frozenset(name for name, spec in self._tools.items() if policy.may_run_early(spec))

    # After a turn.

    def _may_change(self, calls: Sequence[ToolCall]) -> bool:
        return not all(self._policy.changes_nothing(self._tools.get(call.name)) for call in calls)

    def _learn(self, calls: Sequence[ToolCall]) -> None:
        turn, self._turn = self._turn, None
        if turn is None or not self._stores:
            return
        (began, forecast), now = turn, time.monotonic()
        self._took(TURN, now - began)
        made = {call.identity for call in calls}
        later = self._open.settle(forecast, made, began=began, now=now, voids=self._may_change(calls))
        self._speculator.learn(self.caller, self._history, calls, forecast, self._early(), later)

    def _drop_all(self) -> None:
        for early in list(self._started.values()):
            self._drop(early, "waste")

    def _drop(self, early: SpeculativeCall, outcome: Outcome) -> None:
        with self._lock:
            if self._started.get(early.key) is early:
                del self._started[early.key]
            early.cancel()
            self._report(outcome, early, early.seconds)

    # A call.

    def _taken(self, call: ToolCall) -> SpeculativeCall | None:
        """The early start that a call may use, which no other call gets then; None if there is none."""
        spec = self._tools.get(call.name)
        if not self._policy.may_run_early(spec):
            return None
        with self._lock:
            early = self._started.pop(_key(call) or "", None)
        if early is None:
            return None
        age = time.monotonic() - early.started_at
        if early.epoch != self._epoch.number or age > self._policy.max_age:
            self._drop(early, "stale")
            return None
        return early

    def _hand_over(self, early: SpeculativeCall, called_at: float) -> bool:
        """Whether the result, which has arrived, may be used still; counts it."""
        if early.epoch != self._epoch.number:
            self._drop(early, "stale")
            return False
        self._took(early.call.name, early.seconds)
        saved = min(called_at - early.started_at, early.seconds)
        with self._lock:
            self._used += 1
        self._report("hit", early, saved)
        tracing.annotate(lambda: {"agentspec.tool.early": True, "agentspec.tool.seconds_saved": saved})
        return True

    def _report(self, outcome: Outcome, early: SpeculativeCall, seconds: float) -> None:
        call, caller = early.call, self.caller
        if outcome != "start":
            early.end_span(outcome)
        self._speculator.report(ToolEvent(outcome, call.name, caller.tenant, caller.agent, caller.session, seconds))

    @contextmanager
    def _ordinary(self, call: ToolCall) -> Iterator[None]:
        """Around a tool that runs because the model called it."""
        if not self._policy.changes_nothing(self._tools.get(call.name)):
            with self._epoch.writing():
                yield
            return
        began = time.monotonic()
        yield
        self._took(call.name, time.monotonic() - began)

    def _took(self, tool: str, seconds: float) -> None:
        """Learn how long a tool took, or the model's turn, unless the turn is not stored."""
        if self._stores:
            self._speculator.took(self.caller, tool, seconds)


def _key(call: ToolCall) -> str | None:
    """The identity of a call; None for arguments that JSON cannot hold, or would turn into others."""
    try:
        given = dict(call.arguments)
        return (
            call.identity if json.loads(canonical(given)) == given else None
        )  # a tuple is no list, nor 1 as a key "1"
    except (ValueError, TypeError, RecursionError):
        return None


class SessionEpoch:
    """One session's epoch. Thread-safe. While a call that may change something runs, nothing is started early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.number = 0
        self.writing_now = 0  # calls that may change something

    def advance(self) -> None:
        with self._lock:
            self.number += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a call that may change something: a new epoch at its beginning and at its end.

        A call that is cancelled may go on, in a thread or elsewhere: then nothing is started early any more.
        """
        with self._lock:
            self.number += 1
            self.writing_now += 1
        ended = True
        try:
            yield
        except asyncio.CancelledError:
            ended = False
            raise
        finally:
            with self._lock:
                self.number += 1
                self.writing_now -= ended


_epochs: WeakValueDictionary[tuple[str, str], SessionEpoch] = WeakValueDictionary()  # of the process
_lock = threading.Lock()


def epoch_of(tenant: str, session: str) -> SessionEpoch:
    """The epoch of a session, which all its agents share, whichever speculator is theirs, for as long as it is used."""
    with _lock:
        known = _epochs.get((tenant, session))
        if known is None:
            known = _epochs[tenant, session] = SessionEpoch()
        return known
