"""The log lines, and the thread that writes them while requests go on."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from agentspec.proxy import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_json() -> None:
    stream = io.StringIO()
    logs.configure("INFO", stream)
    logs.logger.info("said\nthis 100 %", count=3, name="é\ud800", odd=object)
    logs.logger.debug("not this")
    logging.getLogger("elsewhere").warning("by %s", "another")
    first, second = lines_of(stream)
    assert (first["event"], first["count"], first["level"]) == ("said\nthis 100 %", 3, "info")
    assert first["name"] == "é\ud800" and "object" in str(first["odd"])
    assert str(first["timestamp"]).endswith("Z") and len(str(first["timestamp"])) == 27
    assert (second["event"], second["logger"], second["level"]) == ("by another", "elsewhere", "warning")


@pytest.mark.parametrize("background", [False, True])
def test_whoever_logs_what_cannot_be_written_goes_on(background: bool) -> None:
    stream = io.StringIO()
    logs.configure("INFO", stream, background=background)
    logging.getLogger("elsewhere").warning("%d of %d", "one")
    logging.getLogger().handlers[0].flush()
    assert lines_of(stream)[0]["event"] == "%d of %d"


def test_a_thread_writes_every_line_in_order() -> None:
    stream = io.StringIO()
    logs.configure("INFO", stream, background=True)
    threads = [threading.Thread(target=lambda: [logs.logger.info("said", n=n) for n in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logging.getLogger().handlers[0].flush()
    numbers = [line["n"] for line in lines_of(stream)]
    assert len(numbers) == 2000 and sorted(numbers) == sorted(list(range(500)) * 4)  # type: ignore[type-var]


class Stuck(io.StringIO):
    """A log that nobody reads, until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.open.wait(60)
        return super().write(text)


def test_a_log_that_nobody_reads_holds_nothing_up_and_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    stream = Stuck()
    logs.configure("INFO", stream, background=True)
    logs.logger.info("first")
    assert stream.entered.wait(60)
    for number in range(25):
        logs.logger.error("later", n=number)
    stream.open.set()
    logging.getLogger().handlers[0].flush()
    found = lines_of(stream)
    assert [line["n"] for line in found if line["event"] == "later"] == list(range(10))
    assert [line["count"] for line in found if line["event"] == "log lines dropped"] == [15]


def test_no_line_is_lost_at_the_end() -> None:
    """However a process ends: each of these is a fork of one that has loaded the gateway."""
    ends = ["", "import logging, os; logging.shutdown(); os._exit(0)", "raise SystemExit(0)"]
    program = f"""
import os
from agentspec.proxy import logs
for end in {ends}:
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
logs.configure("INFO", background=True)
for number in range(1000):
    logs.logger.info("said", n=number)
exec(end)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert [json.loads(line)["n"] for line in result.stderr.splitlines()] == list(range(1000)) * len(ends)
