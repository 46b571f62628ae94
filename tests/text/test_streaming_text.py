"""Tokens become whole characters up to the first stop string, however many bytes a token has."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.text.streaming_text import StreamingText


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def streamed(text: str, stops: tuple[str, ...], min_tokens: int = 0) -> tuple[str, bool]:
    stream, out = StreamingText(decode_bytes, [0x20], stops), ""
    for count, token in enumerate(text.encode(), 1):
        out += stream.feed(token, may_stop=count > min_tokens)
        if stream.stopped:
            break
    return out + stream.finish(), stream.stopped


@given(st.text(alphabet="ab€", max_size=12), st.sampled_from(["a", "ab", "€b", "b€"]))
def test_text_ends_in_front_of_its_first_stop_string(text: str, stop: str) -> None:
    assert streamed(text, (stop,)) == (text.partition(stop)[0], stop in text)


def test_a_stop_string_inside_the_shortest_length_does_not_count() -> None:
    assert streamed("xaya", ("a",), min_tokens=3) == ("xay", True)
    assert streamed("xaya", ("a",), min_tokens=4) == ("xaya", False)


def test_a_stop_string_completed_by_unfinished_bytes_counts_at_the_end() -> None:
    stream = StreamingText(decode_bytes, [], ("\ufffd",))
    assert stream.feed(0x61) == "a" and stream.feed(0xE2) == ""
    assert stream.finish() == "" and stream.stopped
