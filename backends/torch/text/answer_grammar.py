"""The grammar that a request asks for, in llguidance's notation.

It allows optional reasoning, then tool calls, a structured output, or either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentspec.backends.torch.grammars.notation import as_lark, closed_schema, lark_regex, lark_string
from agentspec.backends.torch.text.tool_markup import MarkupFormat, Tool, text_up_to
from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import check_json
from agentspec.types import GenerateRequest, StructuredOutputs

TOOLS: Final = "tools"
Marks = tuple[str, str]  # that begin and end thoughts
THINK: Final[Marks] = "<think>", "</think>"
MARKS: Final = (THINK, ("<|channel>thought\n", "<channel|>"))  # the latter by Gemma 4
Expectation = Literal["never", "maybe", "begun"]
"""Whether an answer begins with reasoning, which the prompt may have begun."""
MAX_CHARACTERS: Final = 1_000_000
MAX_LITERAL: Final = 20_000  # characters of a choice: each of its tokens takes time in proportion
MAX_REGEX: Final = 20_000
Symbol = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's notation, and the request's field that asks for it."""

    text: str
    param: str


def first_mark(marks: Marks) -> str:
    """The part of the begin mark that may be a special token."""
    return marks[0][: marks[0].index(">") + 1]


def grammar_of(
    request: GenerateRequest,
    format: MarkupFormat | None,
    expected: Expectation,
    symbol: Symbol,
    marks: Marks = THINK,
) -> GrammarSource | None:
    """The grammar of the answers that `request` allows; None if it allows any text. Raises `InvalidRequestError` for a
    form or tools beyond the limits.

    Tool calls are enforced for `tool_choice` "required" and for a named tool. With "auto", an answer may be calls or
    the requested structured output; without the latter, the calls within a text are constrained if tools are `strict`.
    Reasoning at the beginning of the answer is not constrained.
    """
    form = request.sampling.structured_outputs
    must_call = request.tool_choice not in ("auto", "none")
    if form is None and not must_call:
        return _strict(request, format, expected, symbol, marks)
    calls = _calls(request, format, symbol)
    formed = form is not None and not must_call
    framed = "@form" if format is None else f"{format.spelled(symbol, format.answer)} @form"
    options = [*(["calls"] if calls else []), *([framed] if formed else [])]
    thoughts, rules = _thoughts(expected, symbol, format, marks)
    top = "\n".join([f"start: {thoughts} ({' | '.join(options)})", *rules, *([calls] if calls else [])])
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": top}]
    if form is None or not formed:
        return _source(json.dumps({"grammars": grammars}), _tools_param(_callable(request)))
    grammars.append({"name": "form", **_form(form)})
    return _source(json.dumps({"grammars": grammars}), form.param)


def _source(text: str, param: str) -> GrammarSource:
    _check_length(text, MAX_CHARACTERS, param)
    return GrammarSource(text, param)


def _check_length(text: str, most: int, param: str) -> None:
    if len(text) > most:
        message = f"the required form has {len(text):,} characters; {most:,} are allowed: send a shorter one"
        raise InvalidRequestError(message, param=param)


def _checked(tools: dict[int, Tool]) -> list[Tool]:
    """The tools, given by their indices in the request, once their parameters have been checked."""
    for index, tool in tools.items():
        param, what = _parameters(index), f"the parameters of the tool {tool['function']['name']!r}"
        parameters = tool["function"].get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidRequestError(f"{what} must be an object", param=param)
        check_json(parameters, what, param=param)
    return list(tools.values())


def _calls(request: GenerateRequest, format: MarkupFormat | None, symbol: Symbol) -> str | None:
    if format is None or not request.tools or request.tool_choice == "none":
        return None
    parallel = request.parallel_tool_calls and request.tool_choice in ("auto", "required")
    return format.grammar(_checked(_callable(request)), parallel=parallel, symbol=symbol)


def _callable(request: GenerateRequest) -> dict[int, Tool]:
    """The tools that may be called, by their indices in the request: the one that `tool_choice` names, or all."""
    tools = dict(enumerate(request.tools))
    named = {index: tool for index, tool in tools.items() if tool["function"]["name"] == request.tool_choice}
    return named or tools


def _tools_param(tools: Mapping[int, Tool]) -> str:
    """The field that is at fault if the calls' grammar is refused; of several tools only a compiler knows which."""
    return _parameters(next(iter(tools))) if len(tools) == 1 else TOOLS


def _parameters(index: int) -> str:
    return f"{TOOLS}[{index}].function.parameters"


def _strict(
    request: GenerateRequest, format: MarkupFormat | None, expected: Expectation, symbol: Symbol, marks: Marks
) -> GrammarSource | None:
    """The grammar of any text in which every call opening is followed by a call that the tools allow; where calls begin
    an answer without one, of calls or a text. Calls of tools that are not strict may have any object as arguments.
    """
    strict = any(tool["function"].get("strict") for tool in request.tools)
    if format is None or not strict or request.tool_choice != "auto" or (format.bare and not format.text):
        return None
    tools = {index: _as_strict(tool) for index, tool in enumerate(request.tools)}
    several = request.parallel_tool_calls
    thoughts, rules = _thoughts(expected, symbol, format, marks)
    if format.bare:
        calls = format.grammar(_checked(tools), parallel=several, symbol=symbol)
        free = f"free: {format.spelled(symbol, format.answer)} text"
        lark = "\n".join([f"start: {thoughts} (calls | free)", *rules, free, f"text: {format.text}", calls])
        return _source(lark, _tools_param(tools))
    calls = format.grammar(_checked(tools), parallel=several and format.listed, symbol=symbol, opened=True)
    opening, again = symbol(format.opening), "*" if several else "?"
    if opening == lark_string(format.opening):
        literal = re.escape(format.opening).replace("/", "\\/")
        written = [f"free: (said calls){again} text", f"said[lazy]: /(.|\\n)*{literal}/"]
    else:
        written = [f"free: text ({opening} calls text){again}"]
    lark = "\n".join([f"start: {thoughts} free", *rules, *written, "text: /(.|\\n)*/", calls])
    return _source(lark, _tools_param(tools))


def _as_strict(tool: Tool) -> Tool:
    function = tool["function"]
    return tool if function.get("strict") else {**tool, "function": {**function, "parameters": {"type": "object"}}}


def _thoughts(
    expected: Expectation, symbol: Symbol, format: MarkupFormat | None, marks: Marks
) -> tuple[str, list[str]]:
    if format is not None and format.thoughts:
        return format.before_answer(symbol)
    if expected == "never":
        return "", []
    first = first_mark(marks)
    rest = marks[0].removeprefix(first)
    begin = f"{symbol(first)} {lark_string(rest) if rest else ''}" if expected == "maybe" else ""
    rules = [f"thoughts: {begin} considered", text_up_to("considered", marks[1], symbol), "blanks: /\\s*/"]
    return f"(thoughts blanks){'?' if begin else ''}", rules


def _form(form: StructuredOutputs) -> dict[str, Any]:
    """The entry for a structured output in llguidance's list of grammars. Raises `InvalidRequestError`."""
    if form.json_object:
        return {"json_schema": closed_schema({"type": "object"})}
    if form.json is False:
        raise InvalidRequestError("the schema is false, which no value fits", param=form.param)
    if form.json is not None:
        schema = form.json if isinstance(form.json, Mapping) else {}
        check_json(schema, "the schema", param=form.param)
        return {"json_schema": closed_schema(schema)}
    if form.regex is not None:
        _check_text(form.regex, MAX_REGEX, form.param)
        if (len(form.regex) - len(form.regex.rstrip("\\"))) % 2:  # the compiler would leave it out
            raise InvalidRequestError("the regular expression ends in a lone backslash", param=form.param)
        return {"lark_grammar": f"start: {lark_regex(form.regex)}"}
    if form.choice is not None:
        for choice in form.choice:
            _check_text(choice, MAX_LITERAL, form.param)
        written = " | ".join(map(lark_string, form.choice))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {written}"}
    assert form.grammar is not None
    _check_text(form.grammar, MAX_CHARACTERS, form.param)
    return {"lark_grammar": as_lark(form.grammar, form.param)}


def _check_text(text: str, most: int, param: str) -> None:
    _check_length(text, most, param)
    check_json(text, "the required form", param=param)
