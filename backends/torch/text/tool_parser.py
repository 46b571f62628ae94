"""Tool calls as models write them: the format that a chat template teaches, its grammar, and an incremental parser."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from agentspec.backends.torch.text.channels import HARMONY, JsonScanner
from agentspec.backends.torch.text.chat_template import template_of
from agentspec.backends.torch.text.tool_markup import (
    DEEPSEEK,
    DEEPSEEK_3,
    DSML,
    DSML_4,
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    PYTHONIC,
    QWEN,
    MarkupFormat,
)
from agentspec.errors import InvalidRequestError
from agentspec.text import partial_end


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(MarkupFormat):
    """How a model writes calls whose arguments are read as they come: `opening`, then a JSON object with a name and
    arguments, then `closing` if there is one.

    If `named`, the object holds only the arguments, after the name, perhaps `before_id` and the call's id, and
    `before_arguments`. If `bare`, a call's object may begin an answer without `opening`.
    """

    named: bool = False
    before_id: str = ""
    before_arguments: str = ""


_ID = "[a-zA-Z0-9]{9}"  # of a call by Mistral
HERMES = ToolFormat(
    name="hermes", opening="<tool_call>", closing="</tool_call>", head='\n{"name": "NAME", "arguments": ', tail="}\n"
)
LLAMA = ToolFormat(
    name="llama", opening="<|python_tag|>", bare=True, separator="; ", head='{"name": "NAME", "parameters": ', tail="}"
)
MISTRAL = ToolFormat(
    name="mistral", opening="[TOOL_CALLS]", listed=True, separator=", ", head='{"name": "NAME", "arguments": ', tail="}"
)
MISTRAL_NAMED = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    named=True,
    before_arguments="[ARGS]",
    head="NAME[ARGS]",
    symbols=("[ARGS]",),
)
MISTRAL_IDS = replace(  # `mistral_common.experimental.tools` reads all three
    MISTRAL_NAMED, before_id="[CALL_ID]", head="NAME[CALL_ID]\0[ARGS]", symbols=("[ARGS]", "[CALL_ID]"), id=f"/{_ID}/"
)


FORMATS: Final[tuple[tuple[tuple[str, ...], MarkupFormat], ...]] = (
    (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), MISTRAL_IDS),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=",), QWEN),
    (("<arg_key>",), GLM),
    (("<tool_call>",), HERMES),
    (("DSML", "tool_calls>"), DSML_4),
    (("DSML",), DSML),
    (("tool▁sep", "```json"), DEEPSEEK_3),
    (("tool▁sep",), DEEPSEEK),
    (("<|tool_call>",), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|channel|>",), HARMONY),
    (("[func_name",), PYTHONIC),
    (("<|python_tag|>",), LLAMA),
    (("ipython",), LLAMA),
)
"""What each format is known by in a chat template; the first row counts of which all is there."""


def format_of(template: str) -> MarkupFormat | None:
    """The format that a chat template teaches; None if it knows no tools or teaches a format not known here."""
    return next((format for signs, format in FORMATS if all(sign in template for sign in signs)), None)


def tool_format(tokenizer: Any, *, required: bool = True) -> MarkupFormat | None:
    """The tool call format of the model's chat template; Hermes' if the template has no tools.

    For a format not known here, raises `InvalidRequestError` if a format is `required`, else returns None.
    """
    template = template_of(tokenizer, tools=True)
    format = format_of(template) if "tools" in template else HERMES
    if format is None and required:
        raise InvalidRequestError(
            "this model's chat template writes tool calls in a format that is not known here; known: "
            + ", ".join(sorted({format.name for _, format in FORMATS})),
            param="tools",
        )
    return format


OutputPiece = str | dict[str, Any]  # text, or an entry of OpenAI's `tool_calls` in a delta
_NAME = re.compile(r"[\w.-]+")  # of a function, or an id
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)  # behind it arguments begin
_FIRST = re.compile(rf"\{{\s*({_STRING})\s*:\s*({_STRING})?")  # an object's first key, and its value if that is a text
_CALL_KEYS = frozenset({"name", "type", "id"})
_ARGUMENTS = ("arguments", "parameters")


ParserState = Literal["text", "between", "object", "closing"]


@dataclass(slots=True)
class ToolCallParser:
    """Splits an answer into text and tool calls as it arrives: a call's name first, then its arguments in pieces. A
    call whose arguments come before its name, or as a text, comes whole.

    Text that only looked like a call is passed on as text. The joined result does not depend on how the text was cut
    into pieces. Without `parallel`, only the first call counts.
    """

    format: ToolFormat
    names: frozenset[str]
    parallel: bool = True
    calls: int = 0
    _state: ParserState = "text"
    _held: str = ""  # text not parsed yet
    _raw: list[str] = field(default_factory=list)  # of the current call but its object: it may still be no call
    _fresh: bool = True  # whether only blanks came since the beginning or since the last call
    _object: JsonScanner = field(default_factory=JsonScanner)
    _name: str | None = None  # the call's name, if the format writes it before the arguments
    _id: str | None = None  # and its id; empty until it comes
    _ids: set[str] = field(default_factory=set)
    _called: bool = False  # whether the client was sent a part of the call that is read

    def feed(self, text: str) -> list[OutputPiece]:
        """The pieces that `text` adds to the answer."""
        self._held += text
        pieces: list[OutputPiece] = []
        steps = {"text": self._text, "between": self._between, "object": self._inside, "closing": self._closing}
        while self._held and steps[self._state](pieces):
            pass
        return joined(pieces)

    def finish(self) -> list[OutputPiece]:
        """The pieces left when no more text will come. A first call that has no name yet is passed on as text; a later
        one was cut off, and its beginning is no answer.
        """
        called, state = self._called, self._state
        rest = ("" if called else self._unparsed()) + self._held
        self._raw, self._held = [], ""
        closed = state == "closing" and self.format.closing.startswith(rest.strip())
        opening, begun = self.format.opening, rest.strip(self._separators)
        opens = (self._fresh and opening.startswith(begun)) or (state == "between" and begun.startswith(opening))
        later = self.calls > 0 and (opens or state == "object")
        return [] if called or closed or later or not rest else [rest]

    def _unparsed(self) -> str:
        """The text of what may be no call, without what ended the call before it."""
        raw = "".join([*self._raw, self._object.text if self._state == "object" else ""])
        return raw.lstrip(self._separators.replace("[", "")) if self.calls else raw

    @property
    def cut(self) -> bool:
        """Whether the arguments of the call that is read are not whole yet."""
        return self._called and (self._name is not None or self._object.inner_end is None)

    @property
    def _separators(self) -> str:
        return " \n\t[];," if self.format.listed else " \n\t;,"

    def _enter(self, state: ParserState, eaten: str) -> bool:
        self._raw.append(eaten)
        self._held = self._held[len(eaten) :]
        self._state = state
        return True

    def _text(self, pieces: list[OutputPiece]) -> bool:
        """Parse text up to an opening, or up to a possible beginning of one."""
        opening, body = self.format.opening, self._held.lstrip()
        if self._fresh:
            if len(body) < len(opening) and opening.startswith(body):
                return False
            if self.format.bare and not self.calls and body[0] == "{":
                return self._enter("between", "")
            if self.calls or body.startswith(opening):
                self._held = body
        at = self._held.find(opening)
        end = at if at >= 0 else len(self._held) - partial_end(self._held, opening)
        if end:
            self._fresh = False
            pieces.append(self._held[:end])
            self._held = self._held[end:]
        return self._enter("between", opening) if at >= 0 else False

    def _between(self, pieces: list[OutputPiece]) -> bool:
        """Parse after an opening or a call: blanks and separators, a name, an object, or no call after all."""
        rest = self._held.lstrip(self._separators)
        if len(rest) < len(self._held):
            return self._enter("between", self._held[: len(self._held) - len(rest)])
        for marker in filter(None, (self.format.opening, self.format.before_id, self.format.before_arguments)):
            if rest.startswith(marker):
                self._id = "" if marker == self.format.before_id else self._id
                return self._enter("between", marker)
            if marker.startswith(rest):
                return False
        if rest[0] == "{":
            self._object, self._state = JsonScanner(), "object"
            return True
        name = _NAME.match(rest)
        if self.format.name != "mistral" or name is None or (self._name is not None and self._id != ""):
            return self._give_up(pieces)
        if name.end() == len(rest):
            return False
        if self._name is None:
            self._name = name.group()
        else:
            self._id = name.group()
        return self._enter("between", name.group())

    def _inside(self, pieces: list[OutputPiece]) -> bool:
        """Parse inside a call's object, which may still turn out to be no call."""
        scanner, start = self._object, self._object.count
        took = scanner.feed(self._held, stored=not self._called)
        fresh, self._held = self._held[:took], self._held[took:]
        if self._called:
            self._send(pieces, fresh[: max(0, self._end - start)])
        elif self._name is not None:
            self._begin(pieces, self._name, scanner.text)
        elif scanner.inner is not None and (head := _HEAD.fullmatch(scanner.text, 0, scanner.inner)):
            name = json.loads(head[1])
            if name and not self._foreign:
                self._begin(pieces, name, scanner.text[scanner.inner : self._end])
        if scanner.complete and not self._called and (call := self._whole()) is not None:
            self._begin(pieces, *call)
        if scanner.broken or (not self._called and (scanner.complete or self._foreign)):
            return self._give_up(pieces)
        if scanner.complete:
            self._raw, self._name, self._id, self._fresh, self._called = [], None, None, True, False
            self._state = "closing" if self.format.closing else "between"
        return scanner.complete

    @property
    def _end(self) -> int:
        """Up to where the arguments are read, as a place in the object."""
        end = None if self._name is not None else self._object.inner_end
        return self._object.count if end is None else end

    def _begin(self, pieces: list[OutputPiece], name: str, arguments: str) -> None:
        self.calls, self._called = self.calls + 1, True
        if self.parallel or self.calls == 1:
            function = {"name": name, "arguments": ""}
            pieces.append({"index": self.calls - 1, "id": self._new_id(), "type": "function", "function": function})
        self._send(pieces, arguments)

    def _send(self, pieces: list[OutputPiece], arguments: str) -> None:
        if arguments and (self.parallel or self.calls == 1):
            pieces.append({"index": self.calls - 1, "function": {"arguments": arguments}})

    def _whole(self) -> tuple[str, str] | None:
        """The name and arguments of a call that is all there; of a key that comes twice the first value counts."""
        try:
            read = json.loads(self._object.text, strict=False, object_pairs_hook=_first_values)
        except (ValueError, RecursionError):
            return None
        keys = [*read]
        before = keys[: min((keys.index(key) for key in _ARGUMENTS if key in keys), default=len(keys))]
        name, bare = read.get("name"), self.format.bare
        if (
            not isinstance(name, str)
            or not name
            or (bare and not (name in self.names and _CALL_KEYS.issuperset(before)))
        ):
            return None
        if len(before) == len(keys):
            return None if bare else (name, "{}")
        given = read[keys[len(before)]]
        return name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    @property
    def _foreign(self) -> bool:
        """Whether a bare object begins as no call does: with another key, or with the name of no function."""
        first = _FIRST.match(self._object.text) if self.format.bare else None
        if first is None:
            return False
        key, value = json.loads(first[1]), None if first[2] is None else json.loads(first[2])
        return key not in (*_CALL_KEYS, *_ARGUMENTS) or (key == "name" and value not in (None, *self.names))

    def _new_id(self) -> str:
        """The id that the model wrote, if the client may send it back and no other call has it; else a new one."""
        id = self._id or ""
        if self.format.name != "mistral":
            id = f"call_{secrets.token_hex(12)}"
        elif not re.fullmatch(_ID, id) or id in self._ids:  # its templates accept nine letters and digits only
            id = secrets.token_hex(5)[:9]
        self._ids.add(id)
        return id

    def _give_up(self, pieces: list[OutputPiece]) -> bool:
        """This was no call: pass on its first character as text, and parse again from the second."""
        whole = ("" if self._called else self._unparsed()) + self._held
        self._raw, self._name, self._id, self._called = [], None, None, False
        pieces.append(whole[:1])
        self._held, self._fresh, self._state = whole[1:], False, "text"
        return True

    def _closing(self, pieces: list[OutputPiece]) -> bool:
        """Parse the closing after a call's object; an answer that leaves it out is accepted."""
        rest = self._held.lstrip()
        if len(rest) < len(self.format.closing) and self.format.closing.startswith(rest):
            return False
        self._held, self._state = rest.removeprefix(self.format.closing), "text"
        return True


def _first_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found


def joined(pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
    """The same pieces, with consecutive texts joined, and consecutive arguments of one call joined."""
    result: list[OutputPiece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, str) and isinstance(last, str):
            result[-1] = last + piece
        elif isinstance(piece, dict) and isinstance(last, dict) and piece["index"] == last["index"]:
            arguments = last["function"]["arguments"] + piece["function"]["arguments"]
            result[-1] = {**last, "function": {**last["function"], "arguments": arguments}}
        else:
            result.append(piece)
    return result
