"""The benchmarks of decoding and of agent sessions: all variants answer alike, and goals are judged by intervals."""

from __future__ import annotations

from agentspec.benchmarks.agent import AgentBench, AgentReport
from agentspec.benchmarks.agent_workflows import Workflow, WorkflowTurn, workflow
from agentspec.benchmarks.decode import EDIT_GOALS, SECOND, DecodeBench, second_tenant
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, Run, RunTable, warm_name
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import Speculation

CODE = "class A:\n    def __init__(self, n):\n        self.n = n\n\n    def get_n(self, n):\n        return self.n + n"


def table_of(name: str, seconds: dict[str, float], pairs: int, turns: int = 1) -> RunTable:
    table = RunTable(name, turns=turns)
    for variant, value in seconds.items():
        stats = None if variant == TRANSFORMERS else Speculation(drafted=10, accepted=5, steps=25)
        for index in range(pairs):
            table.add(variant, Run((index, *range(99)), value, stats))
    return table


def test_goals_are_judged_by_the_interval() -> None:
    edit = table_of("edit", {TRANSFORMERS: 10.0, OFF: 8.0, COLD: 4.8, warm_name(100): 2.5, SECOND: 1.25}, 8)
    assert [edit.verdict(goal) for goal in EDIT_GOALS] == ["met", "missed", "met", "met"]
    warm = warm_name(20)
    sessions = table_of("agent sessions", {TRANSFORMERS: 40.0, COLD: 10.0, warm: 16.0}, 14, turns=2)
    data = AgentReport(sessions, warm, ((500, 4000),) * 7).data()
    assert data["ratios"][COLD]["pairs"] == 7 and len(data["runs"][COLD]) == 14
    assert [goal["verdict"] for goal in data["goals"]] == ["met", "missed"]


def test_all_variants_answer_alike(model: str) -> None:
    """A prompt through every variant but the long warm-up: same tokens, fewer steps on the second pass."""
    bench = DecodeBench.load(model, lambda message: None)
    try:
        ids = bench.encode(load_prompts("edit_short")[0])
        bench.record(second_tenant("test"), [ids])
        variants = bench.variants("test")
        runs = {name: variants[name](ids, 0) for name in (TRANSFORMERS, OFF, COLD, SECOND)}
    finally:
        bench.close()
    assert len({run.tokens for run in runs.values()}) == 1
    second, off = runs[SECOND].speculation, runs[OFF].speculation
    assert second is not None and (off is None or second.steps < off.steps)
    assert second.accepted > 0 and second.steps < len(runs[OFF].tokens)  # how few depends on the times of steps


def test_all_variants_of_a_session_answer_alike(model: str) -> None:
    """Two short turns: the same tokens from all, including transformers that reuses its rows."""
    turns = tuple(WorkflowTurn(text, text.upper()) for text in ("Say: one two three.", "Say it again."))
    bench = AgentBench.load(model, lambda message: None)
    try:
        table, _ = bench.measure([Workflow("short", turns)], bench.variants(1, off=True, kept=True))
    finally:
        bench.close()
    assert len(table.runs) == 5
    assert len({tuple(run.tokens for run in runs) for runs in table.runs.values()}) == 1


def test_history_and_files_are_as_if_each_step_had_been_done_rightly() -> None:
    first, second, third = workflow([CODE], 3, seed=0).turns
    assert "Add a docstring to each function" in first.asked and '"""Get n."""' not in first.asked
    assert first.answer == '```python\n    def get_n(self, n):\n        """Get n."""\n        return self.n + n\n```'
    assert "without any changes" in second.asked and second.asked.endswith(second.answer)
    assert second.answer == first.answer
    new = third.asked.partition("Rename n to ")[2].split()[0]
    assert f"def get_n(self, {new}):" in third.answer and f"return self.n + {new}" in third.answer
    assert new not in third.asked.partition("Rename")[0]
