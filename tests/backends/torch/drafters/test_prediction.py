"""A prediction is followed, left and found again."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters import PredictionDrafter

PROMPT = [900, 901]
PREDICTION = list(range(100, 130))


def proposed(drafter: PredictionDrafter, answer: Sequence[int], budget: int = 5) -> list[int]:
    draft = drafter.propose([*PROMPT, *answer], budget)
    return [] if draft is None else draft.tokens.tolist()


def test_a_prediction_begins_at_its_beginning_and_is_followed() -> None:
    drafter = PredictionDrafter(PREDICTION, len(PROMPT))
    assert proposed(drafter, []) == PREDICTION[:5]
    assert proposed(drafter, PREDICTION[:7]) == PREDICTION[7:12]
    assert proposed(drafter, PREDICTION) == []
    assert (drafter.accepted, drafter.rejected) == (30, 0)


def test_a_prediction_is_found_again_after_a_replacement_and_an_insertion() -> None:
    drafter = PredictionDrafter(PREDICTION, len(PROMPT))
    answer = [*PREDICTION[:5], 7, 7]
    assert proposed(drafter, answer) == []
    assert proposed(drafter, [*answer, 110, 111]) == PREDICTION[12:17]
    assert drafter.accepted == 5
    assert proposed(drafter, [*answer, 110, 111, *PREDICTION[12:20]]) == PREDICTION[20:25]
    assert (drafter.accepted, drafter.rejected) == (13, 17)


def test_of_several_places_the_nearest_ahead_is_taken() -> None:
    prediction = [1, 2, 50, 1, 2, 60, 1, 2, 70]
    drafter = PredictionDrafter(prediction, 0)
    assert drafter.propose([1, 2, 50, 9, 1, 2], 1).tokens.tolist() == [60]
    assert drafter.propose([1, 2, 50, 9, 1, 2, 9, 9, 1, 2], 1).tokens.tolist() == [60]
    assert PredictionDrafter(prediction, 0).propose([9, 9, 1, 2], 1).tokens.tolist() == [50]


def test_the_prompt_is_no_answer() -> None:
    drafter = PredictionDrafter([1, 2, 3, 4], 4)
    assert drafter.propose([1, 2, 3, 9], 2).tokens.tolist() == [1, 2]


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 9))
def test_proposals_come_from_the_prediction_and_counts_add_up(
    prediction: list[int], answer: list[int], budget: int
) -> None:
    drafter = PredictionDrafter(prediction, 0)
    for end in range(len(answer) + 1):
        draft = drafter.propose(answer[:end], budget)
        if draft is not None:
            tokens = draft.tokens.tolist()
            assert 0 < len(tokens) <= budget
            assert any(prediction[i : i + len(tokens)] == tokens for i in range(len(prediction)))
    assert 0 <= drafter.accepted <= len(answer)
    assert drafter.rejected == max(0, len(prediction) - drafter.accepted)


def test_confidence_falls_with_misses() -> None:
    drafter = PredictionDrafter(PREDICTION, 0)
    first = drafter.propose([], 1).probabilities[0]
    answer = [100, 101, 7, 101, 102, 7, 102, 103, 7, 103, 104]
    assert drafter.propose(answer, 1).probabilities[0] < first
