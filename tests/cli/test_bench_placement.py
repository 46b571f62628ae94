"""The command on the recorded calls of the examples: tables, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CALLS = Path(__file__).resolve().parents[2] / "examples" / "calls.jsonl"
QUICK = ("bench", "placement", CALLS, "--engines", 2, "--sessions", 40, "--seeds", 2, "--rate", 2)


def test_policies_and_orders_are_compared_and_every_parameter_is_printed(program: Any, tmp_path: Path) -> None:
    scenario, out = tmp_path / "scenario.json", tmp_path / "out.json"
    scenario.write_text('{"pause": 0.5, "costs": {"step": 0.03}}')
    chosen = ("--policy", "round_robin,workflow", "--order", "arrival,deadline", "--scenario", scenario)
    done = program(*QUICK, *chosen, "--json", out)
    assert done.exit_code == 0, done.output
    for said in ("rate = 2", "pause = 0.5", "step = 0.03", "workflow", "deadline", "Medians of 2 seeds"):
        assert said in done.output
    written = json.loads(out.read_text())
    assert written["seeds"] == [0, 1]
    assert [(one["policy"], one["order"]) for one in written["variants"]][-1] == ("workflow", "deadline")
    assert written["scenario"]["costs"]["step"] == 0.03
    assert all(figures["sessions"] == 36 for one in written["variants"] for figures in one["figures"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--policy", "best"), "round_robin"),
        (("--policy", ","), "round_robin"),
        (("--order", ""), "arrival"),
        (("--order", "best"), "arrival"),
    ],
)
def test_what_it_does_not_know_is_refused(program: Any, given: tuple[str, ...], says: str) -> None:
    done = program(*QUICK, *given)
    assert done.exit_code == 2
    assert says in done.output
