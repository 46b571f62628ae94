"""What is read from recordings: lengths, what is shared, pauses."""

from __future__ import annotations

import pytest

from agentspec.benchmarks.placement.workload import CHARACTERS_PER_TOKEN, RECORDED_TOKEN_SECONDS, shapes
from agentspec.recordings.calls import RecordedCall
from agentspec.types import Labels

SYSTEM = {"role": "system", "content": "s" * 4000}


def _calls(session, question, turns=3, at=None):
    messages = [SYSTEM, {"role": "user", "content": question * 400}]
    for turn in range(turns):
        answer = {"role": "assistant", "content": f"{turn}" * 80}
        created = None if at is None else at + 10.0 * turn
        yield RecordedCall("f:1", Labels(session, None, None), list(messages), answer, created_at=created)
        messages += [answer, {"role": "tool", "content": "r" * 200}]


def test_a_session_grows_by_what_is_new():
    (shape,) = shapes({"file": _calls("one", "a")})
    first, second, third = shape.calls
    assert (shape.workflow, shape.shared) == ("file", ())
    assert first.keep == 0
    assert second.keep == pytest.approx(first.prompt + first.answer, abs=1)
    assert third.prompt - third.keep == pytest.approx(second.prompt - second.keep, abs=1)
    assert second.prompt - second.keep == pytest.approx(200 / CHARACTERS_PER_TOKEN, abs=4)


def test_what_sessions_begin_with_is_shared_between_them():
    one, other = shapes({"file": [*_calls("one", "a"), *_calls("two", "b")]})
    assert one.shared == other.shared
    assert 900 < one.shared_tokens <= 1005
    (alone,) = shapes({"file": _calls("one", "a")})
    assert one.shared_tokens + one.calls[0].prompt == alone.calls[0].prompt
    assert one.calls[2].keep + one.shared_tokens == alone.calls[2].keep


def test_pauses_are_as_recorded_without_the_time_of_the_answers():
    (shape,) = shapes({"file": _calls("one", "a", at=1000.0)})
    first, second, _ = shape.calls
    assert first.pause is None
    assert second.pause == pytest.approx(10.0 - RECORDED_TOKEN_SECONDS * second.answer)
    (unknown,) = shapes({"file": _calls("one", "a")})
    assert {call.pause for call in unknown.calls} == {None}
