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


def test_no_recording_is_lost_for_its_name(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import agentspec.benchmarks.placement.workload as workload

    read, shapes = list[str](), workload.shapes

    def listed(recorded: Any) -> Any:
        read.extend(recorded)
        return shapes(recorded)

    monkeypatch.setattr(workload, "shapes", listed)
    copies = [tmp_path / folder / CALLS.name for folder in ("a", "b")]
    for copy in copies:
        copy.parent.mkdir()
        copy.write_bytes(CALLS.read_bytes())
    done = program(*QUICK[:2], tmp_path / "a", tmp_path / "b", *QUICK[3:], "--policy", "round_robin")
    assert done.exit_code == 0, done.output
    assert read == [str(copy) for copy in copies]


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
