from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentspec.reasoning.delegation.steps import StepReader

CLOSING = "</think>"
TEXTS = st.text(alphabet="a\n</think>", max_size=40) | st.lists(
    st.sampled_from(["a", "\n", "\n\n", "<", "</think>", "</thin", "k>", " "]), max_size=12
).map("".join)


def expected(text: str, *, across: bool, closes: bool) -> tuple[str, str | None, str]:
    """The step, what ended it and the rest, from the whole text at once."""
    blank, closing = -1 if across else text.find("\n\n"), text.find(CLOSING) if closes else -1
    if closing >= 0 and not 0 <= blank < closing:
        return text[:closing], "closed", text[closing + len(CLOSING) :]
    return (text[: blank + 2], "boundary", text[blank + 2 :]) if blank >= 0 else (text, None, "")


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=40), across=st.booleans(), closes=st.booleans())
def test_a_step_does_not_depend_on_how_it_was_cut(text: str, cuts: list[int], across: bool, closes: bool) -> None:
    reader = StepReader(CLOSING if closes else "", across=across)
    passed = "".join(reader.feed(piece) for piece in pieces(text, cuts)) + reader.finish()
    assert (passed, reader.ended, reader.rest) == expected(text, across=across, closes=closes)
    assert reader.text == passed
