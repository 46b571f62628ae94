"""Reads a grammar in Lark's notation just far enough to count its rules, and to see whether any finite text fits it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentspec.backends.torch.grammars.complexity import MAX_REPEATS, Complexity, measure_regex, satisfiable
from agentspec.backends.torch.grammars.schema_outline import measure_schema
from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_values import MAX_JSON_DEPTH, check_json

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\f]++|(?://|\#)[^\n]*+)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    |(?P<regex>/(?:[^/\\]|\\.)++/[imslux]*+)
    |(?P<keyword>%[a-z]++)
    |(?P<special><[^<>\s]++>|@[\w-]++)
    |(?P<name>[!?]{0,2}[A-Za-z_][\w-]*+)
    |(?P<number>\d++)
    |(?P<mark>::|->|\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
MAX_TOKENS = 200_000
_AFTER_HEAD = frozenset({":", "::", ".", "{", "["})
_WITH_JSON = frozenset({"%json", "%regex", "%llguidance"})
Token = tuple[str, str]  # a group of `_TOKEN`, or "json" with a JSON text, and its text


def measure_lark(text: str, param: str) -> Complexity:
    """The complexity of a grammar. Raises `InvalidRequestError` for one that no finite text fits, for an open string or
    regular expression, and for JSON inside it that `check_json` refuses.
    """
    bodies = _bodies(text, param)
    outline = _Outline({name: number for number, name in enumerate(bodies)})
    for number, body in enumerate(bodies.values()):
        outline.read(number, body)
    found = Complexity(len(text), outline.nesting + outline.chain(), len(outline.conditions), outline.repeats)
    nested = False
    for kind, token in (token for body in bodies.values() for token in body):
        if kind == "regex":
            one = measure_regex(token)
            found += Complexity(0, one.depth, one.parts, one.repeats)
        elif kind == "string":
            found += Complexity(literal=len(token))
        elif kind == "json":
            found += _measure_json(token, param)
        elif token == "%lark":  # a grammar inside the grammar: only a compiler can tell
            nested, found = True, found + Complexity(repeats=MAX_REPEATS)
        elif kind == "special" and token[0] == "@":
            message = f"the grammar refers to {token[:80]}, and there is no other grammar in a request"
            raise InvalidRequestError(message, param=param)
    if "start" in bodies and not nested and not satisfiable(outline.conditions)[list(bodies).index("start")]:
        message = "no finite text fits this grammar: give the rules that need each other an alternative that ends"
        raise InvalidRequestError(message, param=param)
    return found


def _bodies(text: str, param: str) -> dict[str, list[Token]]:
    """The tokens of each rule by its name, and of each statement by a name of its own."""
    bodies: dict[str, list[Token]] = {}
    body: list[Token] = []
    for line in _lines(text, param):
        kind, first = line[0]
        marks = [token for _, token in line]
        if kind == "name" and len(line) > 1 and marks[1] in _AFTER_HEAD and ":" in marks:
            body = bodies.setdefault(first.lstrip("!?"), [])
            line = line[marks.index(":") + 1 :]
        elif kind == "keyword":
            body = bodies.setdefault(f"{first} {len(bodies)}", [])
        body += line
    return bodies


def _lines(text: str, param: str) -> Iterator[list[Token]]:
    line: list[Token] = []
    position = count = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None, "the last alternative takes any character"
        kind, token, position = match.lastgroup, match.group(), match.end()
        if kind == "newline":
            if line:
                yield line
            line = []
        elif token in ('"', "/"):
            message = "the grammar has a string or regular expression that does not end"
            raise InvalidRequestError(message, param=param)
        elif kind != "skip":
            line.append((kind, token))
            count += 1
            if count > MAX_TOKENS:
                raise InvalidRequestError(f"the grammar has more than {MAX_TOKENS:,} names and marks", param=param)
        if token in _WITH_JSON:
            end = _json_end(text, position, param)
            line.append(("json" if token == "%json" else "special", text[position:end]))
            position = end
    if line:
        yield line


def _json_end(text: str, position: int, param: str) -> int:
    """Where the JSON value that follows a keyword ends."""
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return json.JSONDecoder().raw_decode(text, position)[1]
    except RecursionError:
        message = f"the grammar holds JSON that is nested more than {MAX_JSON_DEPTH} levels deep"
        raise InvalidRequestError(message, param=param) from None
    except ValueError as error:
        raise InvalidRequestError(f"the grammar holds JSON that cannot be read: {error}", param=param) from None


def _measure_json(text: str, param: str) -> Complexity:
    schema = json.loads(text)
    check_json(schema, "the schema in the grammar", param=param)
    return measure_schema(schema, param)


@dataclass(slots=True)
class _Outline:
    """What each rule needs. Groups and alternatives are rules without a name, numbered after the named ones."""

    numbers: Mapping[str, int]
    conditions: list[list[list[int]]] = field(default_factory=list)
    uses: list[list[int]] = field(default_factory=list)  # of each named rule, the rules that it names, in order
    nesting: int = 1
    repeats: int = 1
    always: list[int] = field(default_factory=list)  # the condition that holds

    def __post_init__(self) -> None:
        self.conditions = [[] for _ in self.numbers]
        self.uses = [[] for _ in self.numbers]
        self.always = [self._new()]

    def read(self, number: int, body: list[Token]) -> None:
        """Read the body of a named rule. Brackets that do not match are left for the compiler to refuse."""
        opened = [_Group(number, optional=False)]
        self._alternative(opened[-1])
        skip = False
        for kind, token in body:
            atoms = opened[-1].atoms
            if skip:
                skip = False
            elif token in ("->", "::"):
                skip = True
            elif kind == "mark" and token in "([":
                opened.append(_Group(self._new(), optional=token == "["))
                self.nesting = max(self.nesting, len(opened))
                self._alternative(opened[-1])
            elif kind == "mark" and token in ")]" and len(opened) > 1:
                group = opened.pop()
                opened[-1].atoms.append(self.always if group.optional else [group.number])
            elif token == "|":
                self._alternative(opened[-1])
            elif kind == "mark" and token in "*?" and atoms:
                atoms[-1] = self.always
            elif kind == "name":
                atoms.append(self._named(number, token))
            elif kind in ("string", "regex", "special", "json", "keyword"):
                atoms.append(self.always)
            elif kind == "number" and atoms:
                self._count(atoms, int(token[:9]))

    def chain(self) -> int:
        """How many rules lead down to another from `start` or any rule, each entered where it is first named."""
        entered = [False] * len(self.uses)
        deepest = 0
        for first in sorted(range(len(self.uses)), key=lambda number: number != self.numbers.get("start")):
            if entered[first]:
                continue
            entered[first], opened = True, [iter(self.uses[first])]
            while opened:
                deepest = max(deepest, len(opened))
                name = next((name for name in opened[-1] if not entered[name]), None)
                if name is None:
                    opened.pop()
                else:
                    entered[name] = True
                    opened.append(iter(self.uses[name]))
        return deepest

    def _new(self) -> int:
        self.conditions.append([])
        return len(self.conditions) - 1

    def _alternative(self, group: _Group) -> None:
        """Begin one more alternative of `group`, of which one must have a finite text."""
        alternative, conditions = self._new(), self.conditions[group.number]
        if not conditions:
            conditions.append([])
        conditions[0].append(alternative)
        group.atoms = self.conditions[alternative]

    def _named(self, rule: int, name: str) -> list[int]:
        """The condition of an atom that names a rule; that of an unknown name holds."""
        found = self.numbers.get(name.lstrip("!?"))
        if found is None:
            return self.always
        self.uses[rule].append(found)
        return [found]

    def _count(self, atoms: list[list[int]], count: int) -> None:
        """A number after an atom says how often it is repeated, at least or at most."""
        if count == 0:
            atoms[-1] = self.always
        self.repeats = max(self.repeats, min(count, MAX_REPEATS))


@dataclass(slots=True)
class _Group:
    number: int
    optional: bool
    atoms: list[list[int]] = field(default_factory=list)  # conditions of the alternative that is being read
