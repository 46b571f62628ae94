from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from agentspec.benchmarks.agent import AgentBench, AgentReport
from agentspec.benchmarks.agent_workflows import Workflow, WorkflowTurn
from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.runs import COLD, TRANSFORMERS, Run, RunTable, warm_name
from agentspec.types import Speculation

WARM = warm_name(20)


def flow_of(name: str, *asked: str) -> Workflow:
    return Workflow(name, tuple(WorkflowTurn(text, text.upper()) for text in asked))


def report_of(seconds: dict[str, float]) -> AgentReport:
    table = RunTable("agent sessions", turns=2)
    for _ in range(14):
        for name, value in seconds.items():
            stats = None if name == TRANSFORMERS else Speculation(drafted=90, accepted=75, steps=25)
            table.add(name, Run((1,) * 100, value, stats))
    return AgentReport(table, WARM, ((500, 4000),) * 7)


def test_the_report_compares_whole_sessions_with_transformers(tmp_path: Path) -> None:
    report = report_of({TRANSFORMERS: 40.0, COLD: 10.0, WARM: 16.0})
    console = Console(record=True, width=140)
    print_report(report, console)
    text = console.export_text()
    assert "7 sessions: prompts of 500 to 4000 tokens, answers of 100" in text
    assert f"{COLD} / {TRANSFORMERS}: 4.00x [4.00, 4.00], goal 3.0x: met" in text
    assert f"{WARM} / {TRANSFORMERS}: 2.50x [2.50, 2.50], goal 4.0x: missed" in text
    assert "80.0" in text and "14/14" in text
    write_json(report, tmp_path / "out.json", {"model": "m"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["ratios"][COLD]["pairs"] == 7 and len(data["runs"][COLD]) == 14
    assert [goal["verdict"] for goal in data["goals"]] == ["met", "missed"]


def test_all_variants_answer_alike(model: str) -> None:
    """Two short turns: the same tokens from all, transformers with its rows kept included."""
    flow = flow_of("short", "Say: one two three.", "Say it again.")
    bench = AgentBench.load(model, lambda message: None)
    try:
        table, _ = bench.measure([flow], bench.variants(1, off=True, kept=True))
    finally:
        bench.close()
    assert len(table.runs) == 5
    assert len({tuple(run.tokens for run in runs) for runs in table.runs.values()}) == 1
