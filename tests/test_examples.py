"""Every example runs as its reader runs it, in a process of its own; the agents at a gateway with a scripted model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec.recordings.formats import read
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest, Speculation
from tests.proxy.conftest import run_gateway

SPECULATION = Speculation(drafted=5, accepted=4, steps=2, estimated_seconds_saved=0.125)

Play = Callable[[str], str]


def process(repository: Path, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::ResourceWarning", str(repository / "examples" / name), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )


def run(repository: Path, name: str, *arguments: str, **environment: str) -> str:
    done = process(repository, name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def play() -> list[Play]:
    """How the model of the gateway answers a prompt."""
    return [lambda prompt: "hello from the gateway"]


@pytest.fixture(scope="module")
def gateway(play: list[Play]) -> Iterator[str]:
    def answer(asked: GenerateRequest) -> Answer:
        last: Any = (asked.messages or [{}])[-1]
        return Answer(play[0](str(last.get("content"))), speculation=SPECULATION)

    with run_gateway({"fake": FakeBackend(answer)}) as running:
        yield f"{running.url}/v1"


def test_proxy_client(repository: Path, gateway: str) -> None:
    printed = run(repository, "proxy_client.py", OPENAI_BASE_URL=gateway)
    assert "hello from the gateway" in printed
    (row,) = [line for line in printed.splitlines() if "greet" in line]
    assert row.split()[:2] == ["example", "greet"]


@pytest.mark.slow
def test_proxy_client_says_in_a_line_what_is_wrong(repository: Path, gateway: str) -> None:
    nowhere = process(repository, "proxy_client.py", OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    assert nowhere.returncode == 1 and "start one with `agentspec serve`" in nowhere.stderr
    unknown = process(repository, "proxy_client.py", "nosuch", OPENAI_BASE_URL=gateway)
    assert unknown.returncode == 1 and "no model 'nosuch' here; configured: 'fake'" in unknown.stderr
    assert nowhere.stderr.count("\n") == unknown.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.model
def test_quickstart(repository: Path) -> None:
    printed = run(repository, "quickstart.py")
    assert "after 9 2 3 4 comes, by experience: [5" in printed
    first, second = (int(line.split()[-3]) for line in printed.splitlines() if "verify steps" in line)
    assert second < first


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "said"),
    [("decorator.py", ("polish", "letters")), ("langgraph_agent.py", ("capitals", "check", "ai:"))],
)
def test_examples_in_process(repository: Path, name: str, said: tuple[str, ...]) -> None:
    printed = run(repository, name)
    assert all(one in printed for one in said)


@pytest.mark.long
@pytest.mark.model
def test_rag_agent_in_process(repository: Path) -> None:
    printed = run(repository, "rag_agent.py")
    assert "draft: " in printed and "check: " in printed
    own = run(repository, "rag_agent.py", str(repository / "examples" / "passages.jsonl"), "Who", "was", "Hutton?")
    assert "draft: " in own and "check: " in own


class Stage:
    """The gateway, and the example agents run against it, whose model answers by what the prompt says."""

    def __init__(self, repository: Path, url: str, play: list[Play], folder: Path) -> None:
        self.repository, self.url, self.play, self.record = repository, url, play, folder / "calls.jsonl"

    def run(self, name: str, play: Play, *arguments: str) -> str:
        self.play[:] = [play]
        options = ("--base-url", self.url, "--model", "fake", "--record", str(self.record), *arguments)
        return run(self.repository, name, *options)

    @property
    def recorded(self) -> set[str | None]:
        """The steps of the calls that `agentspec cache replay` finds in the record."""
        return {call.labels.step for call in read(self.record)}


@pytest.fixture
def stage(repository: Path, gateway: str, play: list[Play], tmp_path: Path) -> Stage:
    return Stage(repository, gateway, play, tmp_path)


def steps(printed: str) -> dict[str, dict[str, str]]:
    """The rows of the report at the end, by their step."""
    table = printed[re.search(r"workflow +step", printed).start() :].partition("\n\n")[0]  # type: ignore[union-attr]
    heads, *rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    return {row[1]: dict(zip(heads, row, strict=True)) for row in rows}


def sql_model(prompt: str) -> str:
    if "Name the tables" in prompt:
        return "customers"
    if "Mend this query" in prompt:
        return "```sql\nSELECT city, COUNT(*) FROM customers GROUP BY city;\n```"
    if "Rows found" in prompt:
        return f"There are {len(re.findall(r'Rome|Oslo|Lima|Kyoto', prompt))} cities."
    return "SELECT town, COUNT(*) FROM customers GROUP BY town"


@pytest.mark.slow
def test_text_to_sql(stage: Stage) -> None:
    printed = stage.run("text_to_sql/agent.py", sql_model, "Customers by city?")
    assert "There are 4 cities." in printed and "SELECT city, COUNT(*) FROM customers GROUP BY city" in printed
    assert set(steps(printed)) == {"link", "write", "repair", "answer"}
    assert "0.12" in steps(printed)["write"]["est. s saved"]
    assert stage.recorded == {"link", "write", "repair", "answer"}


def market_model(prompt: str) -> str:
    if "Decide" not in prompt:
        return f"The {prompt.split()[4]} is fine."
    assert prompt.count("is fine.") == 4
    return json.dumps({"action": "sell", "reason": "four analysts say so"})


@pytest.mark.slow
def test_market_agents(stage: Stage) -> None:
    printed = stage.run("market_agents/agent.py", market_model)
    assert [line for line in printed.splitlines() if ": sell." in line] == [
        f"{symbol}: sell. four analysts say so" for symbol in ("ALFA", "BETA", "GAMA")
    ]
    rows = steps(printed)
    assert set(rows) == {"trend", "momentum", "risk", "volume", "decide"} == stage.recorded
    assert {row["calls"] for row in rows.values()} == {"3"}  # one for each symbol


def series_model(prompt: str) -> str:
    if "Choose a method" in prompt:
        return json.dumps({"method": "drift", "outliers": "clip"})
    return "It goes up and down with the year."


@pytest.mark.slow
def test_time_series(stage: Stage) -> None:
    printed = stage.run("time_series/agent.py", series_model)
    assert all(f"{name}: " in printed for name in ("sales", "visits", "repairs"))
    assert printed.count("It goes up and down with the year.") == 3
    assert set(steps(printed)) == {"curator", "planner", "reporter"} == stage.recorded


@pytest.mark.slow
def test_rag_agent(stage: Stage) -> None:
    printed = stage.run("rag_agent.py", lambda prompt: "Two businessmen.")
    assert "draft: Two businessmen." in printed and "check: Two businessmen." in printed
    assert set(steps(printed)) == {"draft", "check"} == stage.recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--base-url", "http://127.0.0.1:9/v1"), "(ConnectError): check its address"),
        (("--record", "/nonexistent/calls.jsonl"), "name a file in a folder that exists"),
    ],
)
def test_a_mistake_is_answered_in_a_line(repository: Path, arguments: tuple[str, ...], said: str) -> None:
    done = process(repository, "text_to_sql/agent.py", *arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr


def test_every_example_is_tested(repository: Path) -> None:
    tested = Path(__file__).read_text()
    assert [path.name for path in (repository / "examples").glob("*.py") if f'"{path.name}"' not in tested] == []
