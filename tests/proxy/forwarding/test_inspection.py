"""What is read from the bytes of an upstream's answer: whether it is whole, its counts, an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS
from agentspec.proxy.forwarding import inspection
from agentspec.proxy.forwarding.inspection import StreamInspector, expected_choices, read_answer
from agentspec.types import Speculation, Usage

DONE = b"data: [DONE]\n\n"
SPECULATION = {"drafted": 5, "accepted": 4, "steps": 3, "estimated_seconds_saved": 0.25}


def chunk(text: str = "", finish: str | None = None, index: int = 0, **fields: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


def read(*events: bytes, choices: int = 1) -> StreamInspector:
    inspector = StreamInspector(choices)
    for piece in events:
        inspector.read(piece)
    return inspector


def test_the_end_is_a_finish_reason_or_the_word_for_it() -> None:
    assert not read().finished and not read(chunk("a")).finished
    assert read(chunk("a", "stop")).finished and read(chunk("a"), DONE).finished
    assert (
        read(b"data:[DONE]\r\n\r\n").done
        and read(b'data: {"choices": [{"finish_reason":\ndata: "stop"}]}\n\n').finished
    )
    assert not read(chunk("a", "")).finished


@pytest.mark.parametrize(
    "text",
    [
        "data: [DONE]",
        "\n\ndata: [DONE]\n\n",
        '"finish_reason": "stop"',
        '{"finish_reason":"stop"}',
        "[DONE]",
        '"error":1',
    ],
)
def test_text_that_looks_like_an_end_is_none(text: str) -> None:
    tools = [{"index": 0, "function": {"arguments": json.dumps({"finish_reason": "stop", "error": text})}}]
    inside = {"index": 0, "delta": {"tool_calls": tools}, "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [inside]}).encode() + b"\n\n"
    inspector = read(chunk(text), event, b"data: [DONE] is what a model said\n\n", b": data: [DONE]\n\n")
    assert not inspector.finished and inspector.error is None


def test_every_choice_must_end() -> None:
    first, second = chunk("", "stop", 0), chunk("", "length", 1)
    assert not read(first, first, choices=2).finished
    assert read(second + chunk("x") + first, choices=2).finished
    assert read(first, DONE, choices=2).finished


def test_how_many_choices_there_are() -> None:
    assert expected_choices(CHAT, {}) == expected_choices(CHAT, {"n": None}) == expected_choices(CHAT, {"n": "3"}) == 1
    assert expected_choices(CHAT, {"n": 3, "prompt": ["a", "b"]}) == 3
    assert expected_choices(COMPLETIONS, {"n": 3, "prompt": "a"}) == 3
    assert expected_choices(COMPLETIONS, {"n": 3, "prompt": ["a", "b"]}) == 6
    assert expected_choices(COMPLETIONS, {"prompt": [[1, 2], [3]]}) == 2
    assert expected_choices(COMPLETIONS, {"prompt": [1, 2, 3]}) == expected_choices(COMPLETIONS, {"prompt": []}) == 1


def test_counts_and_errors_are_read() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    inspector = read(chunk("a", usage=None), chunk("b", usage=usage, speculation=SPECULATION))
    assert inspector.counts.usage == Usage(3, 2) and inspector.counts.speculation == Speculation(5, 4, 3, 0.25)
    failed = read(b'event: error\ndata: {"error": {"message": "out of memory", "code": 500}}\n\n')
    assert failed.finished and not failed.done and failed.error["code"] == 500
    old = read(b'data: {"object": "error", "message": "no", "code": 400}\n\n' + DONE)
    assert old.done and old.error["code"] == 400 and read(b"data: [DONE] \n\n").done


@pytest.mark.parametrize(
    "data",
    [
        b'{"usage": [1], "choices": 5}',
        b'{"usage": {"prompt_tokens": "x"}, "choices": [7, {"finish_reason": 3, "index": "x"}]}',
        b'[{"finish_reason": "stop"}]',
        b'{"finish_reason": "stop"',
        b'"\xff" "usage": {',
        b'{"usage": ' + b"[" * 100_000,
        b'{"usage": {"prompt_tokens": 1' + b"0" * 5000 + b"}}",
    ],
)
def test_what_makes_no_sense_is_passed_over(data: bytes) -> None:
    inspector = read(b"data: " + data + b"\n\n", chunk(usage={"prompt_tokens": 1}))
    assert inspector.counts.usage == Usage(1) and not inspector.done


def test_events_that_tell_nothing_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(inspection, "object_in", lambda data: parsed.append(data) or {})
    read(chunk("hello", usage=None), chunk('"usage": {'), b": ping\n\n", chunk(index=3))
    assert not parsed
    read(chunk("x") + chunk("", "stop") + chunk("y"))
    assert len(parsed) == 1


@pytest.mark.parametrize("long", [False, True])
def test_the_counts_of_a_whole_answer(long: bool) -> None:
    filler = {"data": ["x" * (1 << 20)]} if long else {}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    text = {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 9}'}}]}
    for answer in (
        {**filler, **text, "usage": usage},
        {**filler, "usage": usage, "kv_transfer_params": None},
    ):
        assert read_answer(json.dumps(answer).encode()) == (read_answer(json.dumps({"usage": usage}).encode())[0], None)
    assert read_answer(json.dumps({**filler, **text}).encode())[0].usage is None
    assert read_answer(b'{"error": {"code": 400}}')[1] == {"code": 400}
    assert read_answer(b"x" * (1 << 20) + b'"usage": {"prompt_tokens": ')[0].usage is None
