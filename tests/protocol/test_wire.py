from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import UpstreamError
from agentspec.protocol.wire import MAX_HELD, EventSplitter, SseDecoder

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)


def decode(*chunks: bytes) -> list[str]:
    decoder = SseDecoder()
    return [data for chunk in chunks for data in decoder.feed(chunk)]


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """The bytes of a well-formed stream, and the data of its events."""
    wire, expected = [draw(st.sampled_from(["", "\ufeff"]))], []
    for _ in range(draw(st.integers(0, 5))):
        end = draw(LINE_ENDS)
        for noise in draw(st.lists(st.sampled_from([": ping", "event: x", "id: 1", "retry: 5", "odd"]), max_size=2)):
            wire.append(noise + end)
        lines = draw(st.lists(LINES, max_size=3))
        wire.extend(f"data: {line}{end}" for line in lines)
        wire.append(end)
        if lines:
            expected.append("\n".join(lines))
    return "".join(wire).encode(), expected


@given(streams(), st.data())
def test_any_split_gives_the_same_events(stream: tuple[bytes, list[str]], data: st.DataObject) -> None:
    wire, expected = stream
    assert decode(wire) == decode(*(wire[at : at + 1] for at in range(len(wire)))) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert decode(*pieces) == expected


@pytest.mark.parametrize("end", ["", "\n", "\r", "\r\n", "\n\n", "\n: more", "\nevent: x"])
def test_a_body_that_ended_in_order_ended_its_last_event(end: str) -> None:
    decoder = SseDecoder()
    assert [*decoder.feed(f"data: whole\n\ndata: last{end}".encode()), *decoder.finish()] == ["whole", "last"]
    assert list(decoder.finish()) == []


def test_an_event_without_its_end_is_dropped() -> None:
    assert decode(b"data: whole\n\ndata: half") == ["whole"]
    assert decode(b"data: whole\n\ndata: line\n") == ["whole"]


def test_bytes_that_are_not_utf8_do_not_raise() -> None:
    assert decode(b"data: \xff\xfe\n\n") == ["\ufffd\ufffd"]


@pytest.mark.parametrize("event", [b"data: " + b"x" * 200, b"data: x\n" * 30, b": " + b"c" * 200])
def test_memory_is_bounded(event: bytes) -> None:
    decoder = SseDecoder(max_event_bytes=100)
    with pytest.raises(UpstreamError, match="more than 100 bytes"):
        for position in range(len(event)):
            list(decoder.feed(event[position : position + 1]))


def test_many_small_events_stay_within_the_bound() -> None:
    decoder = SseDecoder(max_event_bytes=100)
    wire = (b": ping\n" * 40 + b"data: " + b"x" * 50 + b"\n\n") * 50
    assert len([data for i in range(0, len(wire), 7) for data in decoder.feed(wire[i : i + 7])]) == 50


@given(st.lists(st.binary(min_size=1, max_size=9)), st.data())
def test_the_splitter_loses_and_invents_nothing(pieces: list[bytes], data: st.DataObject) -> None:
    ends = [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"]
    wire = b"".join(data.draw(st.sampled_from([piece, *(piece + end for end in ends), b"\r\n"])) for piece in pieces)
    splitter, out = EventSplitter(), b""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=5)))
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        passed = splitter.feed(wire[start:end])
        assert not passed or passed.endswith((b"\n\n", b"\n\r", b"\n\r\n", b"\r\r", b"\r\r\n"))
        out += passed
    assert out + splitter.rest() == wire


@given(streams(), st.data())
def test_the_splitter_passes_whole_events(stream: tuple[bytes, list[str]], data: st.DataObject) -> None:
    wire, expected = stream
    splitter, found = EventSplitter(), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        passed = splitter.feed(wire[start:end])
        found += SseDecoder().feed(passed[splitter.whole_from :])
    assert found == expected


def test_a_piece_that_ends_with_an_event_is_not_copied() -> None:
    splitter, piece = EventSplitter(), b"data: 1\n\ndata: 2\n\n"
    assert splitter.feed(piece) is piece


def test_the_splitter_holds_less_than_a_megabyte() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"x" * MAX_HELD) == b""
    assert len(splitter.feed(b"y")) == MAX_HELD + 1 and splitter.separator() == b"\n\n"
    assert splitter.feed(b"more") == b"more" and splitter.whole_from == 4
    passed = splitter.feed(b"z\n") + splitter.feed(b"\ndata: 1\n\ndata:")
    assert passed == b"z\n\ndata: 1\n\n" and splitter.separator() == b"" and splitter.rest() == b"data:"
    assert splitter.whole_from == 2
