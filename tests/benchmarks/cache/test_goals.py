from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentspec.benchmarks.cache.costs import Costs, Latency
from agentspec.benchmarks.cache.report import CacheReport, FileResult
from agentspec.benchmarks.cache.threads import Gains
from agentspec.benchmarks.report import Figure, Verdict
from agentspec.recordings.replay import Replay


def file_of(name: str, per_step: float, peer: float, predicted: float = 0.5) -> FileResult:
    """Half of its drafted nodes are accepted."""
    chances = [np.full(100, predicted, dtype=np.float32)]
    half = [np.arange(100) % 2 == 0]
    replays = {budget: Replay([int(1000 * per_step)], [1000], [100], chances, half, [1e-5, 2e-5]) for budget in (8, 32)}
    return FileResult(name, replays, {8: peer, 32: peer})


LATENCY = Latency(1_000_000, 100, 31.5, 20e-6, 60e-6, 1e-3)
COSTS = Costs(LATENCY, LATENCY, 1e-6, 5e-6, 5e-9, 20.0, 5.0, 1_000_000, 0.5, Gains(1.2, 1.6, 1.9, 0.5))


def judged(report: CacheReport) -> dict[str, Figure]:
    return {goal.name: goal for goal in report.goals()}


def verdicts(costs: Costs | None = COSTS, *files: FileResult) -> dict[str, Verdict]:
    return {name: goal.verdict for name, goal in judged(CacheReport(files, [8, 32], "constants", costs)).items()}


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (None, True, "not measured"),
        (1.0, True, "aim met"),
        (1.5, True, "met"),
        (2.5, True, "missed"),
        (2.5, False, "aim met"),
        (2.0, False, "met"),
        (0.5, False, "missed"),
    ],
)
def test_bounds_are_inclusive_and_have_a_side(value: float | None, at_most: bool, verdict: Verdict) -> None:
    required, aim = (2.0, 1.0) if at_most else (1.0, 2.5)
    assert Figure("f", value, "us", required, aim, at_most).verdict == verdict


def test_drafting_is_judged_by_mean_and_by_the_lowest_file() -> None:
    found = verdicts(COSTS, file_of("a", 3.0, 2.0), file_of("b", 2.0, 1.98))
    assert found["tokens/step vs peer, budget 8, geometric mean"] == "aim met"
    assert found["tokens/step vs peer, budget 8, lowest file"] == "missed"


def test_calibration_takes_the_worst_file() -> None:
    name = "calibration at budget 32, worst bin of any file"
    assert verdicts(COSTS, file_of("a", 3.0, 2.0))[name] == "aim met"
    assert verdicts(COSTS, file_of("a", 3.0, 2.0), file_of("b", 3.0, 2.0, predicted=0.3))[name] == "missed"


def test_costs_are_judged_in_their_units() -> None:
    found = verdicts()
    assert found["drafting a tree of 32, 1 M cached tokens, median"] == "aim met"
    assert found["drafting a tree of 32, 1 M cached tokens, p99"] == "aim met"
    assert found["commit per token, 1 M cached tokens"] == "missed"
    assert found["insert per token, merges included"] == "met"
    assert found["request start per prompt token"] == "aim met"
    assert found["bytes per cached token, memory"] == "aim met"
    assert found["two threads drafting vs one"] == "missed"
    assert verdicts(replace(COSTS, segment_bytes=8.7))["bytes per cached token, segment"] == "aim met"
    large = replace(COSTS, large=replace(LATENCY, cached_tokens=100_000_000))
    assert verdicts(large)["drafting a tree of 32, 100 M cached tokens, median"] == "aim met"


def test_the_bounds_of_the_costs_of_drafting() -> None:
    goals = judged(CacheReport([], [8, 32], "", COSTS))
    bounds = {
        "drafting a tree of 32, 1 M cached tokens, median": (45, 35),
        "drafting a tree of 32, 1 M cached tokens, p99": (150, 120),
        "drafting a tree of 32, 100 M cached tokens, median": (200, 150),
        "drafting a tree of 32, 100 M cached tokens, p99": (600, 500),
        "commit per token, 1 M cached tokens": (4.3, 3.0),
        "16 requests in one call vs one by one": (1.7, 1.9),
    }
    assert {name: (goals[name].required, goals[name].aim) for name in bounds} == bounds


def test_a_smaller_cache_on_disk_can_only_miss() -> None:
    name = "open a cache of 10 M tokens until the first draft"
    assert verdicts()[name] == "not measured"
    assert verdicts(replace(COSTS, open_seconds=2.0))[name] == "missed"
    assert verdicts(replace(COSTS, opened_tokens=10_000_000))[name] == "met"
    assert "0.50 s with 1,000,000 tokens" in judged(CacheReport([], [8, 32], "", COSTS))[name].note


def test_what_was_not_measured_is_listed_all_the_same() -> None:
    assert set(verdicts(None).values()) == {"not measured"}
    assert list(verdicts(None)) == list(verdicts())
