"""The bounds on connections, on a clock of our own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.errors import AgentSpecError
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.listener import connection_capacity
from agentspec.proxy.serving.protocol import PIECE, Phase, in_pieces
from agentspec.settings.server import ServerSettings


class FakeConnection:
    """A connection in any state. `ended` is how it was ended: an error's status, "closed" or "aborted"."""

    def __init__(self, phase: Phase = Phase.HEAD) -> None:
        self.phase = phase
        self.cycle: object = None
        self.received = self.unsent = 0
        self.flow = SimpleNamespace(write_paused=False, read_paused=False)
        self.ended: object = None
        self.transport = SimpleNamespace(
            is_closing=lambda: self.ended is not None,
            close=lambda: self._end("closed"),
            abort=lambda: self._end("aborted"),
        )

    def refuse(self, error: AgentSpecError) -> None:
        self._end(error.status)

    def _end(self, how: object) -> None:
        self.ended = how


def bounds(capacity: int = 10, **options: Any) -> Connections:
    return Connections(ServerSettings(**options), capacity)


def watch(connections: Connections, connection: FakeConnection, start: int, seconds: int) -> int:
    """Sweep once a second until the connection is ended; returns the second."""
    for second in range(start, start + seconds):
        connections.sweep([connection], second)  # type: ignore[list-item]
        if connection.ended:
            return second
    return -1


def test_a_head_has_ten_seconds_however_it_trickles() -> None:
    silent, trickling, connections = FakeConnection(), FakeConnection(), bounds()
    assert watch(connections, silent, 0, 30) == 11 and silent.ended == "closed"
    for second in range(12):
        trickling.received += 1
        connections.sweep([trickling], second)  # type: ignore[list-item]
    assert trickling.ended == 408


def test_an_idle_connection_is_left_to_its_timer() -> None:
    assert watch(bounds(), FakeConnection(Phase.IDLE), 0, 100) == -1


def test_the_next_head_has_its_own_time() -> None:
    connection, connections = FakeConnection(Phase.IDLE), bounds()
    assert watch(connections, connection, 0, 50) == -1
    connection.phase = Phase.HEAD
    assert watch(connections, connection, 50, 30) == 61


def test_where_it_is_crowded_those_without_a_request_wait_less() -> None:
    connections = bounds(4)
    for number in range(4):
        connections.admit(f"10.0.0.{number}")
    head, idle, busy = FakeConnection(), FakeConnection(Phase.IDLE), FakeConnection(Phase.ANSWER)
    for second in range(4):
        connections.sweep([head, idle, busy], second)  # type: ignore[list-item]
    assert (head.ended, idle.ended, busy.ended) == ("closed", "closed", None)
    assert connections.ended == {"header_timeout": 1, "crowded": 1}


def test_a_body_must_bring_its_rate() -> None:
    connection, connections = FakeConnection(Phase.BODY), bounds()
    for second in range(40):
        connection.received += 1100
        connections.sweep([connection], second)  # type: ignore[list-item]
    assert connection.ended is None
    assert 40 <= watch(connections, connection, 40, 40) <= 60 and connection.ended == 408


def test_a_body_that_we_do_not_take_may_wait() -> None:
    connection = FakeConnection(Phase.BODY)
    connection.flow.read_paused = True
    assert watch(bounds(), connection, 0, 100) == -1


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    connection, connections = FakeConnection(Phase.ANSWER), bounds()
    assert watch(connections, connection, 0, 100) == -1
    connection.unsent = 1000
    assert watch(connections, connection, 100, 100) == 131 - 1 and connection.ended == "aborted"


def test_a_client_that_takes_a_little_is_not() -> None:
    connection, connections = FakeConnection(Phase.ANSWER), bounds()
    for second in range(100):
        connection.unsent = 1000 - second
        connections.sweep([connection], second)  # type: ignore[list-item]
    assert connection.ended is None


def test_an_answer_that_is_over_its_time_and_not_taken_is_cut_off() -> None:
    connection, connections = FakeConnection(Phase.ANSWER), bounds(request_timeout=50)
    connection.flow.write_paused = True
    connection.cycle = object()
    for second in range(100):
        connection.unsent = 1000 - second
        connections.sweep([connection], second)  # type: ignore[list-item]
        assert (connection.ended == "aborted") is (second > 50)


def test_a_close_that_nobody_takes_is_an_abort() -> None:
    connection, connections = FakeConnection(), bounds()
    connection.ended, connection.unsent = "closed", 1000
    for second in range(40):
        connections.sweep([connection], second)  # type: ignore[list-item]
    assert connection.ended == "aborted"


def test_connections_are_counted_by_client() -> None:
    connections = bounds(4, max_connections_per_address=2)
    networks = [connections.admit("10.0.0.1"), connections.admit("::ffff:10.0.0.1")]
    assert networks == ["10.0.0.1"] * 2 and connections.admit("10.0.0.1") is None
    six = connections.admit("2001:db8::1")
    assert connections.admit("2001:db8::ffff") == six == "2001:db8::"
    assert connections.admit("10.0.0.2") is None and connections.open == 4
    connections.release("10.0.0.1")
    assert connections.admit("10.0.0.2") == "10.0.0.2"
    for network in ("10.0.0.1", "10.0.0.2", "2001:db8::", "2001:db8::"):
        connections.release(network)
    assert connections.open == 0


def test_the_capacity_leaves_files_for_upstream_calls() -> None:
    assert connection_capacity(ServerSettings(max_connections=20)) == 20
    assert connection_capacity(ServerSettings(max_connections=1 << 40, max_concurrent=1)) < 1 << 40


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("more", [False, True])
def test_answers_are_sent_in_pieces(size: int, more: bool) -> None:
    sent: list[Any] = []
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": content, "more_body": more})

    async def keep(message: Any) -> None:
        sent.append(message)

    asyncio.run(in_pieces(app)({}, keep, keep))  # type: ignore[arg-type]
    start, *bodies = sent
    assert start["status"] == 200 and b"".join(one["body"] for one in bodies) == content
    assert all(len(one["body"]) <= PIECE for one in bodies)
    assert [one.get("more_body", False) for one in bodies] == [True] * (len(bodies) - 1) + [more]
