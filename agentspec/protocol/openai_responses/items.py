"""Reads the items of a Responses request into their normal form, in which they are stored, and its tools as functions.

A custom tool takes text instead of JSON: in a chat it is a function with one argument, the text. A grammar of the text
is described to the model and not enforced. A namespace groups tools; `ToolNames` says what they are called in a chat.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeGuard
from urllib.parse import quote, unquote

from pydantic import AfterValidator, Field

from agentspec.errors import InvalidRequestError
from agentspec.protocol.messages import RefusalPart, TextPart
from agentspec.protocol.requests import MAX_MESSAGES, MAX_TOOLS
from agentspec.protocol.tools import CHOICES, Key, ToolNames, key_of
from agentspec.protocol.validation import (
    REQUIRED,
    TEXT,
    Closed,
    NonEmpty,
    Text,
    check_json,
    checked_length,
    one_of,
    read_one,
    read_parts,
    validated,
)
from agentspec.protocol.wire import object_in

MAX_ID = 1024  # of a response; other gateways put routes into theirs
Item = dict[str, Any]
ADDITIONAL_TOOLS, COMPACTION = "additional_tools", "compaction"
_SUMMARY = "agentspec:"  # what a summary that was made here begins with
CALLS = ("function_call", "custom_tool_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_STORED_ID = re.compile(rf"(?!\.{{1,2}}\Z)[!-~]{{1,{MAX_ID}}}")  # "." and ".." in a path are no names
# The last is Codex' own note of the turn that an item belongs to.
_INERT = frozenset({"id", "status", "type", "internal_chat_message_metadata_passthrough"})


def is_id(value: object) -> TypeGuard[str]:
    """Whether `value` can be the id of a stored response: not long, and of characters that every URL takes."""
    return isinstance(value, str) and _STORED_ID.fullmatch(value) is not None


def new_id(prefix: str) -> str:
    """An id that cannot be guessed: the item's or response's prefix and 128 random bits."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _Text(TextPart):
    def part(self) -> Item:
        return {"type": "input_text", "text": self.text}


class _Refusal(RefusalPart):
    def part(self) -> Item:
        return {"type": "refusal", "refusal": self.refusal}


class _Image(Closed):
    """An image, which only an upstream can look at."""

    inert: ClassVar[frozenset[str]] = _INERT
    image_url: NonEmpty = REQUIRED
    detail: Any = "auto"

    def part(self) -> Item:
        return {"type": "input_image", **self.model_dump()}


_Part = _Text | _Refusal | _Image
_TEXTS: dict[str, type[_Part]] = {"input_text": _Text, "output_text": _Text, "refusal": _Refusal}
_SAID = {**_TEXTS, "input_image": _Image}


def _parts(content: Any, name: str, kinds: Mapping[str, type[_Part]]) -> list[Item]:
    """The parts of a message or of a call's result; a string is one."""
    return [part.part() for part in read_parts(content, name, kinds)]


class _InputItem(Closed):
    """What an item of one kind may say. Its normal form begins with its id and kind."""

    inert: ClassVar[frozenset[str]] = _INERT
    prefix: ClassVar[str]  # of its id
    id: NonEmpty | None = None  # of any length: other servers put signatures in theirs

    def normal(self, name: str) -> Item:
        """The rest of the normal form. Raises `InvalidRequestError`, as `parse_input` does."""
        return self.model_dump(exclude={"id"}, exclude_none=True)


class _MessageItem(_InputItem):
    prefix = "msg"
    role: Annotated[Any, one_of("user", "system", "developer", "assistant")] = REQUIRED
    content: Any = None
    phase: Any = None

    def normal(self, name: str) -> Item:
        own = self.role == "assistant"
        parts = _parts(self.content, f"{name}.content", _TEXTS if own else _SAID)
        return {"role": self.role, "content": [_output_part(one) for one in parts] if own else parts}


def _output_part(part: Item) -> Item:
    """A part of an earlier answer, as answers have it."""
    return part if part["type"] == "refusal" else {"type": "output_text", "text": part["text"], "annotations": []}


class _Call(_InputItem):
    call_id: NonEmpty = REQUIRED
    name: Text = REQUIRED
    namespace: Annotated[Text | None, AfterValidator(lambda name: name or None)] = None


class _FunctionCall(_Call):
    prefix = "fc"
    arguments: Text = REQUIRED


class _CustomCall(_Call):
    prefix = "ctc"
    input: Text = REQUIRED


class _CallOutput(_InputItem):
    prefix = "fco"
    call_id: NonEmpty = REQUIRED
    output: Any = REQUIRED
    name: Any = None
    namespace: Any = None

    def normal(self, name: str) -> Item:
        name, text = f"{name}.output", isinstance(self.output, str)
        output = validated(TEXT, self.output, name) if text else _parts(self.output, name, _TEXTS)
        return {"call_id": self.call_id, "output": output}


class _AdditionalTools(_InputItem):
    prefix = "at"
    role: Annotated[Text, one_of("developer")] = REQUIRED
    tools: list[Any] = REQUIRED

    def normal(self, name: str) -> Item:
        check_json(self.tools, f"{name}.tools")
        return {"role": self.role, "tools": self.tools}


class _ReasoningItem(_InputItem):
    prefix = "rs"
    summary: Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    encrypted_content: Any = None  # of the server that wrote it, which alone can read it

    def normal(self, name: str) -> Item:
        return {
            "summary": [{"type": "summary_text", "text": one.text} for one in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": one.text} for one in self.content or ()],
        }


class _Compaction(_InputItem):
    prefix = "cmp"
    encrypted_content: NonEmpty = REQUIRED

    def normal(self, name: str) -> Item:
        if not self.encrypted_content.startswith(_SUMMARY):
            param = f"{name}.encrypted_content"
            raise InvalidRequestError(f"{param} was not compacted here; send the items themselves", param=param)
        return {"encrypted_content": self.encrypted_content}


def compaction(summary: str) -> Item:
    """The item that stands for a conversation of which this is the summary."""
    return {"type": COMPACTION, "id": new_id("cmp"), "encrypted_content": _SUMMARY + quote(summary, errors="replace")}


def summary_of(item: Item) -> str:
    return unquote(item["encrypted_content"].removeprefix(_SUMMARY))


_KINDS: dict[str, type[_InputItem]] = {
    "message": _MessageItem,
    "function_call": _FunctionCall,
    "custom_tool_call": _CustomCall,
    "function_call_output": _CallOutput,
    "custom_tool_call_output": _CallOutput,
    ADDITIONAL_TOOLS: _AdditionalTools,
    "reasoning": _ReasoningItem,
    COMPACTION: _Compaction,
}


def parse_input(value: Any) -> list[Item]:
    """The items of a request's `input`, a string or an array.

    Raises `InvalidRequestError` with `param` for an item that is wrong or of an unknown kind, and for too many.
    """
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    items = checked_length(given, "input", MAX_MESSAGES)
    return [_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _item(value: Any, name: str) -> Item:
    if isinstance(value, dict) and not value.get("type") and "role" in value:
        value = {**value, "type": "message"}
    item = read_one(value, name, _KINDS)
    status = {} if isinstance(item, _AdditionalTools) else {"status": "completed"}  # OpenAI's type has none
    return {"id": item.id or new_id(item.prefix), "type": value["type"], **status, **item.normal(name)}


ARGUMENT = "input"  # of the function that stands for a custom tool
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it, and what its function in a chat has besides a name.

    `param` is its path in the request; `about` says what its namespace is for.
    """

    param: str
    name: str
    function: Mapping[str, Any]
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None
    about: str | None = None

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
        if form.type == "grammar":
            if not form.definition:
                raise InvalidRequestError(f"{param}.format.definition is missing", param=f"{param}.format.definition")
            described += f" It fits this {_SYNTAXES[form.syntax]}:\n{form.definition}"
        parameters = {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": described}},
            "required": [ARGUMENT],
            "additionalProperties": False,
        }
        function = {**self.given("description"), "parameters": parameters}
        yield ClientTool(param, self.name, function, "custom")


_TOOLS: dict[str, type[_ToolObject]] = {"function": _FunctionTool, "custom": _CustomTool}
KINDS = tuple(_TOOLS)  # what a client sends as a type may be no string, nor hashable


class _Namespace(_ToolObject):
    description: Text | None = None
    tools: list[Any] = REQUIRED

    def declared(self, param: str) -> Iterator[ClientTool]:
        for index, inner in enumerate(self.tools):
            name = f"{param}.tools[{index}]"
            for tool in read_one(inner, name, _TOOLS).declared(name):
                yield replace(tool, namespace=self.name, about=self.description)


_DECLARED: dict[str, type[_ToolObject]] = {**_TOOLS, "namespace": _Namespace}


def client_tools(tools: Sequence[Any], param: str = "tools") -> list[ClientTool]:
    """The tools in the field `param`, those of namespaces one by one.

    Raises `InvalidRequestError` for a tool that the client does not run itself, and for two of one name.
    """
    named = [(f"{param}[{index}]", tool) for index, tool in enumerate(tools)]
    found = [one for name, tool in named for one in read_one(tool, name, _DECLARED).declared(name)]
    if len({tool.key for tool in found}) < len(found):
        raise InvalidRequestError(f"{param}: two tools have the same name", param=param)
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
        raise InvalidRequestError(message, param="tools")
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
    if kind in KINDS:
        return _chosen_tool(asked, tools), [*tools]
    mode, listed = (asked.get("mode", "auto"), asked.get("tools")) if kind == "allowed_tools" else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise _wrong_choice(f"must be {', '.join(CHOICES)}, a function or custom tool by name, or allowed_tools")
    if any(not isinstance(one, dict) or one.get("type") not in KINDS for one in listed):
        raise _wrong_choice("may allow functions and custom tools only")
    keys = {_chosen_tool(one, tools).key for one in listed}
    return mode, [tool for tool in tools if tool.key in keys]


def _chosen_tool(choice: Mapping[str, Any], tools: Sequence[ClientTool]) -> ClientTool:
    """The tool that `choice` names. Without `namespace`, which OpenAI's type lacks, the only one of its name."""
    kind, name, space = choice.get("type"), choice.get("name"), choice.get("namespace")
    alike = [tool for tool in tools if (tool.kind, tool.name) == (kind, name) and space in (None, tool.namespace)]
    alike = [tool for tool in alike if tool.namespace == space] or alike
    if len(alike) > 1:
        raise _wrong_choice("names a tool of several namespaces; add the field namespace")
    if not alike:
        raise _wrong_choice("asks for a tool that tools does not have")
    return alike[0]


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
