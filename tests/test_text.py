"""Text as it arrives, joined, is the text of the whole; stop strings are found wherever it was cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.prediction import PredictedText
from agentspec.text import Detokenizer, StopScanner

TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n�"), max_size=30)


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte tokenizer: token i is byte i; ids above 255 are special and skipped."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def pieces(tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode_bytes, prompt)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


@given(TEXTS)
def test_joined_pieces_are_the_text_and_each_is_whole_characters(text: str) -> None:
    parts = pieces(list(text.encode()))
    assert "".join(parts) == text
    assert all(part == "" or part in text for part in parts)


@given(st.lists(st.integers(0, 300), max_size=30))
def test_any_bytes_whatsoever(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == decode_bytes(tokens)


@given(TEXTS, TEXTS)
def test_the_prompt_is_not_repeated(prompt: str, text: str) -> None:
    assert "".join(pieces(list(text.encode()), list(prompt.encode()))) == text


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    assert "".join(pieces([0x82, 0xAC, 0x61], [0x61, 0xE2])) == "€a"
    assert "".join(pieces([0x82, 0xAC, 0x61], [0xAC, 0xAC, 0xE2])) == "€a"  # the prompt's other errors stay there


def test_words_keep_their_leading_space_as_in_context() -> None:
    words = ["▁in", "▁the", "▁end", "s"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode, [0])
    assert [detokenizer.feed(token) for token in (1, 2, 3)] == [" the", " end", "s"]
    assert [Detokenizer(decode).feed(1)] == ["the"]


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
