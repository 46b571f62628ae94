"""Stop strings are found wherever the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.text.stop_strings import StopScanner

TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n�"), max_size=30)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3).map(tuple)


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The rule: up to the stop string that is complete first, the longest of those."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@given(TEXTS, STOPS, st.data())
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: tuple[str, ...], data: st.DataObject) -> None:
    scanner, out, at = StopScanner(stops), "", 0
    while at < len(text) and not scanner.stopped:
        size = data.draw(st.integers(1, 5))
        out += scanner.feed(text[at : at + size])
        at += size
        assert cut(text, stops).startswith(out)  # nothing was passed on too early
    if not scanner.stopped:
        out += scanner.finish()
    assert out == cut(text, stops)
    assert scanner.stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "want"), [(("ab", "b"), "xab", "x"), (("b", "abc"), "xabc", "xa"), ((), "x", "x")]
)
def test_which_of_several_stop_strings_counts(stops: tuple[str, ...], text: str, want: str) -> None:
    for size in (1, 2, len(text)):
        scanner = StopScanner(stops)
        out = "".join(scanner.feed(text[i : i + size]) for i in range(0, len(text), size) if not scanner.stopped)
        assert out + ("" if scanner.stopped else scanner.finish()) == want


def test_held_back_text_is_at_most_a_proper_beginning() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.feed("go STO") == "go "
    assert scanner.feed("RM ST") == "STORM "
    assert scanner.finish() == "ST"


@given(TEXTS, STOPS, st.integers(0, 30), st.integers(1, 5))
def test_a_stop_string_counts_where_it_ends(text: str, stops: tuple[str, ...], counted: int, size: int) -> None:
    scanner, out = StopScanner(stops), ""
    pieces = [*(text[:counted][at : at + size] for at in range(0, counted, size)), *text[counted:]]
    for at, piece in enumerate(pieces):
        if not scanner.stopped:
            out += scanner.feed(piece, counts=at >= -(-counted // size))
    ends = [(end, end - len(stop)) for stop in stops for end in range(counted + 1, len(text) + 1)
            if text[:end].endswith(stop)]  # fmt: skip
    assert scanner.stopped == bool(ends)
    assert out + scanner.finish() == (text[: min(ends)[1]] if ends else text)
