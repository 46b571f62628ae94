"""Why an answer with tool calls ended."""

from __future__ import annotations

import pytest

from agentspec.backends.torch.text.output_parser import OutputParserSpec
from agentspec.backends.torch.text.tool_parser import HERMES, MISTRAL_NAMED, ToolFormat
from agentspec.types import Delta

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
