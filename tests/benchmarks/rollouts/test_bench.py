"""The rollouts benchmark: recording by a tiny model, and the replay of samples whose steps are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentspec.benchmarks.rollouts.drafters import Cached, Contender, Oracle
from agentspec.benchmarks.rollouts.recording import COOLING, Rollouts, read_rollouts
from agentspec.benchmarks.rollouts.replay import Epoch, Plan, milliseconds, replay_epochs
from agentspec.cli import app
from agentspec.errors import ConfigurationError

SIZE, EPOCHS = 2, 2


def rollouts(*texts: Sequence[int]) -> Rollouts:
    """A prompt with these samples in each epoch, at all temperatures."""
    arrays = [np.array(text, dtype=np.int32) for text in texts]
    samples = dict.fromkeys(COOLING[:EPOCHS], arrays * EPOCHS)
    return Rollouts("p", np.array([1, 2], dtype=np.int32), samples)


def replayed(recorded: Rollouts, drafter: Contender | None, plan: Plan, drifts: bool = False) -> list[Epoch]:
    size = len(recorded.samples[1.0]) // EPOCHS
    return list(replay_epochs([recorded], drafter, plan, size=size, epochs=EPOCHS, drifts=drifts, batch=64))


TEXTS = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=12), min_size=1, max_size=3)
PLANS = [
    Plan(4), Plan(4, chain=True, cut="followed"), Plan(4, chain=True, cut="followed", alike=True),
    Plan(4, cut="chosen"), Plan(4, cut="chosen", alike=True), Plan(4, chain=True, cut="padded"),
    Plan(0, chain=True, cut="padded", schedule=[(1, 4), (2, 2)]), Plan(4, chain=True, cut="chosen"),
]  # fmt: skip


@given(
    TEXTS,
    st.sampled_from(PLANS),
    st.sampled_from(
        [Cached, partial(Cached, 1), Oracle, partial(Oracle, anywhere=True), partial(Oracle, longest=True)]
    ),
    st.booleans(),
)
def test_every_token_is_emitted_once_in_no_more_steps_than_without_drafts(
    texts: list[list[int]], plan: Plan, make: Any, drifts: bool
) -> None:
    recorded = rollouts(*texts)
    for one, plain in zip(replayed(recorded, make(), plan, drifts), replayed(recorded, None, Plan(0)), strict=True):
        assert one.tokens.total() == plain.tokens.total() == plain.steps.total() == sum(map(len, texts))
        assert one.steps.total() <= plain.steps.total() and plain.nodes == 0
        assert sum(one.batches) == pytest.approx(sum(one.cost.values()))


def test_a_batch_takes_as_long_as_its_forwards() -> None:
    (epoch, _) = replayed(rollouts([3, 4, 5], [3]), None, Plan(0))
    assert epoch.batches == [pytest.approx(6.57 + 6.51 + 6.51)]
    assert epoch.steps == {0: 2, 1: 2} and milliseconds(96) == pytest.approx(7.82 + 0.58)


def test_what_is_padded_is_verified_whole_and_a_schedule_says_how_much() -> None:
    (epoch, _) = replayed(rollouts([3, 4, 5], [6]), Cached(), Plan(3, chain=True, cut="padded"))
    assert epoch.nodes == 3 * epoch.steps.total()
    assert epoch.batches == [pytest.approx(6.85 + 6.73 * epoch.steps[1])]
    (epoch, _) = replayed(rollouts([3, 4, 5], [6]), Cached(), Plan(0, chain=True, cut="padded", schedule=[(1, 3)]))
    assert epoch.nodes == 3 * epoch.steps[1] and epoch.batches == [pytest.approx(6.57 + 6.73 * epoch.steps[1])]


def test_the_same_text_again_is_drafted_whole_and_the_oracle_knows_where_it_goes_on() -> None:
    text = [3, 4, 5, 6, 7, 8, 9, 3, 5]
    first, second = replayed(rollouts(text), Cached(), Plan(16))
    assert first.tokens_per_step < second.tokens_per_step == len(text)
    assert [one.steps.total() for one in replayed(rollouts(text), Oracle(), Plan(4))] == [9, 2]
    for other in ("anywhere", "longest"):
        assert [one.steps.total() for one in replayed(rollouts(text), Oracle(**{other: True}), Plan(4))] == [9, 2]


def test_an_oracle_of_longest_matches_copies_from_no_shorter_ones() -> None:
    both = [np.array(text, dtype=np.int32) for text in ([3, 4, 5, 7, 4, 6, 9, 8, 8], [3, 4, 6, 9])]
    recorded = Rollouts("p", np.array([1, 2], dtype=np.int32), {1.0: both})
    steps = [replayed(recorded, Oracle(longest=longest), Plan(1))[1].steps.total() for longest in (False, True)]
    assert steps == [2, 3]


@pytest.mark.parametrize("plan", [Plan(16, chain=True, cut="followed"), Plan(16, cut="chosen")])
def test_a_batch_ends_sooner_if_the_slowest_samples_are_drafted_most(plan: Plan) -> None:
    random = np.random.default_rng(0)
    samples = [random.choice(6, 120, p=(0.5, 0.3, 0.1, 0.05, 0.03, 0.02)).astype(np.int32) for _ in range(128)]
    recorded = Rollouts("p", np.array([1, 2], dtype=np.int32), {1.0: samples})
    alike, slowest = (replayed(recorded, Cached(), replace(plan, alike=alike))[1] for alike in (True, False))
    assert sum(slowest.batches) < sum(alike.batches) and slowest.nodes < alike.nodes


def test_recording_then_replaying(tiny_model: Path, tmp_path: Path) -> None:
    problems, out, figures = (tmp_path / name for name in ("problems.jsonl", "rollouts.jsonl", "figures.json"))
    problems.write_text("".join(json.dumps({"id": name, "problem": f"{name}?"}) + "\n" for name in "abc"))
    command = ["bench", "rollouts", str(out), "--problems", str(problems), "--model", str(tiny_model), "--count", "2"]
    command += ["--samples", str(SIZE), "--epochs", str(EPOCHS), "--max-tokens", "6", "--json", str(figures)]
    command += ["--temperature", "0.5"]
    assert CliRunner().invoke(app, command).exit_code == 0
    written = out.read_text()
    assert CliRunner().invoke(app, command).exit_code == 0 and out.read_text() == written  # not sampled again
    recorded = read_rollouts(out, SIZE, EPOCHS)
    counts = [{warmth: len(several) for warmth, several in one.samples.items()} for one in recorded]
    assert counts == [{0.5: SIZE * EPOCHS, 0.4: SIZE}] * 2
    assert len({one.tobytes() for one in recorded[0].samples[0.5]}) > 1  # each sample has its own noise
    data = json.loads(figures.read_text())
    assert data["problems"] == 2 and len(data["timed"]["one policy, no drafts"]) == EPOCHS
    with pytest.raises(ConfigurationError, match="too few samples for 3 epochs of 2"):
        read_rollouts(out, SIZE, 3)
