from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from agentspec.benchmarks.decode import (
    CONTROL_DISTINCT,
    EDIT_GOALS,
    SECOND,
    DecodeBench,
    DecodeReport,
    distinct_ngrams,
    require_distinct,
    second_tenant,
)
from agentspec.benchmarks.report import RatioGoal, print_report, rotated, write_json
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, Run, RunTable, warm_name
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import Speculation


def test_the_order_rotates_so_that_none_is_always_first() -> None:
    variants = {name: (lambda prompt, index: Run((), 1.0)) for name in "abc"}
    orders = ["".join(name for name, _ in rotated(variants, index)) for index in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_a_control_that_repeats_is_refused() -> None:
    varied, repeated = Run(tuple(range(50)), 1.0), Run((1, 2) * 25, 1.0)
    require_distinct([varied, varied])
    with pytest.raises(ValueError, match=f"need {CONTROL_DISTINCT}"):
        require_distinct([varied, repeated])


def test_total_speed_weighs_by_time() -> None:
    table = RunTable("t")
    table.add("v", Run((0,) * 10, 1.0))
    table.add("v", Run((0,) * 10, 4.0))
    assert table.total_speed("v") == 4.0
    assert table.speeds("v") == [10.0, 2.5]
    assert table.tokens_per_step("v") is None


def test_turns_at_one_prompt_are_one_measurement() -> None:
    table = RunTable("t", turns=2)
    for seconds in (1.0, 3.0, 2.0, 2.0):
        table.add("v", Run((0,) * 10, seconds))
    assert table.speeds("v") == [5.0, 5.0]


def test_distinct_ngrams() -> None:
    assert distinct_ngrams([1, 2, 3, 4, 5]) == 1.0
    assert distinct_ngrams([1] * 7) == 0.25
    assert distinct_ngrams([1, 2]) == 1.0


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


def test_an_interval_around_the_goal_decides_nothing() -> None:
    table = table_of("edit", {TRANSFORMERS: 10.0}, pairs=8)
    for index in range(8):
        table.add(OFF, Run(tuple(range(100)), 100 / (5.0 if index % 2 else 20.0)))
    assert table.verdict(RatioGoal(OFF, TRANSFORMERS, 1.0)) == "undecided"


def test_tables_show_speed_ratio_steps_and_identity(edit: RunTable) -> None:
    console = Console(record=True, width=160)
    print_report(DecodeReport([edit]), console)
    text = console.export_text()
    assert "8 prompts, 800 answer tokens" in text
    assert "2.10x [2.10, 2.10]" in text
    assert "4.00" in text  # 100 tokens in 25 steps
    assert "8/8" in text
    assert f"{COLD} / {TRANSFORMERS}: 2.10x [2.10, 2.10], goal 2.6x: missed" in text


def test_differing_answers_are_counted(edit: RunTable) -> None:
    edit.runs[SECOND][3] = Run((7,) * 100, 1.0)
    assert edit.identical(SECOND, OFF) == 7
    assert edit.identical(COLD, OFF) == 8


def test_json_holds_what_each_figure_needs(edit: RunTable, tmp_path: Path) -> None:
    write_json(DecodeReport([edit]), tmp_path / "out.json", {"model": "m"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["environment"] == {"model": "m"}
    (table,) = data["tables"]
    assert table["ratios"][COLD]["median"] == pytest.approx(2.1)
    assert len(table["runs"][OFF]) == 8 and table["runs"][OFF][0]["speculation"]["steps"] == 25
    assert [goal["verdict"] for goal in table["goals"]] == ["met", "missed", "met", "met"]


def test_the_control_is_compared_with_off() -> None:
    control = table_of("control", {OFF: 20.0, COLD: 19.9})
    console = Console(record=True, width=160)
    print_report(DecodeReport([control]), console)
    assert "goal 0.98x: met" in console.export_text()


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
