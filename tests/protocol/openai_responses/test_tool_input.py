"""A custom tool's text out of a call's arguments: whole, in order, and the same however the arguments were cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.openai_responses.tool_input import InputReader, as_arguments


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([*map(reader.feed, pieces), reader.finish()])


def cut(text: str, at: list[int]) -> list[str]:
    ends = [0, *sorted(one % (len(text) + 1) for one in at), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text('\\ud83e0"a', max_size=30)


@given(texts, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_the_text_arrives(text: str, at: list[int], ascii: bool) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    assert read(cut(written, at)) == text
    assert read([as_arguments(text)]) == text


@given(st.text('{"input: }\\u0d8a3n[]', max_size=30), st.lists(st.integers(0, 40), max_size=6))
def test_what_is_no_such_object_is_text_too(written: str, at: list[int]) -> None:
    whole = read([written])
    assert read(cut(written, at)) == whole
    whole.encode()  # halves of characters are replaced


@given(st.integers(150, 250), st.lists(st.integers(0, 400), max_size=6))
def test_a_late_beginning_counts_alike_however_it_comes(blanks: int, at: list[int]) -> None:
    written = "{" + " " * blanks + '"input": "abc", "other": "x"}'
    assert read(cut(written, at)) == read([written]) == ("abc" if blanks <= 189 else written)


class Piece(str):
    """Counts what is copied to append it to a text."""

    copied = 0

    def __radd__(self, before: str) -> str:
        Piece.copied += len(before)
        return f"{before}{self}"


def test_another_form_is_held_without_copying_it_for_each_piece() -> None:
    written = json.dumps({"patch": "x" * 10_000})
    assert read([Piece(one) for one in written]) == "x" * 10_000
    assert Piece.copied < 200 * 200


def test_it_comes_while_it_is_written() -> None:
    reader = InputReader()
    pieces = ['{"in', 'put": "a', "b\\", "nc", "\\ud83d", "\\ude00", '"', "}"]
    assert [reader.feed(piece) for piece in pieces] == ["", "a", "b", "\nc", "", "\U0001f600", "", ""]


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud83d" "\\", "\U0001f600" r"\ud83d", "\\" "\U0001f600" r"\u"])
@pytest.mark.parametrize("ascii", [False, True])
def test_escapes_in_source_are_text(text: str, ascii: bool) -> None:
    """A patch may hold the text of an escape, whose backslash JSON escapes in turn."""
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    assert {read(cut(written, [at])) for at in range(len(written))} == {text}
    assert read([*written]) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "x\\ny"}', "x\ny"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("ls -l", "ls -l"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "half \\u00', "half "),
        ('{"input": "odd \\q \\u12"}', "odd q u12"),
        ('{"input": "lone \\ud800 half"}', "lone \ufffd half"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_models_that_keep_to_no_form(written: str, text: str) -> None:
    assert read([written]) == text == read(list(written))
