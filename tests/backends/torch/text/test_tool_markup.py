# ruff: noqa: RUF001, E501  (DeepSeek's marks hold such bars)
"""Calls of every format are read whatever they hold and however the answer was cut, and grammars enforce them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.text.structured_output import OutputParserSpec
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.backends.torch.text.tool_parser import FORMATS, format_of
from agentspec.protocol.tools import whole_arguments
from agentspec.types import Delta, FinishReason
from tests.backends.torch.conftest import byte_tokenizer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "inner": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("write", "run-it")]
SCHEMAS = {"write": PARAMETERS, "run-it": PARAMETERS}
Calls = list[tuple[str, dict[str, Any]]]


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def braced(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return "[" + ",".join(braced(one, quote) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braced(one, quote)}" for key, one in value.items()) + "}"
    return dumped(value)


def elements(calls: Calls, call: str, item: str) -> str:
    return "\n".join(
        call.format(name, "".join(item.format(key, plain(value), str(isinstance(value, str)).lower())
                                  for key, value in given.items()))
        for name, given in calls
    )  # fmt: skip


def each(calls: Calls, call: str, show: Callable[[Any], str] = dumped, between: str = "") -> str:
    return between.join(call.format(name, show(given)) for name, given in calls)


WRITTEN: dict[str, tuple[str, Callable[[Calls], str]]] = {  # what a template has of it, and calls as the model writes them
    "qwen": (
        "<tool_call><function=",
        lambda calls: elements(
            calls, "<tool_call>\n<function={}>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"
        ),
    ),
    "qwen without tags": (
        "<function=", lambda calls: elements(calls, "<function={}>\n{}</function>", "<parameter={}>\n{}\n</parameter>\n")
    ),
    "glm": (
        "<tool_call><arg_key>",
        lambda calls: elements(
            calls, "<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        ),
    ),
    "deepseek 3.2": (
        "DSML function_calls>",
        lambda calls: "<｜DSML｜function_calls>\n" + elements(
            calls, '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>',
            '<｜DSML｜parameter name="{}" string="{2}">{1}</｜DSML｜parameter>\n'.replace("{}", "{0}"),
        ) + "\n</｜DSML｜function_calls>",
    ),
    "deepseek 3.1": (
        "<｜tool▁sep｜>",
        lambda calls: "<｜tool▁calls▁begin｜>"
        + each(calls, "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>") + "<｜tool▁calls▁end｜>",
    ),
    "deepseek 3": (
        "<｜tool▁sep｜>```json",
        lambda calls: "<｜tool▁calls▁begin｜>"
        + each(calls, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>", between="\n")
        + "<｜tool▁calls▁end｜>",
    ),
    "gemma 4": (
        "<|tool_call>",
        lambda calls: each(calls, "<|tool_call>call:{}{}<tool_call|>", lambda given: braced(given, '<|"|>')),
    ),
    "function gemma": (
        "<start_function_call>",
        lambda calls: each(
            calls, "<start_function_call>call:{}{}<end_function_call>", lambda given: braced(given, "<escape>")
        ),
    ),
    "harmony": (
        "<|channel|>",
        lambda calls: each(
            calls, "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>", between="<|start|>assistant"
        ),
    ),
    "harmony, recipient first": (
        "<|channel|>",
        lambda calls: each(
            calls, "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
        ),
    ),
    "pythonic": (
        "[func_name1(",
        lambda calls: "[" + ", ".join(
            f"{name.replace('-', '_')}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
        ) + "]",
    ),
    "hermes": (
        "<tool_call>", lambda calls: each(calls, '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', between="\n")
    ),
    "llama": ("ipython", lambda calls: each(calls, '{{"name": "{}", "parameters": {}}}', between="; ")),
    "mistral": ("[TOOL_CALLS][ARGS]", lambda calls: each(calls, "[TOOL_CALLS]{}[ARGS]{}")),
    "mistral ids": (
        "[TOOL_CALLS][CALL_ID][ARGS]", lambda calls: each(calls, "[TOOL_CALLS]{}[CALL_ID]a1B2c3D4e[ARGS]{}")
    ),
    "mistral list": (
        "[TOOL_CALLS]",
        lambda calls: "[TOOL_CALLS] [" + each(calls, '{{"name": "{}", "arguments": {}}}', between=", ") + "]",
    ),
}  # fmt: skip
MARKS = (
    "</function>",
    "</tool_call>",
    "<tool_call|>",
    "</parameter>",
    "</arg_value>",
    "<|call|>",
    "<｜tool▁call▁end｜>",
    "",
)
LETTERS = st.text(st.sampled_from("ab\"\\<>/={}[]:,\n 'é漢😀"), max_size=12)
TEXTS = st.tuples(LETTERS, st.sampled_from(MARKS), LETTERS).map(
    lambda parts: parts[0] + "a" + parts[1] + "b" + parts[2]
)
NUMBERS = st.integers(-(10**9), 10**9)
NESTED = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "other", "x_1"]), inner, max_size=3)
    ),
    max_leaves=6,
)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": NUMBERS,
        "share": st.floats(-1e6, 1e6, allow_nan=False).map(lambda number: round(number, 3)),
        "on": st.booleans(),
        "list": st.lists(NESTED, max_size=3),
        "inner": st.dictionaries(st.sampled_from(["k", "other", "x_1"]), NESTED, max_size=3),
        "maybe": NUMBERS | st.none(),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["write", "run-it"]), GIVEN), min_size=1, max_size=2)


def received(template: str, pieces: list[str], end: FinishReason = "stop") -> tuple[str, str, list[list[str]], str]:
    """Thoughts, text, calls with the text of their arguments, and the reason, put together as a client does."""
    schemas = {**SCHEMAS, "run_it": PARAMETERS}
    parser = OutputParserSpec(format=format_of(template), schemas=schemas).parser()
    thoughts, text, calls = "", "", list[list[str]]()
    for at, piece in enumerate([*pieces, ""]):
        delta = parser.parse(Delta(text=piece, finish_reason=end if at == len(pieces) else None))
        thoughts, text = thoughts + delta.extra.get("reasoning", ""), text + delta.text
        for part in delta.extra.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    return (
        thoughts,
        text,
        [[name.replace("run_it", "run-it"), given] for name, given in calls],
        str(delta.finish_reason),
    )


def read(template: str, pieces: list[str]) -> tuple[str, str, Calls]:
    """Thoughts, text and calls of an answer that ended by itself."""
    thoughts, text, calls, reason = received(template, pieces)
    assert reason == ("tool_calls" if calls else "stop")
    return thoughts, text, [(name, json.loads(given)) for name, given in calls]


def cuts(answer: str) -> list[list[str]]:
    return [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(1, len(answer)))]


SAID: list[Calls] = [
    [("write", {"text": "<tool_call>\n<b>a</b>\n", "count": 3})],
    [("run-it", {}), ("write", {"text": "{\"a\": 'é'}, [x(y=1)] \\n", "on": True})],
    [("write", {"text": " <|end|></parameter>", "inner": {"k": [1, None, "😀"]}, "share": -0.5})],
]


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_in_any_two_pieces_and_an_answer_cut_short_holds_no_other(name: str) -> None:
    """Of a call that was cut the arguments are no object, so that nobody runs it."""
    template, write = WRITTEN[name]
    for calls in SAID:
        answer = write(calls)
        for pieces in cuts(answer):
            assert read(template, pieces) == ("", "", calls), pieces
        for at in range(1, len(answer)):
            _, _, found, reason = received(template, [answer[:at]], "length")
            whole = [(name, given) for name, said in found if (given := whole_arguments(said, "length")) is not None]
            assert whole == calls[: len(whole)] and reason == "length", answer[:at]


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=8)
@given(calls=CALLS, at=st.integers(0, 1000))
def test_calls_with_any_arguments_are_read_however_they_are_cut(name: str, calls: Calls, at: int) -> None:
    template, write = WRITTEN[name]
    answer = write(calls)
    at %= len(answer)
    for pieces in ([answer], list(answer), [answer[:at], answer[at:]]):
        assert read(template, pieces) == ("", "", calls), pieces


VALUE = "{{ v if v is string else v|tojson }}"
BRACED = "call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:{{ Q + v + Q if v is string else v|tojson }}"
BRACED += "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson }}}'
SHOWN = {  # how templates show one call again, with ITEM around each argument
    "qwen": ("<tool_call>\n<function={{ f.name }}>\nITEM</function>\n</tool_call>",
             f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n"),
    "glm": ("<tool_call>{{ f.name }}\nITEM</tool_call>", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n"),
    "deepseek 3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ f.name }}">\nITEM</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        f"""<｜DSML｜parameter name="{{{{ k }}}}" string="{{{{ 'true' if v is string else 'false' }}}}">{VALUE}</｜DSML｜parameter>\n""",
    ),
    "deepseek 3.1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>"
                     "<｜tool▁calls▁end｜>", ""),
    "deepseek 3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```"
                   "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ""),
    "gemma 4": ("<|tool_call>" + BRACED.replace("Q", "'<|\"|>'") + "<tool_call|>", ""),
    "function gemma": ("<start_function_call>" + BRACED.replace("Q", "'<escape>'") + "<end_function_call>", ""),
    "harmony": ("<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments|tojson }}<|call|>", ""),
    "pythonic": ("[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v|tojson }}{{ '' if loop.last else ', ' }}"
                 "{% endfor %})]{# [func_name #}", ""),
    "hermes": (f"<tool_call>\n{JSON}\n</tool_call>", ""),
    "llama": (JSON.replace("arguments\"", "parameters\"") + "{# ipython #}", ""),
    "mistral": ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments|tojson }}", ""),
    "mistral list": (f"[TOOL_CALLS] [{JSON}]", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(
    "given", [{"text": 'a <b> "c"\nd', "count": 3}, {"text": "é 😀"}, {"count": -1, "on": True}, {}]
)
def test_a_call_is_shown_in_the_next_prompt_as_it_was_written(name: str, given: dict[str, Any]) -> None:
    call, item = SHOWN[name]
    item = f"{{% for k, v in f.arguments.items() %}}{item}{{% endfor %}}"
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    )
    template += call.replace("ITEM", item) + "{% endfor %}{% endfor %}{{ tools or '' }}"
    answer = WRITTEN[name][1]([("write", given)])
    _, _, calls = read(template, list(answer))
    function = {"name": calls[0][0], "arguments": json.dumps(calls[0][1])}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    prompt = TokenizerAdapter(byte_tokenizer(template)).render([{"role": "user", "content": "x"}, said], start=False)
    shown = prompt.removeprefix("<user>x<assistant>")
    assert calls == [("write", given)] == read(template, [shown])[2]
    assert shown == answer or name == "pythonic"  # which has Python's quotes


@pytest.mark.parametrize("name", WRITTEN)
def test_text_is_no_call(name: str) -> None:
    template, write = WRITTEN[name]
    call = write([("write", {"text": "x", "count": 1})])
    half = call[: call.index("write") + 3]
    for answer in ("", "Yes.", " a < b, [1] {x}\n", "see <tool_call and </function>", "[no](link)", half):
        for pieces in cuts(answer) if answer else [[""]]:
            assert read(template, pieces) == ("", answer, []), pieces
    if name not in ("pythonic", "llama", "harmony", "harmony, recipient first"):  # there the whole answer is a call
        assert read(template, list("Look:\n" + call + "\n")) == ("", "Look:\n", [("write", {"text": "x", "count": 1})])


def test_channels_part_thoughts_text_and_calls() -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"count": 1}'
    )
    for pieces in [*cuts(answer), [answer, " \n"]]:
        assert read("<|channel|>", pieces) == ("Hm <b>.", "I look.", [("write", {"count": 1})])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <|x"
    assert read("<|channel|>", list(final)) == ("Hm.", "Yes <|x", [])


def test_values_have_the_types_of_the_tools_schema() -> None:
    def given(schema: Any, value: str, root: Any = None) -> Any:
        schemas = {"f": {"properties": {"a": schema}, **(root or {})}}
        parser = OutputParserSpec(format=format_of("<function="), schemas=schemas).parser()
        text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        (call,) = parser.parse(Delta(text=text, finish_reason="stop")).extra["tool_calls"]
        return json.loads(call["function"]["arguments"])["a"]

    assert given({"type": "string"}, "5") == "5" and given({"type": "string"}, "null") == "null"
    assert given({"type": "integer"}, "5") == 5 and given({"type": "integer"}, "5.0") == 5
    assert given({"type": "number"}, "5.5") == 5.5 and given({"type": "integer"}, "many") == "many"
    assert given({"type": "boolean"}, "True") is True and given({"type": "boolean"}, "false") is False
    assert given({"type": ["string", "null"]}, "null") is None and given({"enum": [1, 2]}, "2") == 2
    assert given({"type": "array"}, "['a', 1]") == ["a", 1] and given({}, '{"b": 1}') == {"b": 1}
    assert given({"$ref": "#/$defs/N"}, "7", {"$defs": {"N": {"type": "integer"}}}) == 7


@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name not in ("qwen without tags", "harmony, recipient first")]
)
def test_the_grammar_allows_the_calls_that_are_read(byte_tokens: Any, name: str) -> None:
    template, write = WRITTEN[name]
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
              "required": ["text"], "additionalProperties": False}  # fmt: skip
    tools = [{"function": {"name": name, "parameters": schema}} for name in ("write", "run_it")]
    grammars = GrammarCompiler(byte_tokens, 259, [256])
    format = format_of(template)
    assert format is not None
    grammar = grammars.compile(
        "start: calls\n" + format.grammar(tools, parallel=True, symbol=grammars.symbol), param="t"
    )

    def follows(text: str) -> bool:
        state = grammar.start()
        for token in byte_tokens.encode(text, add_special_tokens=False):
            if not state.allows(token):
                return False
            state.advance(token)
        return bool(state.allows(256))

    def written(*calls: Any) -> str:
        text = re.sub(r"<\|call\|>\Z", "", write(list(calls))) if name == "harmony" else write(list(calls))
        return text.replace("'", '"') if name == "pythonic" else text

    whole = ("write", {"text": "a <b>\n", "count": 3})
    assert follows(written(whole)) and follows(written(("run_it", {"text": ""})))
    assert not follows(written(("write", {"text": "a", "count": "x"}))) and not follows("text")
    assert not follows(written(("other", {"text": "a"}))) and not follows(written(("write", {"count": 1})))
    if name != "harmony":
        assert follows(written(whole, ("run_it", {"text": "b"})))


def test_every_row_of_the_table_is_found() -> None:
    assert all(format_of(" ".join(signs)) is format for signs, format in FORMATS)
    assert format_of("{{ tools }} in some other way") is None
