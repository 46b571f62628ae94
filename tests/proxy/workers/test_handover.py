"""Connections from the parent to workers: to whom, and what becomes of those that a dead worker had not taken."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.workers.handover import HandedConnections, Handover, Recipient
from agentspec.settings.server import ServerSettings


class Workers:
    """Two workers, of which each takes what it is given as soon as it `reads`."""

    def __init__(self, stack: ExitStack, **limits: Any) -> None:
        self.stack = stack
        self.handover = Handover(Connections(ServerSettings(**limits), 100), secure=False)
        self.taken: dict[int, dict[int, socket.socket]] = {0: {}, 1: {}}
        self.recipients: list[Recipient] = []
        self.readers: list[HandedConnections] = []
        for number in (0, 1):
            give, take = socket.socketpair()
            for one in (give, take):
                stack.callback(one.close)
            self.recipients.append(Recipient(give))
            taken, lost = partial(self._take, number), partial(self._lose, self.recipients[-1])
            self.readers.append(HandedConnections(take, taken, lost))
            self.handover.join(self.recipients[-1])

    def connect(self, address: str = "10.0.0.1") -> socket.socket:
        """A client, whose connection the parent has accepted."""
        client, accepted = socket.socketpair()
        self.stack.callback(client.close)
        client.settimeout(10)
        self.handover.accepted(accepted, address)
        return client

    def _take(self, worker: int, number: int, connection: socket.socket, address: str) -> None:
        self.stack.callback(connection.close)
        self.taken[worker][number] = connection
        self.handover.opened(self.recipients[worker], [number])

    def _lose(self, recipient: Recipient, number: int) -> None:
        self.handover.opened(recipient, [number])
        self.handover.closed(recipient, [number])


def run(main: Any, **limits: Any) -> None:
    async def inner() -> None:
        with ExitStack() as stack:
            await main(Workers(stack, **limits))

    asyncio.run(inner())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_connection_goes_to_the_worker_with_fewest() -> None:
    async def main(workers: Workers) -> None:
        for reader in workers.readers:
            await reader.start_serving()
        for _ in range(6):
            client = workers.connect()
            await turns()
        assert [len(taken) for taken in workers.taken.values()] == [3, 3]
        workers.taken[1][6].sendall(b"served")
        assert client.recv(10) == b"served"
        workers.handover.closed(workers.recipients[0], [1, 3])
        for _ in range(2):
            workers.connect()
            await turns()
        assert [len(taken) for taken in workers.taken.values()] == [5, 3]
        assert workers.handover.connections.open == 6
        for reader in workers.readers:
            reader.close()
            await reader.wait_closed()

    run(main)


def test_what_a_dead_worker_had_not_taken_goes_to_another() -> None:
    async def main(workers: Workers) -> None:
        clients = [workers.connect() for _ in range(4)]  # two for each, and nobody takes them yet
        assert [len(one.sent) for one in workers.recipients] == [2, 2]
        workers.handover.ended(workers.recipients[0])
        assert len(workers.recipients[1].sent) == 4
        await workers.readers[1].start_serving()
        await turns()
        assert len(workers.taken[1]) == 4 and not workers.recipients[1].sent
        for connection in workers.taken[1].values():
            connection.sendall(b"x")
        assert [client.recv(1) for client in clients] == [b"x"] * 4
        workers.handover.ended(workers.recipients[1])
        assert workers.handover.connections.open == 0
        late = workers.connect()  # no worker lives: it waits for the next one
        workers.handover.close()
        assert late.recv(1) == b""
        workers.readers[1].close()

    run(main)


def test_a_worker_that_says_nothing_gets_connections_last() -> None:
    async def main(workers: Workers) -> None:
        workers.recipients[0].late = True
        for _ in range(5):
            workers.connect()
        assert [len(one.sent) for one in workers.recipients] == [0, 5]
        workers.recipients[1].late = True
        workers.connect()
        assert [len(one.sent) for one in workers.recipients] == [1, 5]
        workers.handover.close()

    run(main)


def test_limits_count_the_connections_of_all_workers() -> None:
    async def main(workers: Workers) -> None:
        for _ in range(2):
            workers.connect("10.0.0.1")
        assert workers.connect("10.0.0.1").recv(1000).startswith(b"HTTP/1.1 503")
        workers.connect("10.0.0.2")
        assert workers.handover.connections.ended == {"refused": 1}
        assert sum(len(one.sent) for one in workers.recipients) == 3
        workers.handover.close()

    run(main, max_connections_per_address=2)


def test_a_connection_is_closed_for_which_the_worker_has_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent kept it, and its client waited without end."""
    receive, given = socket.recv_fds, 0

    def receive_first(*args: Any) -> Any:
        nonlocal given
        data, files, *rest = receive(*args)
        given += 1
        if given > 1:
            for file in files:
                os.close(file)
            files = []
        return data, files, *rest

    monkeypatch.setattr(socket, "recv_fds", receive_first)

    async def main(workers: Workers) -> None:
        workers.handover.leave(workers.recipients[1])
        await workers.readers[0].start_serving()
        first, second = workers.connect(), workers.connect()
        await turns()
        assert second.recv(1) == b"" and not workers.recipients[0].sent
        assert workers.handover.connections.open == 1 and len(workers.taken[0]) == 1
        workers.taken[0][1].sendall(b"x")
        assert first.recv(1) == b"x"
        workers.readers[0].close()

    run(main)
