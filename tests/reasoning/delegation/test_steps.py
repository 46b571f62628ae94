from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.reasoning.delegation.steps import Step, StepReader

CLOSING = "</think>"
TEXTS = st.text(alphabet="a\n</think>", max_size=40) | st.lists(
    st.sampled_from(["a", "\n", "\n\n", "<", "</think>", "</thin", "k>", " "]), max_size=12
).map("".join)


def expected(text: str, *, across: bool = False) -> tuple[str, str | None, str]:
    """The step, what ended it and the rest, from the whole text at once."""
    blank, closing = -1 if across else text.find("\n\n"), text.find(CLOSING)
    if closing >= 0 and not 0 <= blank < closing:
        return text[:closing], "closed", text[closing + len(CLOSING) :]
    return (text[: blank + 2], "boundary", text[blank + 2 :]) if blank >= 0 else (text, None, "")


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=8), across=st.booleans())
def test_a_step_does_not_depend_on_how_it_was_cut(text: str, cuts: list[int], across: bool) -> None:
    reader = StepReader(CLOSING, across=across)
    passed = "".join(reader.feed(piece) for piece in pieces(text, cuts)) + reader.finish()
    assert (passed, reader.ended, reader.rest) == expected(text, across=across)
    assert reader.text == passed


@given(text=TEXTS)
def test_at_every_boundary_and_character_by_character(text: str) -> None:
    for cut in range(len(text) + 1):
        reader = StepReader(CLOSING)
        said = reader.feed(text[:cut]) + reader.feed(text[cut:]) + reader.finish()
        assert (said, reader.ended, reader.rest) == expected(text)
    reader = StepReader(CLOSING)
    assert "".join(map(reader.feed, text)) + reader.finish() == expected(text)[0]


def test_what_may_be_an_end_is_held_back_and_counts_as_fed() -> None:
    reader = StepReader(CLOSING)
    assert reader.feed("so\n") == "so" and reader.fed == "so\n"
    assert reader.feed("on</th") == "\non" and reader.feed("at") == "</that"
    assert reader.finish() == "" and reader.ended is None


def test_without_a_closing_mark_blank_lines_alone_count() -> None:
    reader = StepReader("")
    assert reader.feed("a</think>b\n\nc") == "a</think>b\n\n" and reader.rest == "c"


@pytest.mark.parametrize(("text", "blank"), [("", True), (" \n\n", True), ("x\n\n", False)])
def test_blank_steps(text: str, blank: bool) -> None:
    assert Step(text, "small", "boundary").blank is blank
