"""Writes a Lark grammar as one regular expression, which is possible where no rule leads back to itself.

The input of a custom tool travels inside a JSON string. A JSON schema can hold such a string to a regular expression
(`pattern`), but not to a grammar; the grammars that coding agents send for their patches and scripts are regular.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_GRAMMAR = 20_000  # characters
MAX_REGEX = 20_000  # characters
_MAX_LEVELS = 60

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\f]++|(?://|\#)[^\n]*+)
    |(?P<newline>\n\s*+)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)++/[a-z]*+)
    |(?P<keyword>%[a-z]++)
    |(?P<name>[!?]?_?[a-zA-Z][_a-zA-Z0-9]*+)
    |(?P<number>\d++)
    |(?P<mark>->|\.\.|[:|()\[\]?*+~.])""",
    re.VERBOSE,
)
# Lark's `common` terminals, as its manual describes them.
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
# What only some engines know, or what means something else inside a longer expression.
_UNSUITED = re.compile(r"\(\?[=!<P]|\\[1-9AbBzZGkK]|[$^]")
# A class that does not end goes on to the end of the text: to look for its end again at every bracket takes long.
_CLASS_OR_ESCAPE = re.compile(r"\\[^1-9AbBzZGkK]|\[\^?\]?(?:[^\]\\]|\\.)*+\]?")
# One right behind the bracket that opens a class stands for itself.
_BRACKET = re.compile(r"\\.|\[\^?\]?|[\]()]", re.DOTALL)

Token = tuple[str, str]  # a group of `_TOKEN`, and its text


class NotRegularError(ValueError):
    """The grammar refers to itself, is too large, or has what a regular expression cannot express here."""


class WrongGrammarError(NotRegularError):
    """The grammar is none: whoever wrote it has to change it."""


def check_balanced(regex: str) -> None:
    """Raise `WrongGrammarError` for a regular expression that could leave the parentheses around it, as `a)|(b`."""
    classes = groups = 0  # that are open; a class may stand in another one
    for match in _BRACKET.finditer(regex):
        bracket = match.group()
        if bracket[0] == "[":
            classes += 1
        elif bracket == "]":
            classes = max(0, classes - 1)
        elif not classes and bracket in ("(", ")"):
            groups += 1 if bracket == "(" else -1
        if groups < 0:
            break
    if groups or classes:
        raise WrongGrammarError("a regular expression has brackets that are not balanced")


def lark_regex(grammar: str) -> str:
    """A regular expression, without anchors, of the texts that fit `grammar`.

    Raises `NotRegularError`, for a mistake in the grammar itself `WrongGrammarError`.
    """
    if len(grammar) > MAX_GRAMMAR:
        raise NotRegularError(f"more than {MAX_GRAMMAR} characters")
    return _Writer(_definitions(_tokens(grammar))).named("start")


def _tokens(grammar: str) -> list[Token]:
    found: list[Token] = []
    position = 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None or match.lastgroup is None:
            raise NotRegularError(f"unknown notation {grammar[position : position + 20]!r}")
        if match.lastgroup != "skip":
            found.append((match.lastgroup, match.group()))
        position = match.end()
    return found


def _definitions(tokens: Sequence[Token]) -> dict[str, list[Token]]:
    """The tokens of each rule and terminal by its name; imported terminals among them."""
    bodies: dict[str, list[Token]] = {}
    body: list[Token] | None = None
    for line in _lines(tokens):
        marks = [text for _, text in line]
        if marks[:3] == ["%import", "common", "."] and len(line) == 4:
            _defined(bodies, marks[3], [("common", marks[3])])
        elif line[0][0] == "keyword":
            raise NotRegularError(f"{line[0][1]} is not supported")
        elif line[0][0] == "name" and ":" in marks[:4]:
            # A terminal's priority before the colon changes nothing here.
            body = _defined(bodies, marks[0].lstrip("!?"), line[marks.index(":") + 1 :])
        elif body is None:
            raise NotRegularError("the grammar does not begin with a rule")
        else:
            body += line
    return bodies


def _defined(bodies: dict[str, list[Token]], name: str, body: list[Token]) -> list[Token]:
    """`body`, which is now that of the rule `name`; the same terminal may be imported again."""
    if name in bodies and not bodies[name] == body == [("common", name)]:
        raise WrongGrammarError(f"{name} is defined more than once")
    bodies[name] = body
    return body


def _lines(tokens: Sequence[Token]) -> list[list[Token]]:
    lines: list[list[Token]] = [[]]
    for token in tokens:
        if token[0] == "newline":
            lines.append([])
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


@dataclass(slots=True)
class _Writer:
    """Writes rules by writing out, in place, the rules that they name."""

    bodies: Mapping[str, list[Token]]
    _written: dict[str, str] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)  # the rules that are being written
    _levels: int = 0

    def named(self, name: str) -> str:
        if name in self._open:
            raise NotRegularError(f"{name} leads back to itself")
        if name not in self._written:
            if name not in self.bodies:
                raise NotRegularError(f"{name} is not defined")
            self._open.append(name)
            reader = _Reader(self.bodies[name])
            self._written[name] = self._alternatives(reader)
            if reader.next is not None:
                raise NotRegularError(f"{reader.next[1]!r} is out of place")
            self._open.pop()
        return self._written[name]

    def _alternatives(self, reader: _Reader) -> str:
        self._levels += 1
        if self._levels > _MAX_LEVELS:
            raise NotRegularError(f"more than {_MAX_LEVELS} levels")
        options, several = _joined(self._options(reader), "|")
        self._levels -= 1
        return f"(?:{options})" if several else options

    def _options(self, reader: _Reader) -> Iterator[str]:
        yield self._sequence(reader)
        while reader.takes("|"):
            yield self._sequence(reader)

    def _sequence(self, reader: _Reader) -> str:
        written, _ = _joined(self._parts(reader), "")
        if reader.takes("->"):
            reader.take("name")
        return written

    def _parts(self, reader: _Reader) -> Iterator[str]:
        while reader.next is not None and reader.next[1] not in ("|", ")", "]", "->"):
            yield _repeated(self._atom(reader), reader)

    def _atom(self, reader: _Reader) -> str:
        if reader.takes("("):
            inner = self._alternatives(reader)
            reader.expect(")")
            return inner
        if reader.takes("["):
            inner = self._alternatives(reader)
            reader.expect("]")
            return f"(?:{inner})?"
        kind, text = reader.take("string", "regex", "name", "common")
        if kind == "name":
            return self.named(text)
        if kind == "common":
            return _common(text)
        if kind == "regex":
            return _regex(text)
        return _range(text, reader.take("string")[1]) if reader.takes("..") else _string(text)


@dataclass(slots=True)
class _Reader:
    tokens: Sequence[Token]
    position: int = 0

    @property
    def next(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, *kinds: str) -> Token:
        found = self.next
        if found is None or found[0] not in kinds:
            raise NotRegularError(f"{'the end' if found is None else repr(found[1])} is out of place")
        self.position += 1
        return found

    def takes(self, mark: str) -> bool:
        taken = self.next is not None and self.next == ("mark", mark)
        self.position += taken
        return taken

    def expect(self, mark: str) -> None:
        if not self.takes(mark):
            raise NotRegularError(f"{mark} is missing")


def _repeated(atom: str, reader: _Reader) -> str:
    for mark in "?*+":
        if reader.takes(mark):
            return f"(?:{atom}){mark}"
    if not reader.takes("~"):
        return atom
    least = reader.take("number")[1]
    most = reader.take("number")[1] if reader.takes("..") else least
    if max(len(least), len(most)) > 4 or int(least) > int(most):
        raise NotRegularError("a repetition is too large, or ends before it begins")
    return f"(?:{atom}){{{int(least)},{int(most)}}}"


def _common(name: str) -> str:
    if name not in _COMMON:
        raise NotRegularError(f"common.{name} is not supported")
    return f"(?:{_COMMON[name]})"


def _regex(text: str) -> str:
    end = text.rindex("/")
    body, flags = text[1:end], text[end + 1 :]
    check_balanced(body)
    if _UNSUITED.search(_CLASS_OR_ESCAPE.sub("", body)) or set(flags) - set("is"):
        raise NotRegularError(f"{text[:40]} is not supported")
    return f"(?{flags}:{body})"


def _string(text: str) -> str:
    escaped = _SPECIAL.sub(lambda found: "\\" + found.group(), _literal(text))
    return f"(?i:{escaped})" if text.endswith("i") else f"(?:{escaped})" if len(escaped) > 1 else escaped


def _range(first: str, last: str) -> str:
    ends = [_literal(first), _literal(last)]
    if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
        raise NotRegularError(f"{first}..{last} is no range")
    return "[{}-{}]".format(*(re.sub(r"[\\\]\[^&~-]", r"\\\g<0>", end) for end in ends))


def _literal(text: str) -> str:
    quoted = text.removesuffix("i")
    try:
        value = ast.literal_eval(quoted) if "\\" in quoted else quoted[1:-1]  # the former takes long for many
        value.encode()
    except (ValueError, SyntaxError):
        raise NotRegularError(f"{text[:40]} is no string") from None
    return str(value)


def _joined(parts: Iterable[str], between: str) -> tuple[str, bool]:
    """`parts` as one text, and whether they are several.

    What is written is bounded before it is copied: a few rules that each name another one twice grow without end.
    """
    taken: list[str] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += len(part) + len(between)
        if size > MAX_REGEX:
            raise NotRegularError(f"more than {MAX_REGEX} characters once written out")
    return between.join(taken), len(taken) > 1
