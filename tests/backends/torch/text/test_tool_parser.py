"""Thoughts and calls are read out of an answer cut anywhere, and grammars enforce calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.backends.torch.text.structured_output import OutputParserSpec, ReasoningParser
from agentspec.backends.torch.text.tool_parser import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_NAMED,
    ToolCallParser,
    ToolFormat,
)
from agentspec.types import Delta

FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "named": MISTRAL_NAMED, "ids": MISTRAL_IDS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMES = frozenset({"get_weather", "now"})
ROME, NOW = ("get_weather", {"city": 'Ro"me {}<', "days": 2}), ("now", {})

# the answer, its text, its calls
ANSWERS: dict[str, list[tuple[str, str, list[Any]]]] = {
    "hermes": [
        ("just text", "just text", []),
        ("", "", []),
        ("  \n", "  \n", []),
        ("a < b <tool", "a < b <tool", []),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [NOW]),
        ('\n\n<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [NOW]),
        ('<tool_call>\n{"name": "now"}\n</tool_call>\n', "", [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>', "", [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {} }\n', "", [NOW]),
        ('<tool_call>{"name": "now", "arguments": {}, "arguments": {"a": 1}, "name": "x"}</tool_call>', "", [NOW]),
        ('<tool_call>{"name": "now", "parameters": {}, "arguments": {"a": "bcd"}}</tool_call>', "", [NOW]),
        ("<tool_call>\nno call</tool_call>", "<tool_call>\nno call</tool_call>", []),
        ('<tool_call>\n{"nam', '<tool_call>\n{"nam', []),
        ('<tool_call>{"a": 1]</tool_call>', '<tool_call>{"a": 1]</tool_call>', []),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        *(
            ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' + cut, "", [NOW])
            for cut in ("\n<tool", "\n<tool_call>", '\n<tool_call>\n{"name": "get_w')
        ),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> so 1 <', "so 1 <", [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> so <tool_call>\n', "so ", [NOW]),
        (
            "Let me see.\n"
            '<tool_call>\n{"name": "get_weather", "arguments": ' + json.dumps(ROME[1]) + "}\n</tool_call>\n"
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nand then',
            "Let me see.\nand then",
            [ROME, NOW],
        ),
    ],
    "llama": [
        ("just text {}", "just text {}", []),
        ('{"name": "now", "parameters": {}}', "", [NOW]),
        ('<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
        ('\n{"name": "get_weather", "parameters": ' + json.dumps(ROME[1]) + '}; {"name": "now", "parameters": {}}', "",
         [ROME, NOW]),
        ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ('{"answer": [1, 2]} so', '{"answer": [1, 2]} so', []),
        ('{"name": "now"}', '{"name": "now"}', []),
        ('{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
        ('{"x": 1, "name": "now", "parameters": {}}', '{"x": 1, "name": "now", "parameters": {}}', []),
        ('{"parameters": {}, "name": "now"}', "", [NOW]),
        ('{"parameters": {}, "name": "Ann", "x": 1} so', '{"parameters": {}, "name": "Ann", "x": 1} so', []),
    ],
    "mistral": [
        ("just [text]", "just [text]", []),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", [NOW]),
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": ' + json.dumps(ROME[1]) + "}, "
         '{"name": "now", "arguments": {}}]', "", [ROME, NOW]),
        ("[TOOL_CALLS] [12]", "[TOOL_CALLS] [12]", []),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}] tail', "tail", [NOW]),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]\nso and so [1]', "so and so [1]", [NOW]),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}] [TOOL_CALLS] [12]', "[TOOL_CALLS] [12]", [NOW]),
    ],
    "named": [
        ("text", "text", []),
        ("[TOOL_CALLS]now[ARGS]{}", "", [NOW]),
        ("well [TOOL_CALLS]get_weather[ARGS]" + json.dumps(ROME[1]) + "[TOOL_CALLS]now{}", "well ", [ROME, NOW]),
        ("[TOOL_CALLS]now", "[TOOL_CALLS]now", []),
        ("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_wea", "", [NOW]),
    ],
    "ids": [
        ("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", "", [NOW]),
        ("[TOOL_CALLS]now[ARGS]{}", "", [NOW]),
        ("[TOOL_CALLS]now[CALL_ID][ARGS]{}", "", [NOW]),
        ("well [TOOL_CALLS]get_weather[CALL_ID]c_1[ARGS]" + json.dumps(ROME[1]) + "[TOOL_CALLS]now[CALL_ID]b[ARGS]{}",
         "well ", [ROME, NOW]),
        ("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e, so", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e, so", []),
        ("[TOOL_CALLS]now[CALL_ID]a1", "[TOOL_CALLS]now[CALL_ID]a1", []),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in ANSWERS.items() for case in cases]


def read(pieces: list[str], format: ToolFormat, parallel: bool = True) -> tuple[str, list[Any]]:
    """Text and calls, put together as a client does."""
    reader, text, calls = ToolCallParser(format, NAMES, parallel), "", []
    for said in [*(reader.feed(piece) for piece in pieces), reader.finish()]:
        for piece in said:
            if isinstance(piece, str):
                text += piece
            elif "id" in piece:
                assert piece["index"] == len(calls) and piece["type"] == "function"
                calls.append([piece["function"]["name"], piece["function"]["arguments"]])
            else:
                calls[piece["index"]][1] += piece["function"]["arguments"]
    return text, calls


@pytest.mark.parametrize(("name", "answer", "text", "calls"), CASES)
def test_the_cut_does_not_matter(name: str, answer: str, text: str, calls: list[Any]) -> None:
    format = FORMATS[name]
    want = (text, [list(call) for call in calls])
    cuts = [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))]
    for pieces in cuts:
        said, found = read(pieces, format)
        assert (said, [[name, json.loads(arguments)] for name, arguments in found]) == want, pieces
        _, found = read(pieces, format, parallel=False)
        assert [[name, json.loads(arguments)] for name, arguments in found] == want[1][:1], "only the first counts"


def test_a_call_that_breaks_once_it_was_sent_is_not_sent_again() -> None:
    answer = '<tool_call>{"name": "now", "arguments": {"a": 1]} so'
    for pieces in ([answer], list(answer)):
        assert read(pieces, HERMES) == ("} so", [["now", '{"a": 1]']])
    assert read(['<tool_call>\n{"name": "now", "arguments": {"a'], HERMES) == ("", [["now", '{"a']])


def test_a_call_is_streamed_name_first() -> None:
    reader = ToolCallParser(HERMES, NAMES)
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    said = [piece for character in answer for piece in reader.feed(character)]
    assert said[0]["function"] == {"name": "get_weather", "arguments": "{"} and len(said) == len('{"city": "Rome"}')
    assert "id" not in said[1] and said[1] == {"index": 0, "function": {"arguments": '"'}}


def test_json_that_is_no_call_is_not_held_back() -> None:
    for answer in ('{"answer": [1, 2', '{"name": "Ann", "parameters": {"a'):
        reader = ToolCallParser(LLAMA, NAMES)
        said = [piece for character in answer for piece in reader.feed(character)]
        assert "".join(map(str, said)) == answer


def test_an_id_that_the_model_wrote_is_the_calls_unless_it_is_not_unique() -> None:
    written = ("a1B2c3D4e", "short", "a1B2c3D4e", "f5G6h7I8j")
    reader = ToolCallParser(MISTRAL_IDS, NAMES)
    said = reader.feed("".join(f"[TOOL_CALLS]now[CALL_ID]{id}[ARGS]{{}}" for id in written))
    first, short, again, last = (piece["id"] for piece in said if isinstance(piece, dict))
    assert (first, last) == ("a1B2c3D4e", "f5G6h7I8j") and len({first, short, again, last}) == 4
    assert all(len(id) == 9 and id.isalnum() for id in (short, again))


THOUGHTS: list[tuple[str, str, str, str]] = [
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


@pytest.mark.parametrize(("expected", "answer", "thoughts", "text"), THOUGHTS)
def test_the_cut_of_thoughts_does_not_matter(expected: Any, answer: str, thoughts: str, text: str) -> None:
    for pieces in [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))]:
        splitter = ReasoningParser(expected)
        said = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
        assert ("".join(part[0] for part in said), "".join(part[1] for part in said)) == (thoughts, text), pieces


CUT_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
NAMED = '[TOOL_CALLS]f[ARGS]{"a": "x"}'


@pytest.mark.parametrize(
    ("format", "text", "finish"),
    [
        (HERMES, CUT_CALL, "tool_calls"),
        (HERMES, CUT_CALL.partition("\n</")[0], "tool_calls"),  # the stop string was the closing
        (HERMES, CUT_CALL.partition("}\n")[0], "tool_calls"),  # only the brace around the call is missing
        (HERMES, CUT_CALL.partition("x")[0], "stop"),
        (HERMES, CUT_CALL + CUT_CALL.partition("x")[0], "stop"),
        (MISTRAL_NAMED, NAMED, "tool_calls"),
        (MISTRAL_NAMED, NAMED[:-1], "stop"),
    ],
)
def test_an_answer_that_stops_inside_a_call_does_not_finish_with_tool_calls(
    format: ToolFormat, text: str, finish: str
) -> None:
    parser = OutputParserSpec(format=format, schemas={"f": {}}).parser()
    delta = parser.parse(Delta(text=text, finish_reason="stop"))
    assert delta.finish_reason == finish and delta.extra["tool_calls"]
