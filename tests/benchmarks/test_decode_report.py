from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from agentspec.benchmarks.decode import COLD, OFF, SECOND, TRANSFORMERS, Run, Table, warm_name
from agentspec.benchmarks.decode_report import EDIT_GOALS, Goal, print_tables, write_json, write_plot
from agentspec.types import Speculation


def table_of(name: str, speeds: dict[str, float], pairs: int = 8) -> Table:
    table = Table(name)
    for variant, speed in speeds.items():
        for index in range(pairs):
            stats = None if variant == TRANSFORMERS else Speculation(drafted=10, accepted=5, steps=25)
            table.add(variant, Run((index, *range(99)), 100 / speed, stats))
    return table


@pytest.fixture
def edit() -> Table:
    return table_of("edit", {TRANSFORMERS: 10.0, OFF: 12.0, COLD: 21.0, warm_name(100): 40.0, SECOND: 80.0})


def test_goals_are_judged_by_the_interval(edit: Table) -> None:
    assert [goal.verdict(edit) for goal in EDIT_GOALS] == ["met", "missed", "met", "met"]


def test_an_interval_around_the_goal_decides_nothing() -> None:
    table = table_of("edit", {TRANSFORMERS: 10.0}, pairs=8)
    for index in range(8):
        table.add(OFF, Run(tuple(range(100)), 100 / (5.0 if index % 2 else 20.0)))
    assert Goal(OFF, TRANSFORMERS, 1.0).verdict(table) == "undecided"


def test_tables_show_speed_ratio_steps_and_identity(edit: Table) -> None:
    console = Console(record=True, width=160)
    print_tables([edit], console)
    text = console.export_text()
    assert "8 prompts, 800 answer tokens" in text
    assert "2.10x [2.10, 2.10]" in text
    assert "4.00" in text  # 100 tokens in 25 steps
    assert "8/8" in text
    assert f"{COLD} / {TRANSFORMERS}: 2.10x [2.10, 2.10], goal 2.6x: missed" in text


def test_differing_answers_are_counted(edit: Table) -> None:
    edit.runs[SECOND][3] = Run((7,) * 100, 1.0)
    assert edit.identical(SECOND, OFF) == 7
    assert edit.identical(COLD, OFF) == 8


def test_json_holds_what_each_figure_needs(edit: Table, tmp_path: Path) -> None:
    write_json([edit], tmp_path / "out.json", {"model": "m"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["environment"] == {"model": "m"}
    (table,) = data["tables"]
    assert table["ratios"][COLD]["median"] == pytest.approx(2.1)
    assert len(table["runs"][OFF]) == 8 and table["runs"][OFF][0]["speculation"]["steps"] == 25
    assert [goal["verdict"] for goal in table["goals"]] == ["met", "missed", "met", "met"]


def test_the_control_is_compared_with_off(tmp_path: Path) -> None:
    control = table_of("control", {OFF: 20.0, COLD: 19.9})
    console = Console(record=True, width=160)
    print_tables([control], console)
    assert "goal 0.98x: met" in console.export_text()
    write_plot([control, control], tmp_path / "plot.svg")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()
