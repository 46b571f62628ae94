from __future__ import annotations

import pytest

from agentspec.benchmarks.decode import (
    EDIT_GOALS,
    SECOND,
    DecodeBench,
    second_tenant,
)
from agentspec.benchmarks.report import rotated
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, Run, RunTable, warm_name
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import Speculation


def test_the_order_rotates_so_that_none_is_always_first() -> None:
    variants = {name: (lambda prompt, index: Run((), 1.0)) for name in "abc"}
    orders = ["".join(name for name, _ in rotated(variants, index)) for index in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def table_of(name: str, speeds: dict[str, float], pairs: int = 8) -> RunTable:
    table = RunTable(name)
    for variant, speed in speeds.items():
        for index in range(pairs):
            stats = None if variant == TRANSFORMERS else Speculation(drafted=10, accepted=5, steps=25)
            table.add(variant, Run((index, *range(99)), 100 / speed, stats))
    return table


@pytest.fixture
def edit() -> RunTable:
    return table_of("edit", {TRANSFORMERS: 10.0, OFF: 12.0, COLD: 21.0, warm_name(100): 40.0, SECOND: 80.0})


def test_goals_are_judged_by_the_interval(edit: RunTable) -> None:
    assert [edit.verdict(goal) for goal in EDIT_GOALS] == ["met", "missed", "met", "met"]


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
