from __future__ import annotations

from agentspec.backends.openai import answer_lengths
from agentspec.backends.openai.answer_lengths import AnswerLengths
from agentspec.types import Labels

STEP = Labels("s", "flow", "plan")


def test_a_steps_answers_are_expected_as_they_were() -> None:
    lengths = AnswerLengths()
    for tokens in (100, 100):
        lengths.observe("a", STEP, tokens)
    assert lengths.expected("a", STEP) is None
    lengths.observe("a", Labels("other", "flow", "plan"), 200)
    assert lengths.expected("a", STEP) == 120
    assert lengths.expected("b", STEP) is lengths.expected("a", Labels("s")) is None


def test_few_steps_are_remembered() -> None:
    lengths = AnswerLengths()
    for number in range(answer_lengths.MOST_STEPS + 5):
        lengths.observe("a", Labels(step=str(number)), 1)
    assert len(lengths._means) == answer_lengths.MOST_STEPS
    lengths.observe("a", Labels("only a session"), 5)
    assert lengths.expected("a", Labels("only a session")) is None
