"""Reads a grammar in Lark's notation just far enough to count its rules, and to see whether any finite text fits it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from agentspec.backends.torch.grammars.complexity import MAX_DEPTH, MAX_REPEATS, Complexity, measure_regex, satisfiable
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
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*+|_?[A-Z][_A-Z0-9-]*+)
    |(?P<number>\d++)
    |(?P<mark>::|->|\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
MAX_TOKENS = 200_000
_AFTER_HEAD = frozenset({":", "::", ".", "{", "["})
# Rules with parameters, and texts that fit several expressions at once. "~" is "not", or before a number a count.
_MULTIPLYING = frozenset({"::", "&"})
_WITH_JSON = frozenset({"%json", "%regex", "%llguidance"})
Token = tuple[str, str]  # a group of `_TOKEN`, or "json" with a JSON text, and its text


def measure_lark(text: str, param: str) -> Complexity:
    """The complexity of a grammar. Raises `InvalidRequestError` for one that no finite text fits, for an open string or
    regular expression, for groups inside groups beyond the limit, and for JSON inside it that `check_json` refuses.
    """
    bodies = _bodies(text, param)
    outline = _Outline({name: number for number, name in enumerate(bodies)})
    for number, (name, body) in enumerate(bodies.items()):
        outline.read(number, body, terminal=name.lstrip("_")[:1].isupper())
        Complexity(depth=outline.nesting).check(param)
    found = Complexity(len(text), outline.nesting + outline.chain(), len(outline.conditions), outline.repeats())
    nested = False
    for (kind, token), (after, _) in (pair for body in bodies.values() for pair in pairwise([*body, ("end", "")])):
        if kind == "regex":
            one = measure_regex(token)
            found += Complexity(0, one.depth, one.parts, one.repeats)
        elif kind == "string":
            found += Complexity(literal=len(token))
        elif kind == "json":
            found += _measure_json(token, param)
        elif token == "%lark":  # a grammar inside the grammar: only a compiler can tell
            nested, found = True, found + Complexity(repeats=MAX_REPEATS)
        elif kind == "mark" and (token in _MULTIPLYING or (token == "~" and after != "number")):
            found += Complexity(repeats=MAX_REPEATS)  # as above
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
    inside: dict[int, list[_Part]] = field(default_factory=dict)  # of each rule and group
    always: list[int] = field(default_factory=list)  # the condition that holds

    def __post_init__(self) -> None:
        self.conditions = [[] for _ in self.numbers]
        self.uses = [[] for _ in self.numbers]
        self.always = [self._new()]

    def read(self, number: int, body: list[Token], *, terminal: bool = False) -> None:
        """Read the body of a named rule. Brackets that do not match are left for the compiler to refuse."""
        opened = [_Group(number, optional=False)]
        self._alternative(opened[-1])
        skip = False
        for kind, token in body:
            group = opened[-1]
            if len(opened) > MAX_DEPTH:
                break
            if skip:
                skip = False
            elif token in ("->", "::"):
                skip = True
            elif kind == "mark" and token in "([":
                opened.append(_Group(self._new(), optional=token == "["))
                self.nesting = max(self.nesting, len(opened))
                self._alternative(opened[-1])
            elif kind == "mark" and token in ")]" and len(opened) > 1:
                self._end_group(opened)
            elif token == "|":
                self._alternative(group)
            elif kind == "mark" and token in "*?" and group.atoms:
                group.atoms[-1] = self.always
            elif kind == "name":
                condition = self._named(number, token)
                same = terminal and condition is not self.always  # only terminals are written out where they are named
                group.add(condition, _Part(terminal=condition[0] if same else None))
            elif kind in ("string", "regex", "special", "json", "keyword"):
                group.add(self.always, _Part(measure_regex(token).repeats if terminal and kind == "regex" else 1))
            elif kind == "mark" and token in "{~" and group.parts:
                group.parts[-1].begin_count()
            elif kind == "number" and group.atoms:
                self._count(group, int(token[:9]))
        while len(opened) > 1:
            self._end_group(opened)
        self.inside[number] = opened[0].parts

    def _end_group(self, opened: list[_Group]) -> None:
        group = opened.pop()
        self.inside[group.number] = group.parts
        opened[-1].add(self.always if group.optional else [group.number], _Part(group=group.number))

    def repeats(self) -> int:
        """How often something is written out, at most: the largest product of counts inside one another. A terminal
        that another one names is written out there.
        """
        products: dict[int, tuple[int, int]] = {}  # the largest product in a group, and that of all terminals it names
        for first in self.inside:
            opened = [(first, iter(self.inside[first]))] if first not in products else []
            while opened:
                number, parts = opened[-1]
                products.setdefault(number, (MAX_REPEATS, MAX_REPEATS))  # for a terminal that names itself
                inner = next((one for part in parts if (one := part.inner) is not None and one not in products), None)
                if inner is None:
                    opened.pop()
                    products[number] = _product(self.inside[number], products)
                else:
                    opened.append((inner, iter(self.inside.get(inner, ()))))
        return max(map(max, products.values()), default=1)

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

    def _count(self, group: _Group, count: int) -> None:
        """A number after an atom says how often it is repeated, at least or at most."""
        if count == 0:
            group.atoms[-1] = self.always
        group.parts[-1].count(count)


@dataclass(slots=True)
class _Part:
    """An atom: how often its own text is written out, and the terminal or group that it names."""

    own: int = 1
    terminal: int | None = None
    group: int | None = None
    times: int = 1
    _before: int | None = None  # `times` without the count that is being read

    @property
    def inner(self) -> int | None:
        return self.group if self.terminal is None else self.terminal

    def begin_count(self) -> None:
        self._before = self.times

    def count(self, count: int) -> None:
        """Of the two numbers of a range the larger one counts."""
        if self._before is not None:
            self.times = max(self.times, min(self._before * count, MAX_REPEATS + 1))


def _product(parts: list[_Part], products: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    largest, named = 1, 0
    for part in parts:
        own, terminals = part.own, 0
        if part.group is not None:
            own, terminals = products[part.group]
        elif part.terminal is not None:
            terminals = max(products[part.terminal])
        largest, named = max(largest, own * part.times), named + terminals * part.times
    return min(largest, MAX_REPEATS + 1), min(named, MAX_REPEATS + 1)


@dataclass(slots=True)
class _Group:
    number: int
    optional: bool
    atoms: list[list[int]] = field(default_factory=list)  # conditions of the alternative that is being read
    parts: list[_Part] = field(default_factory=list)  # of all alternatives

    def add(self, condition: list[int], part: _Part) -> None:
        self.atoms.append(condition)
        self.parts.append(part)
