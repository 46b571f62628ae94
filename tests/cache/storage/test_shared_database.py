"""Several nodes on one PostgreSQL server: each sees what all wrote, with one slow, with the server away for a while."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from agentspec.cache import SuffixCache

if TYPE_CHECKING:
    from conftest import Server

CONNECTIONS = 6  # that one node keeps at the most: the writer's lock, and its threads' at work


def record(cache: SuffixCache, *output: int) -> None:
    with cache.request([1, 2], store=True) as request:
        request.extend(output)


def wait(condition: Callable[[], object], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def test_all_nodes_see_what_each_wrote_over_few_connections(server: Server, postgres: str) -> None:
    with ExitStack() as opened:
        nodes = [opened.enter_context(SuffixCache.open(postgres)) for _ in range(6)]
        assert [node.stats().mode for node in nodes] == ["writer", *["follower"] * 5]
        for number, node in enumerate(nodes):
            for turn in range(5):
                record(node, 100 * number + turn + 10, 7, 8, 9)
        for node in nodes:
            node.flush()
        wait(lambda: all(node.stats().sequences == 30 for node in nodes))
        taken = server.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")[0][0]
        assert taken - 1 <= CONNECTIONS * len(nodes)
        nodes[0].close()  # another becomes the writer
        wait(lambda: [node.stats().mode for node in nodes[1:]].count("writer") == 1)


NODE = """
import sys, time
from agentspec.cache import SuffixCache
from agentspec.errors import CacheError
number = int(sys.argv[2])
with SuffixCache.open(sys.argv[1]) as cache:
    for turn in range(1000):
        with cache.request([1, 2]) as request:
            request.extend([1000 * number + turn + 10, 7, 8, 9])
        while True:
            try:
                cache.flush()
                break
            except CacheError:
                time.sleep(0.2)
        print(turn + 1, flush=True)
        if cache.stats().unwritten or sys.stdin.closed:
            raise SystemExit("lost")
        time.sleep(0.01)
"""


class Node:
    """A process that writes outputs one after the other; `flushed` of them are durable."""

    def __init__(self, address: str, number: int) -> None:
        command = [sys.executable, "-W", "ignore", "-c", NODE, address, str(number)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.flushed = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.flushed = int(line)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def running(address: str, count: int) -> Iterator[list[Node]]:
    with ExitStack() as started:
        yield [started.enter_context(_closing(Node(address, number))) for number in range(count)]


@contextmanager
def _closing(node: Node) -> Iterator[Node]:
    try:
        yield node
    finally:
        node.close()


def all_go_on(nodes: list[Node]) -> None:
    before = [node.flushed for node in nodes]
    wait(lambda: all(node.flushed >= old + 3 for node, old in zip(nodes, before, strict=True)))
    assert all(node.process.poll() is None for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_one_slow_node_and_a_server_that_restarts_lose_nothing(server: Server, postgres: str) -> None:
    """A node that hangs inside a transaction keeps others from writing for a minute at most, see `writing`."""
    with running(postgres, 4) as nodes:
        all_go_on(nodes)
        for slow in nodes[:2]:  # the first is the writer
            slow.send(signal.SIGSTOP)
            all_go_on([node for node in nodes if node is not slow])
            slow.send(signal.SIGCONT)
            all_go_on(nodes)
        server.stop()
        time.sleep(2)
        server.start()
        all_go_on(nodes)
        nodes[0].process.kill()
        all_go_on(nodes[1:])
    durable = sum(node.flushed for node in nodes)
    with SuffixCache.open(postgres) as cache:
        assert durable <= cache.stats().sequences <= durable + len(nodes)
