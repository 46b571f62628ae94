# ruff: noqa: RUF001  (DeepSeek's marks hold such bars)
"""Tool calls written as marks around names, keys and values: formats, their grammars, and a reader.

A call is passed on once it has been read whole. It ends at the first closing by which all of it can be read, so that a
text among its arguments may hold the closing too.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from agentspec.backends.torch.grammars.notation import closed_schema, lark_string
from agentspec.text import partial_end

Tool = Mapping[str, Any]
Call = tuple[str, Any]  # its name and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool
Pieces = list[str | dict[str, Any]]  # text, or an entry of OpenAI's `tool_calls` in a delta
NUL: Final = "\0"
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_JSON_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkupFormat:
    """How a model writes a call: `opening`, what `read` understands, `closing`; `around` one or several calls.

    For the grammar, `head` follows the opening and `tail` precedes the closing, with NAME for the tool's and NUL for
    what `id` says in Lark's notation; `value` is what stands before and after each argument, with KEY and KIND (whether
    it is a text), or None where the arguments are one JSON object. `between` separates arguments, `separator` calls.
    """

    name: str
    opening: str = ""
    closing: str = ""
    read: Callable[[str, Schemas], Call | None] = lambda body, schemas: None
    head: str
    tail: str = ""
    value: tuple[str, str] | None = None
    between: str = ""
    separator: str = "\n"  # empty if an answer holds one call
    quote: str = ""  # around texts
    around: tuple[str, str] = ("", "")
    wraps_each: bool = False  # whether `around` is written around each call
    symbols: tuple[str, ...] = ()  # more strings that may be special tokens
    thoughts: tuple[str, ...] = ()  # what may come before calls and text, any number of times, with TEXT for any text
    answer: str = ""  # before an answer without calls
    text: str = ""  # what such an answer may be, in Lark's notation, where calls may begin an answer
    bare: bool = False  # a call may begin an answer without `opening`
    listed: bool = False  # the calls stand in a list, behind one `opening`
    id: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that must stay in the text even if they are special tokens."""
        return tuple(filter(None, (self.opening, self.closing, *self.around, self.quote, *self.symbols)))

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, symbol: Callable[[str], str], opened: bool = False
    ) -> str:
        """Lark rules in which `calls` is one call of one of `tools` or, with `parallel`, several.

        With `opened`, the rules leave out the opening, since it was written already.
        """

        spelled = partial(self.spelled, symbol)
        opening = "" if opened or self.bare else self.opening
        rules = [f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]
        for index, tool in enumerate(tools):
            function, name = tool["function"], f"tool_{index}_arguments"
            head, tail = ("" if self.listed else opening) + self.head, self.tail + self.closing
            if self.wraps_each and not opened:
                head, tail = f"{self.around[0]}\n{head}", f"{tail}\n{self.around[1]}"
            rules.append(f"tool_{index}: {spelled(head, NAME=function['name'])} {name} {spelled(tail)}")
            rules += self._arguments(name, function.get("parameters") or NO_PARAMETERS, spelled)
        line = lark_string("\n") + "?"
        between = line if self.separator == "\n" else lark_string(self.separator)
        calls = f"call ({between} call)*" if parallel and self.separator else "call"
        before, after = ("", "") if opened or self.wraps_each else map(spelled, self.around)
        if self.listed:
            before, after = f'{spelled(opening)} " "? "["', '"]"'
        elif before:
            before, after = f"{before} {line}", f"{line} {after}"
        return "\n".join([f"calls: {before} {calls} {after}", *rules])

    def spelled(self, symbol: Callable[[str], str], text: str, **names: str) -> str:
        """`text` in Lark's notation, with `names` replaced, and its marks written as `symbol` says."""
        for name, given in names.items():
            text = text.replace(name, given)
        parts = re.split(f"({'|'.join(map(re.escape, (*self.markers, NUL)))})", text)
        return " ".join(self.id if part == NUL else symbol(part) for part in parts if part)

    def before_answer(self, symbol: Callable[[str], str]) -> tuple[str, list[str]]:
        """What may come before calls or an answer, in Lark's notation, and the rules for it."""
        rules = list[str]()
        for index, (begin, _, end) in enumerate(one.partition("TEXT") for one in self.thoughts):
            rules.append(f"thought_{index}: {self.spelled(symbol, begin)} thought_{index}_text")
            rules.append(text_up_to(f"thought_{index}_text", end, partial(self.spelled, symbol)))
        return f"({' | '.join(f'thought_{index}' for index in range(len(self.thoughts)))})*", rules

    def _arguments(self, name: str, schema: Mapping[str, Any], spelled: Callable[..., str]) -> list[str]:
        properties = schema.get("properties")
        if self.value is None:
            return [f"{name}: %json {json.dumps(closed_schema(schema))}"]
        rules, needed, others = list[str](), list[str](), list[str]()
        for at, (key, one) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            part, is_text = f"{name}_{at}", types_of(one, schema) == {"string"} and "enum" not in one
            before, after = self.value
            before, after = (before + self.quote, self.quote + after) if is_text else (before, after)
            marked = spelled(before, KIND=str(is_text).lower(), KEY=key)
            if is_text and (self.quote or not self.between):
                rules.append(f"{part}: {marked} {part}_text")
                rules.append(text_up_to(f"{part}_text", after, spelled))
            else:
                whole = {**one, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}
                rules += [f"{part}: {marked} {part}_json {spelled(after) or lark_string('')}"]
                rules += [f"{part}_json: %json {json.dumps(closed_schema(whole))}"]
            (needed if key in (schema.get("required") or ()) else others).append(part)
        between = spelled(self.between)
        if needed or not self.between:
            several = f" {between} ".join(needed)
            return [f"{name}: {several} {' '.join(f'({between} {part})?' for part in others)}" + ' ""', *rules]
        either = " | ".join(others)
        return [f"{name}: (({either}) ({between} ({either}))*)?" if others else f'{name}: ""', *rules]


def text_up_to(rule: str, end: str, spelled: Callable[[str], str]) -> str:
    """A Lark rule for any text and the `end` behind it, which may hold special tokens."""
    if "<[" in spelled(end):
        return f"{rule}: /(.|\\n)*/ {spelled(end)}"
    literal = re.escape(end).replace("/", "\\/").replace("\\\n", "\\n")
    return f"{rule}[lazy]: /(.|\\n)*{literal}/"


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names, also in its alternatives and by a reference into `root`."""
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        found = root.get(reference.split("/")[1] if reference.startswith("#/") else "", {})
        return types_of(found.get(reference.split("/")[-1]), {}) if isinstance(found, Mapping) else set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {str(one) for one in named} if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        types = types.union(*(types_of(one, root) for one in schema.get(key) or ()))
    if not types and isinstance(schema.get("enum"), list):
        types = {name for name, kind in _JSON_TYPES.items() if any(isinstance(one, kind) for one in schema["enum"])}
    return types


def typed(text: str, types: set[str]) -> Any:
    """The value that a model wrote as `text` for a parameter of these JSON types; any if there are none."""
    if types == {"string"}:
        return text
    for read in (json.loads, lambda written: ast.literal_eval(written.strip())):
        try:
            value = read(text)
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        kinds = {name for name, kind in _JSON_TYPES.items() if isinstance(value, kind)}
        if isinstance(value, bool):
            kinds = {"boolean"}
        if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
            return int(value)
        if not isinstance(value, str) and (not types or kinds & types):
            return value
    return {"true": True, "false": False}.get(text.strip().lower(), text) if "boolean" in types else text


def _read_json(text: str) -> Any:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _elements(name: str, parameter: str) -> Callable[[str, Schemas], Call | None]:
    """Reads a name, then parameters; each ends at the first end behind which another, or nothing, comes."""
    begins, one = re.compile(name), re.compile(parameter, re.DOTALL)

    def read(body: str, schemas: Schemas) -> Call | None:
        if (found := begins.match(body)) is None:
            return None
        name, at, arguments = found["name"], found.end(), dict[str, Any]()
        schema = schemas.get(name, {})
        properties = schema.get("properties") or {}
        while at < len(body):
            if (match := one.match(body, at)) is None:
                return None
            key, value, kind = match["key"], match["value"], match.groupdict().get("kind")
            types = types_of(properties.get(key), schema) if kind is None else {"string"} if kind == "true" else set()
            arguments[key], at = typed(value, types), match.end()
        return name, arguments

    return read


def _labelled(pattern: str) -> Callable[[str, Schemas], Call | None]:
    whole = re.compile(pattern, re.DOTALL)

    def read(body: str, schemas: Schemas) -> Call | None:
        match = whole.fullmatch(body)
        arguments = None if match is None else _read_json(match["json"])
        return None if match is None or arguments is None else (match["name"], arguments)

    return read


def _braced(quote: str) -> Callable[[str, Schemas], Call | None]:
    """Reads `call:NAME{key:value}`, in which texts stand between two `quote`s."""
    tokens = re.compile(rf"{re.escape(quote)}(?P<text>.*?){re.escape(quote)}|(?P<json>\"(?:[^\"\\]|\\.)*\")"
                        r"|(?P<mark>[{}\[\],:])|(?P<word>[^{}\[\],:\"]+)", re.DOTALL)  # fmt: skip

    def read(body: str, schemas: Schemas) -> Call | None:
        found = re.match(r"\s*call:(?P<name>[\w.-]+)(?=\{)", body)
        if found is None:
            return None
        written, at = list[str](), found.end()
        while at < len(body):
            if (token := tokens.match(body, at)) is None:
                return None
            at, text, word = token.end(), token["text"], (token["word"] or "").strip()
            if word and (body[at : at + 1] == ":" or not _is_json(word)):
                text = word  # a key, or a text without quotes
            written.append(token["json"] or token["mark"] or word if text is None else json.dumps(text))
        arguments = _read_json("".join(written))
        return None if arguments is None else (found["name"], arguments)

    return read


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def python_calls(text: str) -> list[Call] | None:
    """The calls in a Python list of calls with keyword arguments; None if it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = [(ast.unparse(one.func), {word.arg: _constant(word.value) for word in one.keywords})
                 for one in tree.elts if not one.args]  # type: ignore[attr-defined]  # fmt: skip
        json.dumps(calls)
    except (ValueError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError):
        return None
    return calls if len(calls) == len(tree.elts) and not any(None in given for _, given in calls) else None  # type: ignore[attr-defined]


def _constant(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="true" | "false" | "null"):
            return json.loads(node.id)
        case ast.List():
            return [_constant(one) for one in node.elts]
        case ast.Dict():
            return {_constant(key): _constant(one) for key, one in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


_PYTHON_CALL: Final = re.compile(r"\s*+(?:\[\s*+(?:[A-Za-z_][\w.]*+(?:\(|\Z)|\Z)|\Z)")  # or what may become one


@dataclass(slots=True)
class MarkupParser:
    """Splits an answer into text and tool calls as it arrives; each call comes whole.

    The joined result does not depend on how the text was cut into pieces. What only looked like a call is passed on as
    text. Without `parallel`, only the first call counts.
    """

    format: MarkupFormat
    schemas: Schemas
    parallel: bool = True
    calls: int = 0
    _held: str = ""  # text not parsed yet
    _begun: bool = False  # whether there was any text but blanks
    _tried: int = 0  # up to where closings of the call that is held were tried

    def feed(self, text: str) -> Pieces:
        """The pieces that `text` adds to the answer."""
        self._held += text
        if self.format.bare:
            return [] if not self._begun and _PYTHON_CALL.match(self._held) else self._text(self._held)
        pieces: Pieces = []
        while self._held and self._step(pieces):
            pass
        return pieces

    def finish(self) -> Pieces:
        """The pieces left when no more text will come."""
        held, self._held = self._held, ""
        read = python_calls(held) if self.format.bare and not self._begun else None
        if read and {name for name, _ in read} <= self.schemas.keys():
            return [piece for name, given in read for piece in self.called(name, written(given))]
        over = self.calls and not self._begun and self.format.around[1].startswith(held.strip())
        return [held] if held and not over else []

    def _text(self, text: str) -> Pieces:
        self._begun, self._held, self._tried = True, self._held[len(text) :], 0
        return [text] if text else []

    def _step(self, pieces: Pieces) -> bool:
        """Take what can be taken off the held text; returns whether there was anything."""
        opening, (before, after) = self.format.opening, self.format.around
        if not self._begun:  # blanks before and behind a call, and what ends a list of calls, are no text
            rest = self._held.lstrip()
            if self.calls and after and rest.startswith(after):
                rest = rest.removeprefix(after).lstrip()
            marks = [mark for mark in (before, opening, after if self.calls else "") if mark]
            if any(mark.startswith(rest) for mark in marks):
                return False
            if self.calls or any(rest.startswith(mark) for mark in marks):
                self._held = rest
        found = [at for mark in (before, opening) if mark and (at := self._held.find(mark)) >= 0]
        if not found:
            longest = max(partial_end(self._held, mark) for mark in (before, opening) if mark)
            pieces += self._text(self._held[: len(self._held) - longest])
            return False
        if at := min(found):
            pieces += self._text(self._held[:at])
        begin = self._held.removeprefix(before).lstrip() if before else self._held
        if not begin.startswith(opening):
            if opening.startswith(begin):
                return False
            pieces += self._text(self._held[:1])
            return True
        return self._inside(begin, pieces)

    def _inside(self, begin: str, pieces: Pieces) -> bool:
        """Read a call at the beginning of the text `begin`, if it is all there."""
        format = self.format
        while (end := begin.find(format.closing, max(self._tried, len(format.opening)))) >= 0:
            self._tried = end + 1
            if (call := format.read(begin[len(format.opening) : end], self.schemas)) is not None:
                self._held, self._tried, self._begun = begin[end + len(format.closing) :], 0, False
                pieces += self.called(call[0], written(call[1]))
                return bool(self._held)
        self._tried = max(self._tried, len(begin) - len(format.closing))
        return False

    def called(self, name: str, arguments: str) -> Pieces:
        """The pieces that begin a call."""
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        call = {
            "index": self.calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }
        return [call] if self.parallel or self.calls == 1 else []

    def more(self, arguments: str) -> Pieces:
        """The pieces that go on with the last call."""
        more = {"index": self.calls - 1, "function": {"arguments": arguments}}
        return [more] if self.parallel or self.calls == 1 else []


def written(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


QWEN: Final = MarkupFormat(
    name="qwen",
    opening="<function=",
    closing="</function>",
    read=_elements(
        r"(?P<name>[^>\n]+)>\s*", r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*+(?=<parameter=|\Z)"
    ),
    head="NAME>\n",
    value=("<parameter=KEY>\n", "\n</parameter>\n"),
    around=("<tool_call>", "</tool_call>"),
    wraps_each=True,
)
GLM: Final = MarkupFormat(
    name="glm",
    opening="<tool_call>",
    closing="</tool_call>",
    read=_elements(
        r"\s*(?P<name>[\w.-]+)\s*",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*+(?=<arg_key>|\Z)",
    ),
    head="NAME\n",
    value=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    symbols=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DSML: Final = MarkupFormat(
    name="deepseek",
    opening='<｜DSML｜invoke name="',
    closing="</｜DSML｜invoke>",
    read=_elements(
        r"(?P<name>[^\"\n]+)\">\s*",
        r"<｜DSML｜parameter name=\"(?P<key>[^\"\n]+)\" string=\"(?P<kind>true|false)\">(?P<value>.*?)"
        r"</｜DSML｜parameter>\s*+(?=<｜DSML｜parameter|\Z)",
    ),
    head='NAME">\n',
    value=('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>\n"),
    around=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    symbols=("｜DSML｜",),
)
DSML_4: Final = replace(DSML, around=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
DEEPSEEK: Final = MarkupFormat(
    name="deepseek",
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    read=_labelled(r"\s*(?P<name>[^<\n]+)<｜tool▁sep｜>(?P<json>.*)"),
    head="NAME<｜tool▁sep｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    symbols=("<｜tool▁sep｜>",),
)
DEEPSEEK_3: Final = replace(
    DEEPSEEK,
    read=_labelled(r"\s*\w+<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<json>.*)\n```\s*"),
    head="function<｜tool▁sep｜>NAME\n```json\n",
    tail="\n```",
)
GEMMA: Final = MarkupFormat(
    name="gemma",
    opening="<|tool_call>",
    closing="<tool_call|>",
    read=_braced('<|"|>'),
    head="call:NAME{",
    tail="}",
    value=("KEY:", ""),
    between=",",
    quote='<|"|>',
)
FUNCTION_GEMMA: Final = replace(
    GEMMA, opening="<start_function_call>", closing="<end_function_call>", read=_braced("<escape>"), quote="<escape>"
)
PYTHONIC: Final = MarkupFormat(
    name="pythonic",
    head="NAME(",
    tail=")",
    value=("KEY=", ""),
    between=", ",
    separator=", ",
    text=r"""" "? "[" /([^A-Za-z_]|[A-Za-z_][\w.]*[^\w.(])(.|\n)*|[A-Za-z_][\w.]*/? | /\s*([^\[\s](.|\n)*)?/""",
    bare=True,
    listed=True,
)
