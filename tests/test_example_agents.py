"""The example agents, each run as its reader runs it, at a gateway whose model plays a script, and with nonsense."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agentspec.proxy import create_app
from agentspec.recordings.formats import detect, read
from agentspec.runtime import Runtime
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest, Speculation

pytestmark = pytest.mark.slow
SPECULATION = Speculation(drafted=5, accepted=4, steps=2, estimated_seconds_saved=0.125)

Play = Callable[[str], str]


def process(repository: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


class Stage:
    """A gateway whose model answers by what the prompt says, and the examples run against it."""

    def __init__(self, repository: Path, url: str, play: list[Play]) -> None:
        self._repository, self._url, self._play = repository, url, play

    def run(self, name: str, play: Play, *arguments: str) -> str:
        self._play[:] = [play]
        done = process(self._repository, name, "--base-url", self._url, "--model", "fake", *arguments)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    play: list[Play] = []

    def answer(asked: GenerateRequest) -> Answer:
        last: Any = (asked.messages or [{}])[-1]
        return Answer(play[0](str(last.get("content"))), speculation=SPECULATION)

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Runtime(backends={"fake": FakeBackend(answer)}))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Stage(Path(__file__).parents[1], f"http://127.0.0.1:{listener.getsockname()[1]}/v1", play)
    server.should_exit = True
    thread.join()
    listener.close()


def steps(printed: str) -> dict[str, list[str]]:
    """The rows of the report at the end, by their step."""
    table = printed[re.search(r"workflow +step", printed).start() :].splitlines()  # type: ignore[union-attr]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table[1:]]
    return {row[1]: row for row in rows}


def nonsense(prompt: str) -> str:
    return "I am a teapot, {short and [stout"


def replayable(path: Path) -> set[str | None]:
    """The steps of the calls that `agentspec cache replay` finds in a record."""
    return {call.labels.step for call in read(path, detect(path))}


def sql_model(prompt: str) -> str:
    if "Name the tables" in prompt:
        return "customers"
    if "Mend this query" in prompt:
        return "```sql\nSELECT city, COUNT(*) FROM customers GROUP BY city;\n```"
    if "Rows found" in prompt:
        return f"There are {len(re.findall(r'Rome|Oslo|Lima|Kyoto', prompt))} cities."
    return "SELECT town, COUNT(*) FROM customers GROUP BY town"


def test_text_to_sql(stage: Stage, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    printed = stage.run("text_to_sql/agent.py", sql_model, "Customers by city?", "--record", str(record))
    assert "There are 4 cities." in printed and "SELECT city, COUNT(*) FROM customers GROUP BY city" in printed
    assert set(steps(printed)) == {"link", "write", "repair", "answer"}
    assert "0.12" in steps(printed)["write"][-1]
    assert replayable(record) == {"link", "write", "repair", "answer"}


def test_text_to_sql_survives_what_a_model_may_write(stage: Stage) -> None:
    written = ["DROP TABLE customers", "SELECT 1; DROP TABLE customers", "DELETE FROM orders", "```sql\n```", "With x"]
    written.append("I would start with the highest price.")
    written.append("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n")
    asked = [f"case {number}" for number in range(len(written))]

    def play(prompt: str) -> str:
        return written[int(re.findall(r"case (\d)", prompt)[0])]

    printed = stage.run("text_to_sql/agent.py", play, *asked)
    assert printed.count("I found no answer.") == len(written) - 1  # the first half of the second is a query
    assert printed.count("(no query)") == 5


def market_model(prompt: str) -> str:
    if "Decide" not in prompt:
        return f"The {prompt.split()[4]} is fine."
    assert prompt.count("is fine.") == 4
    return json.dumps({"action": "sell", "reason": "four analysts say so"})


def test_market_agents(stage: Stage, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    printed = stage.run("market_agents/agent.py", market_model, "--record", str(record))
    assert [line for line in printed.splitlines() if ": sell." in line] == [
        f"{symbol}: sell. four analysts say so" for symbol in ("ALFA", "BETA", "GAMA")
    ]
    rows = steps(printed)
    assert set(rows) == {"trend", "momentum", "risk", "volume", "decide"} == replayable(record)
    assert {row[5] for row in rows.values()} == {"3"}  # calls: one for each symbol


def series_model(prompt: str) -> str:
    if "Choose a method" in prompt:
        return json.dumps({"method": "drift", "outliers": "clip"})
    return "It goes up and down with the year."


def test_time_series(stage: Stage, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    printed = stage.run("time_series/agent.py", series_model, "--record", str(record))
    assert all(f"{name}: " in printed for name in ("sales", "visits", "repairs"))
    assert printed.count("It goes up and down with the year.") == 3
    assert set(steps(printed)) == {"curator", "planner", "reporter"} == replayable(record)


def test_rag_agent(stage: Stage, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    printed = stage.run("rag_agent.py", lambda prompt: "Two businessmen.", "--record", str(record))
    assert "draft: Two businessmen." in printed and "check: Two businessmen." in printed
    assert set(steps(printed)) == {"draft", "check"} == replayable(record)


AGENTS = ("text_to_sql/agent.py", "market_agents/agent.py", "time_series/agent.py", "rag_agent.py")
MISTAKES = (
    (("--base-url", "http://127.0.0.1:9/v1"), "(ConnectError): check its address"),
    (("--base-url", "127.0.0.1:9/v1"), "must begin with http"),
    (("--model", "nosuch"), "no model 'nosuch'. Give a built-in name"),
    (("--record", "/nonexistent/calls.jsonl"), "name a file in a folder that exists"),
)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (AGENTS[0], *MISTAKES[0]),
        *(pytest.param(name, *MISTAKES[0], marks=pytest.mark.long) for name in AGENTS[1:]),
        *(pytest.param(AGENTS[0], *mistake, marks=pytest.mark.long) for mistake in MISTAKES[1:]),
    ],
)
def test_a_mistake_is_answered_in_a_line(repository: Path, name: str, arguments: tuple[str, ...], said: str) -> None:
    done = process(repository, name, *arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("text_to_sql", "Customers?", "I found no answer."),
        ("market_agents", "ALFA", "ALFA: hold. the answer was no decision"),
        ("time_series", "sales", "(seasonal, mean error"),
    ],
)
def test_nonsense_is_answered(stage: Stage, name: str, asked: str, said: str) -> None:
    assert said in stage.run(f"{name}/agent.py", nonsense, asked)


@pytest.mark.long
def test_rag_agent_says_where_the_question_stands(repository: Path) -> None:
    done = process(repository, "rag_agent.py", "Who was Hutton?")
    assert done.returncode == 2 and "the corpus comes first, then the question" in done.stderr
