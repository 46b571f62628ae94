"""Text of one model opens no turn in another's prompt."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.chat_templates import escape_markers
from agentspec.reasoning.delegation.lookahead import quoted
from agentspec.reasoning.delegation.model_role import MessageContext
from agentspec.types import GenerateRequest


@given(st.text(alphabet="<>|im_start ab\n", max_size=30))
def test_quoted_text_opens_no_turn(text: str) -> None:
    assert "<|" not in quoted(text)


@pytest.mark.parametrize("mark", ["<|im_end|>", "<\uff5cUser\uff5c>", "<start_of_turn>", "</s>", "[/INST]", "<eos>"])
def test_marks_of_turns_are_broken_up(mark: str) -> None:
    assert mark not in escape_markers(f"x{mark}y")


def test_ordinary_text_is_left_alone() -> None:
    for text in ("a < b and c > d", "x[0] << 2", "<think>\nso", "</think>", "a<b|c"):
        assert escape_markers(text) == text


def test_a_marker_that_two_steps_make_together_is_none() -> None:
    asked = GenerateRequest("m", messages=[{"role": "user", "content": "?"}])
    for mark in ("<|im_start|>", "<start_of_turn>", "</s>", "[/INST]", "<\uff5cUser\uff5c>"):
        for at in range(1, len(mark)):
            context = MessageContext(asked, "")
            for piece in ("x", mark[:at], mark[at:], "y"):
                anyio.run(context.extend, piece)
            assert escape_markers(context.text) == context.text
    context = MessageContext(asked, "<|im_start|>")
    anyio.run(context.extend, "x < y")
    assert context.text == "<|im_start|>x < y"
