from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.vllm.bench import (
    ARCTIC,
    COLD,
    CONTROL,
    NONE,
    PLUGIN,
    PREDICTED,
    PREDICTING,
    RESTARTED,
    TOGETHER,
    WARM,
    ClientAnswer,
    DraftingCost,
    VllmBenchReport,
    ask,
    drafting_cost,
    variants,
)
from agentspec.benchmarks.vllm.server import VllmServer, find_environment, free_port
from agentspec.cli import app

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "one two"}}]},
    {"choices": [{"delta": {"content": " three"}}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


class Canned(BaseHTTPRequestHandler):
    """A server that streams one answer and has counters."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.reply('# HELP x\nvllm:x_total{engine="0"} 2.0\nvllm:x_total{engine="1"} 3.0\nvllm:x_totals 9.0\n')

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[VllmServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Canned) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield VllmServer(Path(), Path(), Path(), port=http.server_address[1])
        http.shutdown()


def test_an_answer_as_a_client_sees_it(server: VllmServer) -> None:
    answer = ask(server, "count", max_tokens=3)
    assert (answer.text, answer.tokens, answer.steps) == ("one two three", 3, 2)
    assert server.metric("vllm:x_total") == 5.0
    assert server.metric("vllm:y_total") == 0.0


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no model there\nexit 1\n")
    program.chmod(0o755)
    assert find_environment(tmp_path) is None
    server = VllmServer(tmp_path, Path("model"), tmp_path / "log", {"method": "suffix"}, port=free_port())
    with pytest.raises(RuntimeError, match="no model there"):
        server.start()
    assert not server.running
    server.stop()


def test_the_environment_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    monkeypatch.setenv("AGENTSPEC_VLLM_ENV", str(tmp_path))
    assert find_environment() == tmp_path
    assert ARCTIC not in variants(tmp_path, tmp_path)
    (tmp_path / "lib/python3.11/site-packages/arctic_inference").mkdir(parents=True)
    found = variants(tmp_path, tmp_path)
    assert list(found) == [NONE, "ngram", ARCTIC, PLUGIN, PREDICTING]
    assert found[PLUGIN][1]["AGENTSPEC_CACHE_PATH"] == str(tmp_path / "suffix")


def test_the_report_judges_by_intervals(tmp_path: Path) -> None:
    report = VllmBenchReport(
        DraftingCost(8, 0.3, 0.9, 20.0), elapsed=dict.fromkeys((NONE, ARCTIC, PLUGIN, PREDICTING), 2.0)
    )
    speeds = {NONE: 10.0, ARCTIC: 20.0, PLUGIN: 30.0, PREDICTING: 20.0}
    for part in (COLD, WARM, PREDICTED, CONTROL, TOGETHER, RESTARTED):
        for name, speed in speeds.items():
            for _ in range(8):
                report.add(part, name, ClientAnswer("same", 20, 10, 20 / speed))
    report.acceptance[PLUGIN] = 0.5
    console = Console(record=True, width=150)
    print_report(report, console)
    text = console.export_text()
    assert f"{PLUGIN} cold / {ARCTIC} cold: 1.50x [1.50, 1.50], goal 1.0x: met" in text
    assert f"{PREDICTING} {PREDICTED} / {NONE} {PREDICTED}: 2.00x [2.00, 2.00], goal 2.5x: missed" in text
    assert "0.30 ms median, 0.90 ms p99, goal 0.4 ms: met" in text
    assert report.speed(TOGETHER, PLUGIN) == 80.0
    assert report.tokens_per_step(COLD, NONE) == 2.0
    assert report.identical(WARM, PLUGIN) == 8
    write_json(report, tmp_path / "out.json", {"cpus": 2})
    assert json.loads((tmp_path / "out.json").read_text())["drafting"]["median_ms"] == 0.3


def test_drafting_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec.benchmarks.vllm import bench

    monkeypatch.setattr(bench, "STEPS", 40)
    monkeypatch.setattr(bench, "STEP_SECONDS", 0.002)
    cost = drafting_cost(2, 20_000)
    assert cost.requests == 2
    assert 0 < cost.median_ms <= cost.p99_ms


def test_without_vllm_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "vllm"])
    assert result.exit_code != 0
    assert ".ci/vllm-env" in result.output + str(result.exception)
