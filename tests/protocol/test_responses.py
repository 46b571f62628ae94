from __future__ import annotations

import pytest

from agentspec.protocol.responses import Accumulator, Choice, clamped, encode
from agentspec.types import Delta, Usage


def test_an_answer_is_put_together_by_choice() -> None:
    answer = Accumulator()
    for delta in (Delta(text="a", token_ids=(1,)), Delta(text="x", index=1), Delta(text="b", finish_reason="stop")):
        answer.add(delta)
    answer.add(Delta(index=1, finish_reason="length", usage=Usage(1, 3)))
    first, second = (choice for _, choice in answer.all())
    assert ("".join(first.text), first.token_ids, first.finish_reason) == ("ab", [1], "stop")
    assert second.finish_reason == "length" and answer.usage == Usage(1, 3)


def test_an_answer_without_deltas_has_an_empty_choice() -> None:
    assert Accumulator().all() == [(0, Choice())]


def test_pieces_of_tool_calls_become_whole_calls() -> None:
    pieces = [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "function": {"arguments": "}"}},
        {"index": 1, "id": "b", "function": {"name": "g"}},
    ]
    choice = Choice()
    for piece in pieces:
        choice.add(Delta(extra={"tool_calls": [piece]}))
    assert choice.extra["tool_calls"] == [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "function": {"name": "g"}},
    ]


def test_pieces_are_joined_only_when_they_are_read() -> None:
    class Piece(str):
        def __radd__(self, before: str) -> str:
            raise AssertionError("each piece copies all before it")

    choice = Choice()
    choice.add(
        Delta(extra={"reasoning": "a", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]})
    )
    for _ in range(3):
        call = {"index": 0, "function": {"arguments": Piece("1")}}
        choice.add(Delta(extra={"reasoning": Piece("b"), "tool_calls": [call], "whole": {"n": 1}}))
    choice.add(Delta(extra={"whole": {"n": 2}}))
    called = [{"id": "a", "function": {"name": "f", "arguments": "{111"}}]
    assert choice.extra == {"reasoning": "abbb", "tool_calls": called, "whole": {"n": 2}}


def test_json_is_always_text() -> None:
    assert encode({"a": "é\ud800"}) == '{"a":"é?"}'.encode()
    with pytest.raises(ValueError):
        encode(float("inf"))
    assert clamped(float("-inf")) == -9999.0
