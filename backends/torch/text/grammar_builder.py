"""Builds the grammar of a request's answer: optional reasoning, then tool calls, a structured output, or either."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import llguidance

from agentspec.backends.torch.sampling.grammar import closed_schema, lark_string
from agentspec.backends.torch.text.reasoning_parser import BEGIN, END, Expectation
from agentspec.backends.torch.text.tool_parser import ToolFormat
from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, StructuredOutputs

Symbol = Callable[[str], str]


def grammar_of(
    request: GenerateRequest, format: ToolFormat | None, expected: Expectation, symbol: Symbol
) -> str | None:
    """The grammar of the answers that `request` allows, in llguidance's notation; None if it allows any text.

    Tool calls are enforced for `tool_choice` "required" and for a named tool. With "auto", an answer may be calls or
    the requested structured output; without the latter, the calls within a text are constrained if tools are `strict`.
    Reasoning at the beginning of the answer is not constrained.
    """
    form = request.sampling.structured_outputs
    must_call = request.tool_choice not in ("auto", "none")
    if form is None and not must_call:
        return _strict(request, format, expected, symbol)
    calls = _calls(request, format, symbol)
    options = [*(["calls"] if calls else []), *([] if must_call or form is None else ["@form"])]
    thoughts, rules = _thoughts(expected, symbol)
    top = "\n".join([f"start: {thoughts} ({' | '.join(options)})", *rules, *([calls] if calls else [])])
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": top}]
    if "@form" in options and form is not None:
        grammars.append({"name": "form", **_form(form)})
    return json.dumps({"grammars": grammars})


def _calls(request: GenerateRequest, format: ToolFormat | None, symbol: Symbol) -> str | None:
    if format is None or request.tool_choice == "none":
        return None
    named = [tool for tool in request.tools if tool["function"]["name"] == request.tool_choice]
    parallel = request.parallel_tool_calls and not named
    return format.grammar(named or request.tools, parallel=parallel, symbol=symbol)


def _strict(request: GenerateRequest, format: ToolFormat | None, expected: Expectation, symbol: Symbol) -> str | None:
    """The grammar of any text in which every call opening is followed by a call that the tools allow."""
    strict = any(tool["function"].get("strict") for tool in request.tools)
    if format is None or format.bare or not strict or request.tool_choice != "auto":
        return None
    several = request.parallel_tool_calls
    calls = format.grammar(request.tools, parallel=several and format.listed, symbol=symbol, opened=True)
    opening, again = symbol(format.opening), "*" if several else "?"
    if opening == lark_string(format.opening):
        literal = re.escape(format.opening).replace("/", "\\/")
        free = [f"free: (said calls){again} text", f"said[lazy]: /(.|\\n)*{literal}/"]
    else:
        free = [f"free: text ({opening} calls text){again}"]
    thoughts, rules = _thoughts(expected, symbol)
    return "\n".join([f"start: {thoughts} free", *rules, *free, "text: /(.|\\n)*/", calls])


def _thoughts(expected: Expectation, symbol: Symbol) -> tuple[str, list[str]]:
    if expected == "never":
        return "", []
    begin, end = symbol(BEGIN), symbol(END)
    if end == lark_string(END):
        before = BEGIN if expected == "maybe" else ""
        rule = f"thoughts[lazy]: /{before}(.|\\n)*<\\/think>/"
    else:
        rule = f"thoughts: {begin if expected == 'maybe' else ''} /(.|\\n)*/ {end}"
    optional = "?" if expected == "maybe" else ""
    return f"(thoughts blanks){optional}", [rule, "blanks: /\\s*/"]


def _form(form: StructuredOutputs) -> dict[str, Any]:
    """The entry for a structured output in llguidance's list of grammars. Raises `InvalidRequestError`."""
    if form.json_object:
        return {"json_schema": closed_schema({"type": "object"})}
    if form.json is not None:
        schema = form.json if isinstance(form.json, Mapping) else ({} if form.json else {"not": {}})
        return {"json_schema": closed_schema(schema)}
    if form.regex is not None:
        return {"lark_grammar": f"start: /{_slashed(form.regex)}/"}
    if form.choice is not None:
        return {"lark_grammar": f"start: {' | '.join(map(lark_string, form.choice))}"}
    assert form.grammar is not None
    try:
        return {"lark_grammar": llguidance.grammar_from("grammar", form.grammar)}
    except ValueError as error:
        raise InvalidRequestError(f"the grammar cannot be read: {error}", param="structured_outputs") from None


def _slashed(regex: str) -> str:
    """A regular expression as Lark writes it between slashes."""
    grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))
    lark: str = grammar["grammars"][0]["lark_grammar"]
    return lark.removeprefix("start: /").removesuffix("/")
