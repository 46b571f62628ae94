from __future__ import annotations

import itertools
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.step.response_tap import MAX_KEPT, ResponseTap
from agentspec.types import Speculation, Usage

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
}
SPECULATION = {"drafted": 3, "accepted": 2, "steps": 4, "estimated_seconds_saved": 1.5}
WANTED = (Usage(9, 5, 4, 2, 1), Speculation(3, 2, 4, 1.5))


def stream() -> bytes:
    chunks = [{"choices": [], "usage": None}, {"choices": [], "usage": USAGE, "speculation": SPECULATION}]
    return b": comment\r\n\r\n" + b"".join(b"data: %s\r\n\r\n" % json.dumps(chunk).encode() for chunk in chunks)


@given(cuts=st.lists(st.integers(0, 400)), end=st.sampled_from([b"data: [DONE]\n\n", b""]))
def test_a_stream_cut_anywhere(cuts: list[int], end: bytes) -> None:
    reader, body = ResponseTap("text/event-stream"), stream() + end
    edges = [0, *sorted(cuts), len(body)]
    for begin, finish in itertools.pairwise(edges):
        reader.feed(body[begin:finish])
    assert reader.finish() == WANTED


def test_a_stream_of_the_messages_api_counts_the_prompt_at_its_begin() -> None:
    begins = {"message": {"usage": {"input_tokens": 7, "cache_read_input_tokens": 2, "output_tokens": 1}}}
    reader = ResponseTap("text/event-stream")
    for event in (begins, {"delta": {}, "usage": {"input_tokens": None, "output_tokens": 5}}):
        reader.feed(b"data: %s\n\n" % json.dumps(event).encode())
    assert reader.finish() == (Usage(9, 5, 2), None)


@pytest.mark.parametrize("wbits", [15, 31], ids=["deflate", "gzip"])
def test_compressed_bodies(wbits: int) -> None:
    packer = zlib.compressobj(wbits=wbits)
    body = packer.compress(json.dumps({"usage": USAGE, "speculation": SPECULATION}).encode()) + packer.flush()
    reader = ResponseTap("application/json", "gzip" if wbits == 31 else "deflate")
    for at in range(len(body)):
        reader.feed(body[at : at + 1])
    assert reader.finish() == WANTED


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"not json", ""),
        (b"[1]", ""),
        (b'{"usage": 3, "speculation": []}', ""),
        (b"??", "gzip"),
        (b"{}", "br"),
        (b"", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_what_cannot_be_read_is_none(body: bytes, encoding: str) -> None:
    reader = ResponseTap("application/json", encoding)
    reader.feed(body)
    assert reader.finish() == (None, None)


def test_counts_that_are_none_count_as_nothing() -> None:
    odd = {"prompt_tokens": "9", "completion_tokens": [1], "prompt_tokens_details": [], "completion_tokens_details": 3}
    spent = {"drafted": "3", "accepted": -1, "steps": None, "estimated_seconds_saved": "1.5"}
    reader = ResponseTap("application/json")
    reader.feed(json.dumps({"usage": odd, "speculation": spent}).encode())
    assert reader.finish() == (Usage(), Speculation())


def test_responses_api_events_wrap_the_answer() -> None:
    event = {"type": "response.completed", "response": {"usage": {"input_tokens": 2, "output_tokens": 3}}}
    reader = ResponseTap("text/event-stream")
    reader.feed(b"event: response.completed\ndata: %s\n\n" % json.dumps(event).encode())
    assert reader.finish() == (Usage(2, 3), None)


def test_a_body_too_long_is_not_kept() -> None:
    reader = ResponseTap("application/json")
    reader.feed(b" " * (MAX_KEPT + 1))
    reader.feed(json.dumps({"usage": USAGE}).encode())
    assert reader.finish() == (None, None)
