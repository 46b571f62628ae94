"""One agent's session: predicts before each turn, starts what pays, and hands over what the model then calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentspec.tools.epochs import epoch_of
from agentspec.tools.events import Outcome, ToolEvent
from agentspec.tools.faults import kept_from_agent
from agentspec.tools.flights import Flight, FlightFailedError, Launch, TaskFlight, ThreadFlight
from agentspec.tools.keys import call_key
from agentspec.tools.launching import PER_TURN
from agentspec.tools.policy import ToolSpec
from agentspec.tools.prediction.history import ToolCall, ToolHistory
from agentspec.tools.prediction.later import OpenForecasts
from agentspec.tools.prediction.model import TURN, CallForecast
from agentspec.tools.prediction.values import is_json

if TYPE_CHECKING:
    from agentspec.tools.keys import AgentCaller
    from agentspec.tools.speculator import ToolSpeculator

Invoke = Callable[[ToolCall], Any]
AsyncInvoke = Callable[[ToolCall], Awaitable[Any]]
Start = Callable[[Launch], Flight]

_MOST_RESULTS = 64  # of a session that wait for their calls


class ToolSession:
    """A session of an agent, from `ToolSpeculator.session`. Thread-safe.

    Tell it what is said and returned, call `begin_turn` before the model and `end_turn` with the calls that it made,
    and run tools by `run` or `arun`.
    """

    def __init__(self, speculator: ToolSpeculator, caller: AgentCaller) -> None:
        self.caller = caller
        self._policy = speculator.policy
        self._speculator = speculator
        self._epoch = epoch_of(caller.tenant, caller.session)
        self._lock = threading.RLock()
        self._history = ToolHistory()
        self._flights: dict[str, Flight] = {}
        self._turn: tuple[float, CallForecast] | None = None  # when the model's turn began, and what was predicted
        self._open = OpenForecasts(self._policy.max_age)
        self._stores = True  # whether the turn may be learned
        self._tools: dict[str, ToolSpec] = {}
        self._functions: Mapping[str, object] = {}

    def offers(self, tools: Sequence[ToolSpec], functions: Mapping[str, object] | None = None) -> None:
        """The tools that the model can call from now on. Calls of others count as calls that may change something.

        `functions` are what runs for each name: what was started of a tool that runs another object now is dropped.
        """
        self._policy.offered([tool.name for tool in tools])
        with self._lock:
            self._tools = {tool.name: tool for tool in tools}
            before, self._functions = self._functions, dict(functions or {})
            for flight in list(self._flights.values()):
                name = flight.launch.call.name
                if before.get(name) is not self._functions.get(name):
                    self._drop(flight, "stale")

    def says(self, text: str) -> None:
        """The user said something."""
        with self._lock, kept_from_agent("following a session"):
            self._history.says(text)

    def restart(self) -> None:
        """The conversation begins anew: tell it from its beginning. What was started is dropped."""
        with self._lock:
            self._drop_all()
            self._history, self._open = ToolHistory(), OpenForecasts(self._policy.max_age)

    def recalls(self, calls: Sequence[ToolCall]) -> None:
        """Earlier calls of a conversation that is told again; they teach nothing."""
        with self._lock:
            for call in calls:
                with kept_from_agent("following a session"):
                    self._makes(call)

    def returns(self, tool: str, content: str) -> None:
        """A tool returned `content`, as the model reads it."""
        with self._lock, kept_from_agent("following a session"):
            self._history.returns(tool, content)

    def begin_turn(self, invoke: Invoke) -> list[ToolCall]:
        """Predict the calls of the model's next turn, and start in threads those that pay; returns what was started."""
        with kept_from_agent("reading what was learned"):
            self._speculator.learned.refresh(self.caller)
        return self._begin(lambda launch: ThreadFlight(launch, invoke))

    async def abegin_turn(
        self, invoke: AsyncInvoke, in_thread: Callable[[ToolCall], Invoke | None] = lambda _: None
    ) -> list[ToolCall]:
        """`begin_turn` in an event loop: tools run as its tasks, those for which `in_thread` has a function in threads.

        A thread goes on when nobody wants it any more, and counts as running until its end.
        """
        with kept_from_agent("reading what was learned"):
            await asyncio.to_thread(self._speculator.learned.refresh, self.caller)

        def start(launch: Launch) -> Flight:
            plain = in_thread(launch.call)
            return TaskFlight(launch, invoke) if plain is None else ThreadFlight(launch, plain)

        return self._begin(start)

    def end_turn(self, calls: Sequence[ToolCall], *, store: bool = True) -> None:
        """The model has made these calls, in this order; none if it answered. Without `store` it teaches nothing."""
        with self._lock:
            self._stores = store
            if self._may_change(calls):
                self._epoch.advance()
            with kept_from_agent("learning a turn"):
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
        flight, called_at = self._taken(call), time.monotonic()
        if flight is not None:
            try:
                result = flight.wait()
            except FlightFailedError:
                self._drop(flight, "failed")
            else:
                if self._hand_over(flight, called_at):
                    return result
        with self._ordinary(call):
            return invoke(call)

    async def arun(self, call: ToolCall, invoke: AsyncInvoke) -> Any:
        """`run` in an event loop."""
        flight, called_at = self._taken(call), time.monotonic()
        if flight is not None:
            try:
                result = await flight.arrive()
            except FlightFailedError:
                self._drop(flight, "failed")
            except BaseException:  # whoever waited was cancelled
                self._drop(flight, "waste")
                raise
            else:
                if self._hand_over(flight, called_at):
                    return result
        with self._ordinary(call):
            return await invoke(call)

    @contextmanager
    def changing(self, call: ToolCall | None) -> Iterator[None]:
        """Around a part of a call that may outlast `arun`, such as a thread; None for a call of an unknown tool.

        Until its end nothing starts early, unless the call changes nothing.
        """
        with self._epoch.writing() if call is None or self._may_change([call]) else nullcontext():
            yield

    def drop_old(self) -> None:
        """Drop what is void, or too old to be used."""
        if not self._flights:
            return
        now = time.monotonic()
        with self._lock:
            for flight in list(self._flights.values()):
                if flight.launch.epoch != self._epoch.number:
                    self._drop(flight, "stale")
                elif now - flight.launched_at >= self._policy.max_age:
                    self._drop(flight, "waste")

    def close(self) -> None:
        """Drop what was started and is not used."""
        with self._lock:
            self._drop_all()

    def __enter__(self) -> ToolSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Before a turn.

    def _begin(self, start: Start) -> list[ToolCall]:
        with self._lock:
            self.drop_old()
            self._turn = None
            launched: list[ToolCall] | None = None
            with kept_from_agent("predicting a turn"):
                launched = self._predicted(start)
            if launched is None:
                self._drop_all()
            return launched or []

    def _predicted(self, start: Start) -> list[ToolCall]:
        early = self._early()
        if not early:
            return []
        forecast, chosen = self._speculator.learned.forecast(self.caller, self._history, early)
        self._turn = time.monotonic(), forecast
        allowed = (one.call for one in chosen if one.call.name in early)  # whatever a predictor says
        launched = (call for call in allowed if self._launch(call, start))
        return list(islice(launched, PER_TURN))

    def _launch(self, call: ToolCall, start: Start) -> bool:
        epoch, free = self._epoch.number, self._speculator.free
        call = ToolCall(call.name, deepcopy(dict(call.arguments)))  # a tool may change what it is given
        key = self._key(call)
        if key is None or self._is_there(key) or not self._epoch.quiet or not free.acquire(blocking=False):
            return False
        try:
            flight = start(Launch(call, key, epoch, free.release))
        except RuntimeError:  # no further thread can be started
            free.release()
            return False
        except Exception:
            free.release()
            raise
        self._flights[key] = flight
        self._tell("launch", flight, 0.0)
        while len(self._flights) > _MOST_RESULTS:
            self._drop(next(iter(self._flights.values())), "waste")
        return True

    def _is_there(self, key: str) -> bool:
        """Whether a result of this call waits, or is on its way. One that will never come is dropped."""
        flight = self._flights.get(key)
        if flight is not None and flight.failed:
            self._drop(flight, "failed")
            return False
        return flight is not None

    def _early(self) -> frozenset[str]:
        """The tools that may run early."""
        policy = self._policy
        return frozenset(name for name, spec in self._tools.items() if policy.may_run_early(spec))

    # After a turn.

    def _may_change(self, calls: Sequence[ToolCall]) -> bool:
        with kept_from_agent("asking a tool's policy"):
            return not all(self._policy.changes_nothing(self._tools.get(call.name)) for call in calls)
        return True

    def _makes(self, call: ToolCall) -> None:
        if is_json(call.arguments):
            self._history.makes(call)

    def _learn(self, calls: Sequence[ToolCall]) -> None:
        turn, self._turn = self._turn, None
        if turn is None or not self._stores:
            return
        (began, forecast), now = turn, time.monotonic()
        self._took(TURN, now - began)
        made = {call.identity for call in calls}
        later = self._open.settle(forecast, made, began=began, now=now, voids=self._may_change(calls))
        self._speculator.learned.add(self.caller, self._history, calls, forecast, self._early(), later)

    def _drop_all(self) -> None:
        for flight in list(self._flights.values()):
            self._drop(flight, "waste")

    def _drop(self, flight: Flight, outcome: Outcome) -> None:
        with self._lock:
            if self._flights.get(flight.launch.key) is flight:
                del self._flights[flight.launch.key]
            flight.cancel()
            self._tell(outcome, flight, flight.seconds)

    # A call.

    def _taken(self, call: ToolCall) -> Flight | None:
        """The flight whose result a call may use, which nobody else gets then; None if there is none."""
        spec = self._tools.get(call.name)
        if not self._policy.may_run_early(spec):
            return None
        with self._lock:
            flight = self._flights.pop(self._key(call) or "", None)
        if flight is None:
            return None
        age = time.monotonic() - flight.launched_at
        if flight.launch.epoch != self._epoch.number or age > self._policy.max_age:
            self._drop(flight, "stale")
            return None
        return flight

    def _hand_over(self, flight: Flight, called_at: float) -> bool:
        """Whether the result, which has arrived, may be used still; counts it."""
        if flight.launch.epoch != self._epoch.number:
            self._drop(flight, "stale")
            return False
        self._took(flight.launch.call.name, flight.seconds)
        saved = min(called_at - flight.launched_at, flight.seconds)
        self._tell("hit", flight, saved)
        return True

    def _tell(self, outcome: Outcome, flight: Flight, seconds: float) -> None:
        call, caller = flight.launch.call, self.caller
        self._speculator.tell(ToolEvent(outcome, call.name, caller.tenant, caller.agent, caller.session, seconds))

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
        """Keep how long a tool took, or the model's turn, where the turn is stored."""
        if self._stores:
            self._speculator.learned.took(self.caller, tool, seconds)

    def _key(self, call: ToolCall) -> str | None:
        """The key of a call; None for an unknown tool, or arguments that JSON cannot hold."""
        spec = self._tools.get(call.name)
        try:
            return None if spec is None else call_key(self.caller, spec, call.arguments)
        except (ValueError, TypeError, RecursionError):
            return None
