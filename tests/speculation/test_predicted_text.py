from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.speculation.predicted_text import PredictedText

TOKENS = list(range(100, 130))


def test_it_is_followed_and_found_again() -> None:
    text = PredictedText(TOKENS)
    assert text.ahead(3) == TOKENS[:3]
    text.follow(TOKENS[:7])
    assert text.ahead(3) == TOKENS[7:10] and text.confidence > 0.8
    text.follow([7, 7])
    assert text.ahead(3) == [] and text.confidence < 0.95
    text.follow([110, 111])
    assert text.ahead(3) == TOKENS[12:15]
    assert (text.accepted, text.rejected) == (7, 23)


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=30))
def test_how_an_answer_arrives_makes_no_difference(prediction: list[int], answer: list[int]) -> None:
    one, other = PredictedText(prediction), PredictedText(prediction)
    one.follow(answer)
    for token in answer:
        other.follow([token])
    assert one.ahead(5) == other.ahead(5) and one.confidence == other.confidence
    assert one.accepted + one.rejected >= len(prediction)
