"""The tools of a Responses request, and the functions that stand for them in a chat.

A custom tool takes text instead of JSON: in a chat it is a function with one argument, the text. A grammar of the text
is described to the model and not enforced. A namespace groups tools; `ToolNames` says what they are called in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.items import ADDITIONAL_TOOLS, Item
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.tool_names import CHOICES, Key, ToolNames, key_of
from agentspec.protocol.validation import REQUIRED, Closed, NonEmpty, Text, one_of, read_one
from agentspec.protocol.wire import object_in

ARGUMENT = "input"  # of the function that stands for a custom tool
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it, and what its function in a chat has besides a name.

    `param` is its path in the request; `about` says what its namespace is for. `enforced` is False if the model only
    reads which form its input has.
    """

    param: str
    name: str
    function: Mapping[str, Any]
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None
    about: str | None = None
    enforced: bool = True

    @property
    def key(self) -> Key:
        return key_of(self.name, self.namespace)


class _ToolObject(Closed):
    type: Any = None
    name: NonEmpty = REQUIRED

    def declared(self, param: str) -> Iterator[ClientTool]:
        """The tools that this object, the field `param`, declares."""
        raise NotImplementedError


class _FunctionTool(_ToolObject):
    description: Any = None
    parameters: Any = None
    strict: Any = None

    def declared(self, param: str) -> Iterator[ClientTool]:
        yield ClientTool(param, self.name, self.given("description", "parameters", "strict"))


class _InputFormat(Closed):
    type: Annotated[Text, one_of("text", "grammar")] = REQUIRED
    syntax: Annotated[Text, one_of(*_SYNTAXES)] = "lark"
    definition: Text = ""


class _CustomTool(_ToolObject):
    description: Text | None = None
    format: _InputFormat = _InputFormat(type="text")

    def declared(self, param: str) -> Iterator[ClientTool]:
        form, described = self.format, "The whole input of this tool, as text."
        free = form.type == "text"
        if not (free or form.definition):
            raise InvalidRequestError(f"{param}.format.definition is missing", param=f"{param}.format.definition")
        if not free:
            described += f" It fits this {_SYNTAXES[form.syntax]}:\n{form.definition}"
        parameters = {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": described}},
            "required": [ARGUMENT],
            "additionalProperties": False,
        }
        function = {**self.given("description"), "parameters": parameters}
        yield ClientTool(param, self.name, function, "custom", enforced=free)


_KINDS: dict[str, type[_ToolObject]] = {"function": _FunctionTool, "custom": _CustomTool}


class _Namespace(_ToolObject):
    description: Text | None = None
    tools: list[Any] = REQUIRED

    def declared(self, param: str) -> Iterator[ClientTool]:
        for index, inner in enumerate(self.tools):
            name = f"{param}.tools[{index}]"
            for tool in read_one(inner, name, _KINDS).declared(name):
                yield replace(tool, namespace=self.name, about=self.description)


_DECLARED: dict[str, type[_ToolObject]] = {**_KINDS, "namespace": _Namespace}


def client_tools(tools: Sequence[Any], param: str = "tools") -> list[ClientTool]:
    """The tools in the field `param`, those of namespaces one by one.

    Raises `InvalidRequestError` for a tool that the client does not run itself, for two of one name, and for more than
    `MAX_TOOLS`.
    """
    names = [f"{param}[{index}]" for index in range(len(tools))]
    read = [read_one(tool, name, _DECLARED) for name, tool in zip(names, tools, strict=True)]
    found = [tool for name, one in zip(names, read, strict=True) for tool in one.declared(name)]
    if len(found) > MAX_TOOLS:
        message = f"{param} has more than {MAX_TOOLS} entries, those of namespaces counted"
        raise InvalidRequestError(message, param=param)
    keys: set[Key] = set()
    for tool in found:
        if tool.key in keys:
            raise InvalidRequestError(f"{tool.param}: two tools have the same name", param=f"{tool.param}.name")
        keys.add(tool.key)
    return found


def added_tools(items: Sequence[Item], param: str) -> list[ClientTool]:
    """The tools that `items` add, in order; `param` names an item, with `{}` for its place."""
    adding = ((index, item) for index, item in enumerate(items) if item["type"] == ADDITIONAL_TOOLS)
    return [tool for index, item in adding for tool in client_tools(item["tools"], f"{param.format(index)}.tools")]


def offered_tools(known: Iterable[ClientTool]) -> list[ClientTool]:
    """Those of `known` that the model is shown: of one name the last. Raises `InvalidRequestError` for too many."""
    latest = {tool.key: tool for tool in known}
    if len(latest) > MAX_TOOLS:
        message = f"the conversation brings more than {MAX_TOOLS} tools, those of namespaces counted"
        raise InvalidRequestError(message, param="input")
    return [*latest.values()]


def chat_tools(tools: Iterable[ClientTool], names: ToolNames) -> list[dict[str, Any]]:
    """`tools` as a chat request has them. The first tool of a namespace says what the namespace is for."""
    described: set[str] = set()
    functions: list[dict[str, Any]] = []
    for tool in tools:
        function: Mapping[str, Any] = {"name": names.of_key(tool.key), **tool.function}
        if tool.about and tool.namespace not in described and isinstance(own := function.get("description", ""), str):
            function = {**function, "description": f"{tool.about}\n\n{own}".rstrip()}
        described.add(tool.namespace or "")
        functions.append({"type": "function", "function": function})
    return functions


def allowed_tools(choice: Any, tools: Sequence[ClientTool]) -> tuple[str | ClientTool, list[ClientTool]]:
    """The tool choice, of a single tool that one, and the tools that it allows. Raises `InvalidRequestError`."""
    if isinstance(choice, str) and choice in CHOICES:
        return choice, [*tools]
    asked: Mapping[str, Any] = choice if isinstance(choice, dict) else {}
    kind = asked.get("type")
    if kind in _KINDS:
        return _named(asked, tools), [*tools]
    mode, listed = (asked.get("mode", "auto"), asked.get("tools")) if kind == "allowed_tools" else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise _wrong_choice(f"must be {', '.join(CHOICES)}, a function or custom tool by name, or allowed_tools")
    if any(not isinstance(one, dict) or one.get("type") not in _KINDS for one in listed):
        raise _wrong_choice("may allow functions and custom tools only")
    keys = {_named(one, tools).key for one in listed}
    return mode, [tool for tool in tools if tool.key in keys]


def _named(choice: Mapping[str, Any], tools: Sequence[ClientTool]) -> ClientTool:
    """The tool that `choice` names. Without `namespace`, which OpenAI's type lacks, the only one of its name."""
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    alike = [tool for tool in tools if (tool.kind, tool.name) == (kind, name)]
    own = [tool for tool in alike if tool.key == key_of(str(name), namespace and str(namespace))]
    if namespace is None and len(alike) > 1 and not own:
        raise _wrong_choice("names a tool of several namespaces; add the field namespace")
    found = own or (alike if namespace is None else [])
    if not found:
        raise _wrong_choice("asks for a tool that tools does not have")
    return found[0]


def _wrong_choice(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"tool_choice {sentence}", param="tool_choice")


def as_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool in its call's arguments.

    A model may write something else: then it is the only text of its object, or else all that it wrote.
    """
    read = object_in(arguments)
    texts = [text for text in read.values() if isinstance(text, str)]
    found = read.get(ARGUMENT, texts[0] if len(texts) == 1 else None)
    written = found if isinstance(found, str) else arguments
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # which joins halves of a character
