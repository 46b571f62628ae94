"""The benchmarks of decoding and of agent sessions: all variants answer alike, and goals are judged by intervals."""

from __future__ import annotations

from agentspec.benchmarks.agent import AgentBench
from agentspec.benchmarks.agent_workflows import Workflow, WorkflowTurn
from agentspec.benchmarks.decode import SECOND, DecodeBench
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS
from agentspec.recordings.prompt_sets import load_prompts


def test_all_variants_answer_alike(model: str) -> None:
    """A prompt through every variant but the long warm-up: same tokens, fewer steps on the second pass."""
    bench = DecodeBench.load(model, lambda message: None)
    try:
        prompt = load_prompts("edit_short")[0]
        bench.record(SECOND, [prompt])
        ids, variants = bench.encode(prompt), bench.variants()
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
