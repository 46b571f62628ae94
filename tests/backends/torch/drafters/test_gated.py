"""The costly drafter is asked where it pays."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import pytest

from agentspec.backends.torch.drafters import base
from agentspec.backends.torch.drafters.base import Drafter, Drafting, chain_draft
from agentspec.backends.torch.drafters.draft_model import LONGEST_WAIT, GatedDrafter
from agentspec.types import Draft, Source, path_length


class Scripted(Drafter):
    def __init__(self, script: Callable[[Sequence[int]], Draft | None]) -> None:
        self.script, self.asked, self.closed = script, 0, False

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.asked += 1
        return self.script(context)

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        return self.propose(context, budget)
        yield

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on by 10 µs each time that it is read: a drafter takes as long on a busy machine."""
    readings = itertools.count()
    monkeypatch.setattr(base, "perf_counter", lambda: 1e-5 * next(readings))


def right(context: Sequence[int]) -> Draft:
    """The text counts up, three tokens at a time."""
    return chain_draft([len(context) + i for i in range(3)], 0.9, Source.MODEL)


def wrong(context: Sequence[int]) -> Draft:
    return chain_draft([10**6] * 3, 0.9, Source.MODEL)


def play(drafter: GatedDrafter, rounds: int) -> None:
    """Commit what a target that counts up would."""
    context = list(range(5))
    for _ in range(rounds):
        draft = drafter.propose(context, 8)
        after = list(range(len(context), len(context) + 8))
        accepted = 0 if draft is None else path_length(draft.tokens.tolist(), draft.parents.tolist(), after)
        context += after[: 1 + accepted]


def test_a_model_that_pays_is_asked_every_round_and_weighs_its_own_time() -> None:
    costly = Scripted(right)
    drafter = GatedDrafter(Scripted(lambda context: None), costly, lambda rows: 1.0)
    play(drafter, 50)
    assert costly.asked == 50 and drafter.seconds_weighed > 0


@pytest.mark.parametrize(("script", "step_seconds"), [(wrong, 1e-9), (right, 1e-9), (wrong, 1e-5)])
def test_a_model_that_does_not_pay_is_asked_ever_less(
    script: Callable[[Sequence[int]], Draft], step_seconds: float
) -> None:
    costly = Scripted(script)
    play(GatedDrafter(Scripted(lambda context: None), costly, lambda rows: step_seconds), 4 * LONGEST_WAIT)
    assert costly.asked < 40
    before = costly.asked
    assert before >= 6, "it is tried again"


def test_where_the_others_expect_much_and_where_little_is_learned_apart() -> None:
    """They are right at every second place and know nothing at the others, where the model does."""

    def even(context: Sequence[int]) -> Draft | None:
        return right(context) if len(context) % 2 else None

    alone = Scripted(lambda context: right(context) if len(context) % 2 == 0 else wrong(context))
    gated = GatedDrafter(Scripted(even), alone, lambda rows: 1e-3)
    context = list(range(5))
    asked = []
    for length in range(5, 205):
        before = alone.asked
        gated.propose(context, 8)
        if alone.asked > before:
            asked.append(length)
        context.append(length)
    assert sum(length % 2 == 0 for length in asked) == 100 and sum(length % 2 for length in asked) < 50


def test_a_model_that_reads_the_prompt_is_not_judged_by_it() -> None:
    reading = Scripted(lambda context: None)
    play(GatedDrafter(Scripted(lambda context: None), reading, lambda rows: 1e-9), 30)
    assert reading.asked == 30


def test_a_model_that_fails_is_dropped_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    def fail(context: Sequence[int]) -> Draft:
        raise MemoryError("no room")

    cheap, costly = Scripted(lambda context: chain_draft([1], 0.1, Source.SHARED)), Scripted(fail)
    drafter = GatedDrafter(cheap, costly, lambda rows: 1.0)
    with caplog.at_level(logging.WARNING):
        drafts = [drafter.propose([0, 1], 4) for _ in range(3)]
    assert all(draft is not None and draft.tokens.tolist() == [1] for draft in drafts)
    assert costly.asked == 1 and costly.closed and caplog.text.count("without the draft model") == 1
    drafter.close()
    assert cheap.closed
