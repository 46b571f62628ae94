"""Thoughts and tool calls are split from an answer's text."""

from __future__ import annotations

import pytest

from agentspec.backends.torch.text.answer_grammar import Expectation
from agentspec.backends.torch.text.structured_output import OutputParserSpec, ReasoningParser, expectation
from agentspec.backends.torch.text.tool_parser import HERMES, MISTRAL_NAMED, ToolFormat
from agentspec.types import Delta

CASES: list[tuple[Expectation, str, str, str]] = [
    ("maybe", "<think>\nhm, a <b>\n</think>\n\nYes.\n", "hm, a <b>", "Yes.\n"),
    ("maybe", "\n<think></think>Yes", "", "Yes"),
    ("maybe", "plain <think>no</think>", "", "plain <think>no</think>"),
    ("maybe", " <thin", "", " <thin"),
    ("maybe", "", "", ""),
    ("maybe", "<think>cut off ", "cut off", ""),
    ("begun", "hm\n\nwell </think> Yes </think>", "hm\n\nwell", "Yes </think>"),
    ("begun", "cut </thi", "cut </thi", ""),
    ("never", " <think>a</think>", "", " <think>a</think>"),
]


@pytest.mark.parametrize(("expected", "answer", "thoughts", "text"), CASES)
def test_the_cut_does_not_matter(expected: Expectation, answer: str, thoughts: str, text: str) -> None:
    for pieces in [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))]:
        splitter = ReasoningParser(expected)
        said = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
        assert ("".join(part[0] for part in said), "".join(part[1] for part in said)) == (thoughts, text), pieces


@pytest.mark.parametrize(
    ("prompt", "thinks", "expected"),
    [
        ("<|assistant|>", True, "maybe"),
        ("<|assistant|><think>\n", True, "begun"),
        ("<|assistant|><think>\n\n</think>\n\n", True, "never"),
        ("<|assistant|><think>\n", False, "never"),
    ],
)
def test_what_to_expect_is_read_off_the_prompt(prompt: str, thinks: bool, expected: Expectation) -> None:
    assert expectation(prompt, thinks=thinks) == expected


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
NAMED = '[TOOL_CALLS]f[ARGS]{"a": "x"}'


@pytest.mark.parametrize(
    ("format", "text", "finish"),
    [
        (HERMES, CALL, "tool_calls"),
        (HERMES, CALL.partition("\n</")[0], "tool_calls"),  # the stop string was the closing
        (HERMES, CALL.partition("}\n")[0], "tool_calls"),  # only the brace around the call is missing
        (HERMES, CALL.partition("x")[0], "stop"),
        (HERMES, CALL + CALL.partition("x")[0], "stop"),
        (MISTRAL_NAMED, NAMED, "tool_calls"),
        (MISTRAL_NAMED, NAMED[:-1], "stop"),
    ],
)
def test_an_answer_whose_call_was_cut_does_not_end_with_calls(format: ToolFormat, text: str, finish: str) -> None:
    parser = OutputParserSpec(format=format, names=frozenset({"f"})).parser()
    delta = parser.parse(Delta(text=text, finish_reason="stop"))
    assert delta.finish_reason == finish and delta.extra["tool_calls"]
