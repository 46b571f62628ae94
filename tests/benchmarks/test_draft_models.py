"""What small models draft, counted by a computed clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentspec.benchmarks.draft_models import (
    BOTH,
    CACHE,
    MODEL,
    NONE,
    DrafterCounts,
    DraftModelReport,
    DraftPlan,
    run_draft_models,
)
from agentspec.benchmarks.report import print_report, write_json
from agentspec.cli import app


def test_the_figures_of_a_drafter(tmp_path: Path) -> None:
    plain = DrafterCounts(NONE, 4, 200, 200, 50, 0, 0, 2.0, 0.05, ((1, 2), (3,)))
    small = DrafterCounts(MODEL, 4, 200, 80, 20, 60, 150, 1.0, 0.04, ((1, 2), (4,)))
    report = DraftModelReport(DraftPlan("m", "s"), {"edits": [plain, small]})
    console = Console(record=True, width=200)
    print_report(report, console)
    (row,) = (line.split("│")[1:-1] for line in console.export_text().splitlines() if MODEL in line)
    assert [cell.strip() for cell in row] == [MODEL, "4", "2.50", "60", "30", "2.5", "2.00x", "2.00", "1/2"]
    write_json(report, tmp_path / "out.json", {})
    assert json.loads((tmp_path / "out.json").read_text())["sets"]["edits"][1]["draft_forwards"] == 60


@pytest.mark.slow
@pytest.mark.counted
def test_a_small_model_that_is_the_target_drafts_what_it_says(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those without drafts, greedy and drawn; counts are always the same, one answer at a time."""
    for limit in ("STALL_SECONDS", "DRAFT_SECONDS"):  # a busy machine would miss them, and draft less
        monkeypatch.setattr(f"agentspec.backends.torch.engine.cache_session.{limit}", 3600.0)
    plan = DraftPlan(str(tiny_model), str(tiny_model), ratio=20.0, limit=2, max_tokens=12, at_once=(1, 2))
    found, again = (run_draft_models(plan, progress=lambda said: None).sets for _ in range(2))
    for name, rows in found.items():
        by_name = {(row.drafter, row.at_once): row for row in rows}
        assert {drafter for drafter, _ in by_name} == {NONE, CACHE, MODEL, BOTH}
        assert len({row.answers for row in rows}) == 1
        assert by_name[MODEL, 1].steps < by_name[NONE, 1].steps and by_name[MODEL, 1].draft_forwards > 0
        assert by_name[MODEL, 2].draft_forwards < by_name[MODEL, 2].draft_items
        assert by_name[CACHE, 1].draft_forwards == 0 and by_name[CACHE, 1].host > 0
        for row, same in zip(rows, again[name], strict=True):
            if row.at_once == 1:
                assert (row.steps, row.draft_forwards) == (same.steps, same.draft_forwards)
                assert row.computed == pytest.approx(same.computed)


def test_the_command_asks_for_a_ratio_above_nothing() -> None:
    assert CliRunner().invoke(app, ["bench", "drafters", "--draft-model", "x", "--ratio", "0"]).exit_code == 2
