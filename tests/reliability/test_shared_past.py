"""One past for a whole fleet: two gateways and two engines, each a program of its own, over one PostgreSQL server.

`CHAOS_RECORD=FILE` appends a line of JSON for each phase: how long until one engine knew what the other had answered,
and how many steps the same answers took there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.reliability, pytest.mark.long, pytest.mark.timeout(900)]

ENGINE = """
[backends.local]
kind = "torch"
model = {model}
[models.tiny]
backend = "local"
"""
GATEWAY = """
[backends.one]
kind = "openai"
base_url = "{one}/v1"
model = "tiny"
[backends.two]
kind = "openai"
base_url = "{two}/v1"
model = "tiny"
[models.one]
backend = "one"
[models.two]
backend = "two"
[models.tiny]
backends = ["one", "two"]
placement = "round_robin"
"""
Prompts = Sequence[str]


class Member:
    """A gateway, or an engine behind one: `agentspec serve` with these tables and the shared database."""

    def __init__(self, folder: Path, path: str, tables: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        folder.mkdir()
        file = folder / "agentspec.toml"
        file.write_text(f"[server]\nport = {port}\n[cache]\npath = {json.dumps(path)}\n{tables}")
        command = [sys.executable, "-c", "from agentspec.cli import app; app()", "serve", "--config", str(file)]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=300)

    def is_ready(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def known(self) -> int:
        """How many sequences this engine drafts from."""
        [found] = re.findall(r"^agentspec_index_sequences (\S+)", self.client.get("/metrics").text, re.MULTILINE)
        return int(float(found))

    def ask(self, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
        """The answer, and what speculation did. A seed makes it the same at both engines."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "seed": 7}
        answer = self.client.post("/v1/chat/completions", json={**body, "temperature": 1.0})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        return told["choices"][0]["message"]["content"], told["speculation"]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """As one that is too slow for anything."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        assert self.process.wait(60) == 0


class Fleet:
    """Each gateway has the models `one` and `two`, an engine each, and `tiny`, which is either."""

    def __init__(self, folder: Path, path: str, model: Path, stack: ExitStack) -> None:
        def start(name: str, tables: str) -> Member:
            member = Member(folder / name, path, tables)
            stack.callback(member.close)
            return member

        self._numbers = itertools.count()
        self._answers = 0
        self.engines = {name: start(name, ENGINE.format(model=json.dumps(str(model)))) for name in ("one", "two")}
        urls = {name: engine.url for name, engine in self.engines.items()}
        self.gateways = {name: start(f"gateway {name}", GATEWAY.format(**urls)) for name in ("one", "two")}
        wait(lambda: all(member.is_ready() for member in (*self.engines.values(), *self.gateways.values())))

    def prompts(self, count: int = 6) -> Prompts:
        return [f"question {next(self._numbers)}" for _ in range(count)]

    def asked(self, engine: str, prompts: Prompts) -> list[tuple[str, dict[str, Any]]]:
        """What an engine answers by way of its gateway."""
        self._answers += len(prompts)
        return [self.gateways[engine].ask(engine, prompt) for prompt in prompts]

    def settle(self) -> None:
        """Wait until both engines know all that either has answered."""
        wait(lambda: all(engine.known() == self._answers for engine in self.engines.values()))

    def keeps_answers(self) -> None:
        """What one gateway has stored, the other can read."""
        self._answers += 1
        writing, reading = self.gateways.values()
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
        stored = writing.client.post("/v1/responses", json=body).json()
        assert stored["store"] and reading.client.get(f"/v1/responses/{stored['id']}").json() == stored


def wait(condition: Any, seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def other(engine: str) -> str:
    return {"one": "two", "two": "one"}[engine]


def follows(fleet: Fleet, phase: str, teacher: str, learned: Any, since: float) -> None:
    """The other engine soon drafts what this one has answered, word for word, in far fewer steps."""
    learner = other(teacher)
    prompts, first = learned
    fleet.settle()
    lag = time.monotonic() - since
    second = fleet.asked(learner, prompts)
    assert [text for text, _ in second] == [text for text, _ in first]
    cold, warm = (sum(told["steps"] for _, told in answers) for answers in (first, second))
    if record := os.environ.get("CHAOS_RECORD"):
        line = {"phase": phase, "known after": round(lag, 2), "steps at first": cold, "steps there": warm}
        with open(record, "a") as file:
            file.write(json.dumps({**line, "load": round(os.getloadavg()[0], 1)}) + "\n")
    assert all(told["accepted"] >= 24 for _, told in second), second
    assert warm <= cold / 2


def learns(fleet: Fleet, engine: str) -> tuple[Prompts, list[tuple[str, dict[str, Any]]]]:
    prompts = fleet.prompts()
    return prompts, fleet.asked(engine, prompts)


def test_what_one_engine_learns_the_other_drafts_whatever_happens_to_the_database(
    server: Any, postgres: str, tiny_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stack.callback(server.start)
        fleet = Fleet(tmp_path, postgres, tiny_model, stack)
        for engine in fleet.engines:  # from now on the namespace is in memory
            fleet.asked(engine, fleet.prompts(1))
        fleet.settle()
        for teacher in fleet.engines:
            learned = learns(fleet, teacher)
            follows(fleet, f"{teacher} answers", teacher, learned, time.monotonic())
        fleet.keeps_answers()

        for slow in fleet.engines:  # the first is the database's writer
            with fleet.engines[slow].stopped():
                learned = learns(fleet, other(slow))
            follows(fleet, f"{slow} was stopped", other(slow), learned, time.monotonic())
        with fleet.gateways["one"].stopped():
            learned = learns(fleet, "two")
        follows(fleet, "a gateway was stopped", "two", learned, time.monotonic())

        server.stop()
        assert all(told["accepted"] >= 24 for _, told in fleet.asked("two", learned[0]))  # what it knows, it drafts
        learned = learns(fleet, "one")
        server.start()
        follows(fleet, "the database was away", "one", learned, time.monotonic())
        fleet.keeps_answers()
