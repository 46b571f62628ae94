"""The tools of a Responses request, and the functions that stand for them in a chat.

A custom tool takes text instead of JSON: in a chat it is a function with one argument, the text. A namespace groups
tools: in a chat each has a name that begins with the namespace's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.validation import REQUIRED, Model, Text, kind_of, must, shown_name, wrong_type

_CHOICES = ("none", "auto", "required")
_DESCRIBED = ("name", "description", "parameters", "strict")
_SYNTAXES = ("lark", "regex")
_NAMED_SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it, and its `function` in a chat.

    `param` is its place in the request. `enforced` is False if the model is told the form of its input, and not held
    to it.
    """

    param: str
    name: Any
    function: Mapping[str, Any]
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None
    enforced: bool = True

    @property
    def formed(self) -> bool:
        """Whether `function` has the form of the input as a rule, which only some models can be held to."""
        return self.kind == "custom" and "strict" in self.function


class _Namespace(Model):
    name: Text = REQUIRED
    description: Text | None = None
    tools: list[Any] = REQUIRED


class _Custom(Model):
    name: Text = REQUIRED
    description: Text | None = None
    format: dict[str, Any] | None = None


class _InputFormat(Model):
    type: Annotated[Text, must(lambda kind: kind in ("text", "grammar"), " must be text or grammar")] = REQUIRED
    syntax: Annotated[Text, must(lambda one: one in _SYNTAXES, f" must be {' or '.join(_SYNTAXES)}")] = "lark"
    definition: Text = ""


def chat_name(name: str, namespace: str | None) -> str:
    """The name in a chat of the tool `name` of `namespace`."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def client_tools(tools: Sequence[Any], *, enforce: bool) -> list[ClientTool]:
    """The tools of a request, those of namespaces one by one.

    `enforce`: whether the model can be held to a form of its arguments. Raises `InvalidRequestError` for a tool that
    the client does not run itself, and for more than `MAX_TOOLS`.
    """
    each = (one for index, tool in enumerate(tools) for one in _tools(tool, f"tools[{index}]", enforce))
    found = list(islice(each, MAX_TOOLS + 1))  # grammars take long to read: those of tools too many are not
    if len(found) > MAX_TOOLS:
        message = f"tools has more than {MAX_TOOLS} entries, those of namespaces counted"
        raise InvalidRequestError(message, param="tools")
    return found


def grammar_characters(tools: Any) -> int:
    """How many characters the grammars have among `tools`, which may be anything."""
    size = 0
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"type": "namespace", "tools": [*inside]}:
                size += sum(map(_grammar_length, inside))
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


def chat_tools(tools: Iterable[ClientTool]) -> list[dict[str, Any]]:
    """`tools` as a chat request has them."""
    return [{"type": "function", "function": dict(tool.function)} for tool in tools]


def _tools(tool: Any, param: str, enforce: bool) -> Iterator[ClientTool]:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    if tool.get("type") != "namespace":
        yield _tool(tool, param, enforce)
        return
    space = _Namespace.parse(tool, param)
    _refuse_others(tool, param, _Namespace)
    about = space.description
    for index, inner in enumerate(space.tools):
        name = f"{param}.tools[{index}]"
        if not isinstance(inner, dict):
            raise wrong_type(name, "an object", inner)
        yield _inside(_tool(inner, name, enforce), space.name, about)
        about = None  # what a namespace is for is told once, by its first tool


def _inside(tool: ClientTool, namespace: str, about: str | None) -> ClientTool:
    if not isinstance(tool.name, str):
        raise wrong_type(f"{tool.param}.name", "a string", tool.name)
    function = {**tool.function, "name": chat_name(tool.name, namespace)}
    if about and isinstance(own := function.get("description", ""), str):
        function["description"] = f"{about}\n\n{own}".rstrip()
    return replace(tool, namespace=namespace, function=function)


def _tool(tool: dict[str, Any], param: str, enforce: bool) -> ClientTool:
    kind = tool.get("type")
    if kind == "function":
        _refuse_others(tool, param, _DESCRIBED)
        return ClientTool(param, tool.get("name"), {key: tool[key] for key in _DESCRIBED if tool.get(key) is not None})
    if kind == "custom":
        return _custom(tool, param, enforce)
    shown = repr(shown_name(kind)) if isinstance(kind, str) else kind_of(kind)
    message = f"{param}.type is {shown}: only tools that the client runs itself are supported here: function, custom"
    raise InvalidRequestError(f"{message}, and namespace with those inside", param=f"{param}.type")


def _custom(tool: dict[str, Any], param: str, enforce: bool) -> ClientTool:
    given = _Custom.parse(tool, param)
    _refuse_others(tool, param, _Custom)
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
    function = {"name": given.name, **described, "parameters": parameters, **({"strict": True} if pattern else {})}
    return ClientTool(param, given.name, function, "custom", enforced=not constrained or pattern is not None)


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


def allowed_tools(choice: Any, tools: Sequence[ClientTool]) -> tuple[Any, list[ClientTool]]:
    """The tool choice of a chat request, and the tools that it allows. Raises `InvalidRequestError`."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _wrong_choice("tool_choice must be none, auto, required or an object that names a tool")
        return choice, [*tools]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _named(choice, tools).function["name"]}}, [*tools]
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    raise _wrong_choice("tool_choice must name a function or a custom tool, or allowed_tools that are such")


def _allowed(choice: dict[str, Any], tools: Sequence[ClientTool]) -> tuple[str, list[ClientTool]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise _wrong_choice("tool_choice.mode must be auto or required, and tool_choice.tools an array")
    if any(not isinstance(one, dict) or one.get("type") not in ("function", "custom") for one in listed):
        raise _wrong_choice("tool_choice.tools may hold functions and custom tools only")
    names = {_named(one, tools).param for one in listed}
    return mode, [tool for tool in tools if tool.param in names]


def _named(choice: Mapping[str, Any], tools: Sequence[ClientTool]) -> ClientTool:
    wanted = (choice.get("type"), choice.get("namespace"), choice.get("name"))
    for tool in tools:
        if (tool.kind, tool.namespace, tool.name) == wanted and tool.name is not None:
            return tool
    raise _wrong_choice("tool_choice asks for a tool that tools does not have")


def _wrong_choice(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
