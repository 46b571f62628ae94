"""Rounds of requests at once: what is counted of each, and what is told of all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.vllm import together
from agentspec.benchmarks.vllm.bench import ARCTIC, PLUGIN, VllmInstallation
from agentspec.benchmarks.vllm.client import ClientAnswer
from agentspec.benchmarks.vllm.process import ServerProcess
from agentspec.benchmarks.vllm.together import COUNTERS, LoadedRound, TogetherReport
from agentspec.cli import app
from agentspec.errors import ConfigurationError


class Counting:
    """A server whose counters and processor time rise with every answer."""

    def __init__(self) -> None:
        self.answered = 0

    def metric(self, name: str) -> float:
        return float(self.answered * (1 + list(COUNTERS.values()).index(name)))

    def processor(self) -> float:
        return 0.5 * self.answered


def test_a_round_counts_what_the_server_did_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Counting()

    def ask(server: Any, prompt: str, **options: Any) -> ClientAnswer:
        server.answered += 1
        return ClientAnswer(prompt, 10, 2, 0.1)

    monkeypatch.setattr(together, "ask", ask)
    for _ in range(2):
        found = together._round(server, ["a", "b", "c"])
        assert (found.tokens, found.texts, found.processor) == (30, ("a", "b", "c"), 1.5)
        assert (found.drafts, found.drafted, found.accepted, found.steps) == (3.0, 6.0, 9.0, 12.0)
        assert found.processor_speed == 20.0


def shown(rounds: int, tmp_path: Path) -> str:
    report = TogetherReport(12)
    for name, seconds in ((ARCTIC, 12.0), (PLUGIN, 10.0)):
        report.rounds[name] = [LoadedRound(seconds, seconds / 2, 600, 60, 600, 540, 20, ("text",))] * rounds
    console = Console(record=True, width=200)
    print_report(report, console)
    write_json(report, tmp_path / "out.json", {})
    assert len(json.loads((tmp_path / "out.json").read_text())["rounds"][PLUGIN]) == rounds
    return console.export_text()


def test_seven_rounds_are_judged(tmp_path: Path) -> None:
    text = shown(7, tmp_path)
    assert "10.0 a chain, 30.0 a step" in text and "90%" in text
    assert "rounds with equal texts: 7 of 7" in text
    assert text.count("1.20x [1.20, 1.20], goal 1.15x: met") == 2


def test_fewer_are_shown_and_not_judged(tmp_path: Path) -> None:
    text = shown(2, tmp_path)
    assert "round by round: 1.20, 1.20" in text and "goal" not in text


def test_without_arctic_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    place = VllmInstallation(tmp_path, tmp_path)
    with pytest.raises(ConfigurationError, match="arctic-inference"):
        together.run_together(place, rounds=1, limit=None, progress=lambda said: None)
    result = CliRunner().invoke(app, ["bench", "vllm", "--environment", str(tmp_path), "--long"])
    assert result.exit_code != 0 and "--together" in result.output


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_processor_time_of_a_server_and_its_children(tmp_path: Path) -> None:
    busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    server = ServerProcess(log=tmp_path / "log", command=["sh", "-c", f"({busy}; echo done; sleep 60) & wait"])
    assert server.processor() == 0.0
    server.launch()
    while "done" not in server.text():
        time.sleep(0.01)
    assert 0.0 < server.processor() < 60.0
    server.kill()
