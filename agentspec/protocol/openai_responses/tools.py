"""The tools of a Responses request, and the functions that stand for them in a chat.

A custom tool takes text instead of JSON: in a chat it is a function with one argument, the text. A namespace groups
tools; `tool_names.py` says what they are called in a chat, `offered.py` which of them a request offers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.lark_regex import (
    NotRegularError,
    WrongGrammarError,
    check_balanced,
    lark_regex,
)
from agentspec.protocol.openai_responses.tool_input import ARGUMENT
from agentspec.protocol.openai_responses.tool_names import SEARCH, SEARCH_KEY, Key, key_of
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.validation import REQUIRED, Model, Text, kind_of, must, shown_name, wrong_type

_DESCRIBED = ("description", "parameters", "strict")
_SYNTAXES = ("lark", "regex")
_HOSTED_SEARCH = " must be client: this server does not search for tools itself"
_NAMED_SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it, and what its function in a chat has besides a name.

    `param` is its place in the request; `about` tells what its namespace is for. `deferred`: the model sees it only
    once it was searched for. `enforced` is False if the model is told the form of its input, and not held to it.
    """

    param: str
    name: str
    function: Mapping[str, Any]
    kind: Literal["function", "custom", "tool_search"] = "function"
    namespace: str | None = None
    about: str | None = None
    deferred: bool = False
    enforced: bool = True

    @property
    def key(self) -> Key:
        return SEARCH_KEY if self.kind == SEARCH else key_of(self.name, self.namespace)

    @property
    def formed(self) -> bool:
        """Whether `function` has the form of the input as a rule, which only some models can be held to."""
        return self.kind == "custom" and "strict" in self.function


_Name = Annotated[Text, must(bool, " must not be empty")]


class _Namespace(Model):
    name: _Name = REQUIRED
    description: Text | None = None
    tools: list[Any] = REQUIRED


class _FunctionTool(Model):
    name: _Name = REQUIRED
    defer_loading: bool | None = None


class _CustomTool(Model):
    name: _Name = REQUIRED
    description: Text | None = None
    defer_loading: bool | None = None
    format: dict[str, Any] | None = None


class _SearchTool(Model):
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    execution: Annotated[Text, must(lambda one: one == "client", _HOSTED_SEARCH)] = "server"


class _InputFormat(Model):
    type: Annotated[Text, must(lambda kind: kind in ("text", "grammar"), " must be text or grammar")] = REQUIRED
    syntax: Annotated[Text, must(lambda one: one in _SYNTAXES, f" must be {' or '.join(_SYNTAXES)}")] = "lark"
    definition: Text = ""


def client_tools(tools: Sequence[Any], *, enforce: bool, param: str = "tools") -> list[ClientTool]:
    """The tools in the field `param`, those of namespaces one by one.

    `enforce`: whether the model can be held to a form of its arguments. Raises `InvalidRequestError` for a tool that
    the client does not run itself, for two of one name, and for more than `MAX_TOOLS`.
    """
    each = (one for index, tool in enumerate(tools) for one in _tools(tool, f"{param}[{index}]", enforce))
    found = list(islice(each, MAX_TOOLS + 1))  # grammars take long to read: those of tools too many are not
    if len(found) > MAX_TOOLS:
        message = f"{param} has more than {MAX_TOOLS} entries, those of namespaces counted"
        raise InvalidRequestError(message, param=param)
    keys: set[Key] = set()
    for tool in found:
        if tool.key in keys:
            raise InvalidRequestError(f"{tool.param}: two tools have the same name", param=f"{tool.param}.name")
        keys.add(tool.key)
    return found


def grammar_characters(tools: Any) -> int:
    """How many characters the grammars have among `tools`, which may be anything."""
    size = 0
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"type": "namespace", "tools": [*inside]}:
                size += sum(map(_grammar_length, inside))
            case {"type": "additional_tools" | "tool_search_output", "tools": [*inside]}:  # items of an input
                size += grammar_characters(inside)
            case _:
                size += _grammar_length(tool)
    return size


def _grammar_length(tool: Any) -> int:
    match tool:
        case {"format": {"definition": str(grammar)}}:
            return len(grammar)
    return 0


def without_form(tool: ClientTool) -> ClientTool:
    """`tool` for a model that cannot be held to the form of its input: it is told the form alone."""
    if not tool.formed:
        return tool
    parameters = tool.function["parameters"]
    properties = {ARGUMENT: {key: one for key, one in parameters["properties"][ARGUMENT].items() if key != "pattern"}}
    function = {key: one for key, one in tool.function.items() if key != "strict"}
    return replace(tool, function=function | {"parameters": parameters | {"properties": properties}}, enforced=False)


def _tools(tool: Any, param: str, enforce: bool) -> Iterator[ClientTool]:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    if tool.get("type") != "namespace":
        yield _tool(tool, param, enforce)
        return
    space = _Namespace.parse(tool, param)
    _refuse_others(tool, param, _Namespace)
    for index, inner in enumerate(space.tools):
        name = f"{param}.tools[{index}]"
        if not isinstance(inner, dict):
            raise wrong_type(name, "an object", inner)
        if inner.get("type") == SEARCH:
            raise InvalidRequestError(f"{name}: {SEARCH} is in no namespace", param=f"{name}.type")
        yield replace(_tool(inner, name, enforce), namespace=space.name, about=space.description)


def _tool(tool: dict[str, Any], param: str, enforce: bool) -> ClientTool:
    kind = tool.get("type")
    if kind == "function":
        given = _FunctionTool.parse(tool, param)
        _refuse_others(tool, param, (*_DESCRIBED, *_FunctionTool.model_fields))
        function = {key: tool[key] for key in _DESCRIBED if tool.get(key) is not None}
        return ClientTool(param, given.name, function, deferred=given.defer_loading is True)
    if kind == "custom":
        return _custom(tool, param, enforce)
    if kind == SEARCH:
        return _search(tool, param)
    shown = repr(shown_name(kind)) if isinstance(kind, str) else kind_of(kind)
    message = f"{param}.type is {shown}: only tools that the client runs itself are supported here: function, custom"
    raise InvalidRequestError(f"{message}, {SEARCH}, and namespace with those inside", param=f"{param}.type")


def _search(tool: dict[str, Any], param: str) -> ClientTool:
    _SearchTool.parse({"execution": "server", **tool}, param)
    _refuse_others(tool, param, _SearchTool)
    function = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
    return ClientTool(param, SEARCH, function, "tool_search")


def _custom(tool: dict[str, Any], param: str, enforce: bool) -> ClientTool:
    given = _CustomTool.parse(tool, param)
    _refuse_others(tool, param, _CustomTool)
    form = _InputFormat.parse(given.format or {"type": "text"}, f"{param}.format")
    _refuse_others(given.format or {}, f"{param}.format", _InputFormat)
    constrained = form.type == "grammar"
    if constrained and not form.definition:
        raise InvalidRequestError(f"{param}.format.definition is missing", param=f"{param}.format.definition")
    pattern = _pattern(form, f"{param}.format.definition") if constrained and enforce else None
    parameters = {
        "type": "object",
        "properties": {ARGUMENT: {"type": "string", "description": _described(form)}},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }
    if pattern is not None:
        parameters["properties"] = {ARGUMENT: {"type": "string", "description": _described(form), "pattern": pattern}}
    described = {} if given.description is None else {"description": given.description}
    function = {**described, "parameters": parameters, **({"strict": True} if pattern else {})}
    enforced = not constrained or pattern is not None
    return ClientTool(param, given.name, function, "custom", deferred=given.defer_loading is True, enforced=enforced)


def _described(form: _InputFormat) -> str:
    told = "The whole input of this tool, as text."
    if form.type != "grammar":
        return told
    return f"{told} It fits this {_NAMED_SYNTAX[form.syntax]}:\n{form.definition}"


def _pattern(form: _InputFormat, param: str) -> str | None:
    """The regular expression of all that fits; None for a grammar that has none. Raises `InvalidRequestError`."""
    try:
        if form.syntax == "regex":
            check_balanced(form.definition)
            return f"^(?:{form.definition})$"
        return f"^(?:{lark_regex(form.definition)})$"
    except WrongGrammarError as error:
        raise InvalidRequestError(f"{param} is no {_NAMED_SYNTAX[form.syntax]}: {error}", param=param) from None
    except NotRegularError:
        return None


def _refuse_others(value: Mapping[str, Any], param: str, known: type[Model] | Sequence[str]) -> None:
    names = known if isinstance(known, Sequence) else [*known.model_fields]
    for key, given in value.items():
        if key not in (*names, "type") and given not in (None, False, []):
            shown = f"{param}.{shown_name(key)}"
            raise InvalidRequestError(f"{shown} is not supported here", param=shown)
