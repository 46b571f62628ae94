"""The load client, a process of its own: does one job after another and says what it saw.

Run as `python -m agentspec.benchmarks.gateway.client`. Reads a job as a line of JSON, and writes lines of JSON: marks
of a moment that others may want to measure at, then the result. The end of its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import uvloop

from agentspec.benchmarks.gateway.wire import (
    HEAD_END,
    LAST_CHUNK,
    Script,
    Target,
    content_length,
    processor_seconds,
    summary,
)

BROKEN, IMPATIENT = "broken", "gave up"  # what stands in place of a status
_STAMP = re.compile(rb'"content": ?" (\d+\.\d{6})"')
_TAIL = 512  # bytes kept of a stream, in which an event may be cut

Answered = Callable[["LoadConnection", str], None]


class LoadConnection(asyncio.Protocol):
    """A keep-alive connection with one request at a time. `answered` is called with the status of each answer."""

    def __init__(self, answered: Answered, on_events: Callable[[bytes], None] | None = None) -> None:
        self._answered, self._on_events = answered, on_events
        self._buffer = bytearray()
        self._status, self._left, self._chunked = "", 0, False
        self.asked = 0.0
        self.busy = self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        self.busy, self.asked = True, time.monotonic()
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.busy:
            self._end(BROKEN)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            return
        self._buffer += data
        if not self._status and not self._read_head():
            return
        if self._chunked:
            self._read_stream()
        elif len(self._buffer) >= self._left:
            self._end(self._status)

    def _read_head(self) -> bool:
        end = self._buffer.find(HEAD_END)
        if end < 0:
            return False
        head = bytes(self._buffer[:end])
        del self._buffer[: end + len(HEAD_END)]
        length = content_length(head)
        self._status, self._chunked, self._left = head[9:12].decode(), length is None, length or 0
        return True

    def _read_stream(self) -> None:
        if self._on_events is not None:
            used = 0
            for found in _STAMP.finditer(self._buffer):
                self._on_events(found[1])
                used = found.end()
            del self._buffer[: max(used, len(self._buffer) - _TAIL)]
        if self._buffer.endswith(LAST_CHUNK):
            complete = b"[DONE]" in self._buffer and b'"error"' not in self._buffer
            self._end(self._status if complete or self._status != "200" else BROKEN)

    def _end(self, status: str) -> None:
        self._buffer.clear()
        self._status, self.busy = "", False
        self._answered(self, status)


class Load:
    """What all jobs count: statuses, and how long the good answers took."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.loop = asyncio.get_running_loop()
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._began, self._processor = time.monotonic(), processor_seconds()

    async def connect(self, answered: Answered, on_events: Callable[[bytes], None] | None = None) -> LoadConnection:
        made = await self.loop.create_connection(
            lambda: LoadConnection(answered, on_events), "127.0.0.1", self.target.port
        )
        return made[1]

    def count(self, connection: LoadConnection, status: str) -> None:
        self.statuses[status] += 1
        if status == "200":
            self.seconds.append(time.monotonic() - connection.asked)

    def result(self, **more: Any) -> dict[str, Any]:
        return {
            "elapsed": time.monotonic() - self._began,
            "processor": processor_seconds() - self._processor,
            "statuses": dict(self.statuses),
            **summary(self.seconds),
            **more,
        }


async def calls(target: Target, *, script: Script, connections: int, count: int) -> dict[str, Any]:
    """`count` calls over so many connections, each of which asks again once it is answered."""
    load, left, idle = Load(target), count, asyncio.Event()
    requests: dict[LoadConnection, bytes] = {}

    def answered(connection: LoadConnection, status: str) -> None:
        nonlocal left
        load.count(connection, status)
        if sum(load.statuses.values()) == count or status == BROKEN:
            idle.set()
        elif left:
            left -= 1
            connection.ask(requests[connection])

    for number in range(min(connections, count)):
        requests[await load.connect(answered)] = target.request(script, number)
    for connection, request in requests.items():
        left -= 1
        connection.ask(request)
    await idle.wait()
    for connection in requests:
        connection.close()
    return load.result()


class _Arrivals:
    """Clients that come whatever became of earlier ones, and give up after `patience` seconds.

    At most so many `connections`; a request that finds none counts as given up. `good` counts the good answers of each
    second since the start.
    """

    def __init__(self, target: Target, script: Script, patience: float, connections: int) -> None:
        self.load, self.good = Load(target), Counter[int]()
        self.started = self.load.loop.time()
        self._target, self._script = target, script
        self._patience, self._most = patience, connections
        self._free: list[LoadConnection] = []
        self._requests: dict[LoadConnection, bytes] = {}
        self._timers: dict[LoadConnection, asyncio.TimerHandle] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def arrive(self, number: int) -> None:
        """Let the client of this number ask, on a free connection or a new one."""
        while self._free and self._free[-1].closed:
            del self._requests[self._free.pop()]
        if self._free:
            self._ask(self._free.pop())
        elif len(self._requests) + len(self._opening) < self._most:
            task = asyncio.create_task(self._open_and_ask(number))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self.load.statuses[IMPATIENT] += 1

    async def end(self) -> None:
        """Wait for the answers to all who still wait, and close the connections."""
        while self._timers or self._opening:
            await asyncio.sleep(0.05)
        for connection in self._requests:
            connection.close()

    async def _open_and_ask(self, number: int) -> None:
        try:
            connection = await self.load.connect(self._answered)
        except OSError:
            self.load.statuses[BROKEN] += 1
            return
        self._requests[connection] = self._target.request(self._script, number)
        self._ask(connection)

    def _ask(self, connection: LoadConnection) -> None:
        self._timers[connection] = self.load.loop.call_later(self._patience, self._give_up, connection)
        connection.ask(self._requests[connection])

    def _answered(self, connection: LoadConnection, status: str) -> None:
        self._timers.pop(connection).cancel()
        self.load.count(connection, status)
        if status == "200":
            self.good[int(self.load.loop.time() - self.started)] += 1
        if status == BROKEN:
            del self._requests[connection]
        else:
            self._free.append(connection)

    def _give_up(self, connection: LoadConnection) -> None:
        connection.busy = False
        connection.close()
        del self._timers[connection], self._requests[connection]
        self.load.statuses[IMPATIENT] += 1


async def arrivals(
    target: Target, *, script: Script, rate: float, seconds: float, patience: float, connections: int
) -> dict[str, Any]:
    """Requests at a fixed rate, whatever becomes of the earlier ones; a client gives up after `patience` seconds.

    At most so many `connections`; a request that finds none counts as given up. `good` are the good answers of each
    second since the start.
    """
    clients = _Arrivals(target, script, patience, connections)
    for number in range(int(rate * seconds)):
        if (wait := clients.started + number / rate - clients.load.loop.time()) > 0:
            await asyncio.sleep(wait)
        clients.arrive(number)
    await clients.end()
    return clients.load.result(good=[clients.good[second] for second in range(int(seconds))])


async def streams(
    target: Target, *, count: int, every: float, ramp: float, seconds: float, mark: Callable[..., None]
) -> dict[str, Any]:
    """`count` streams of an event `every` so many seconds, begun over `ramp` seconds, then measured for `seconds`.

    Marks "steady" and "over" enclose the measured time. The result holds the seconds from sending an event to its
    arrival here.
    """
    load, done = Load(target), asyncio.Event()
    delivered: list[float] = []
    arrived = 0
    measuring = False

    def on_event(stamp: bytes) -> None:
        nonlocal arrived
        arrived += 1
        if measuring:
            delivered.append(time.monotonic() - float(stamp))

    def answered(connection: LoadConnection, status: str) -> None:
        load.count(connection, status)
        connection.close()
        if sum(load.statuses.values()) == count:
            done.set()

    settle = 1.0
    script = Script("stream", int((2 * ramp + settle + seconds + 1) / every), every)
    started = load.loop.time()
    for number in range(count):
        if (wait := started + ramp * number / count - load.loop.time()) > 0:
            await asyncio.sleep(wait)
        (await load.connect(answered, on_event)).ask(target.request(script, number))
    await asyncio.sleep(settle)
    mark("steady", events=arrived)
    measuring = True
    await asyncio.sleep(seconds)
    measuring = False
    mark("over", events=arrived)
    await done.wait()
    return load.result(delivery=summary(delivered), events=arrived)


async def turns(targets: dict[str, Target], *, script: Script, count: int) -> dict[str, Any]:
    """One call at a time, to each target in turn over blocking sockets; returns the seconds of each target."""
    seconds: dict[str, list[float]] = {name: [] for name in targets}
    sockets = {name: socket.create_connection(("127.0.0.1", target.port)) for name, target in targets.items()}
    requests = {name: target.request(script) for name, target in targets.items()}
    for number in range(count):
        for name in sorted(targets, reverse=bool(number % 2)):
            seconds[name].append(_one_call(sockets[name], requests[name]))
    for each in sockets.values():
        each.close()
    return {name: summary(values) for name, values in seconds.items()}


def _one_call(connection: socket.socket, request: bytes) -> float:
    started = time.perf_counter()
    connection.sendall(request)
    data = connection.recv(65536)
    while HEAD_END not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(HEAD_END)
    length = content_length(head) or 0
    while len(body) < length:
        body += connection.recv(65536)
    seconds = time.perf_counter() - started
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the answer was {head.splitlines()[0].decode('latin-1')}: {body[:300]!r}")
    return seconds


def _mark(name: str, **more: Any) -> None:
    print(json.dumps({"mark": name, **more}), flush=True)


async def _do(job: dict[str, Any]) -> dict[str, Any]:
    kind = job.pop("job")
    if "script" in job:
        job["script"] = Script(**job["script"])
    if kind == "turns":
        return await turns({name: _target(given) for name, given in job.pop("targets").items()}, **job)
    target = _target(job.pop("target"))
    if kind == "streams":
        return await streams(target, mark=_mark, **job)
    return await (calls(target, **job) if kind == "calls" else arrivals(target, **job))


def _target(given: dict[str, Any]) -> Target:
    return Target(given["port"], tuple(given["keys"]))


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"result": await _do(json.loads(line))}), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
