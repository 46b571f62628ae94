"""How large a grammar is before anything compiles it, and how large it may be. Nothing here is recursive."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentspec.errors import InvalidRequestError

MAX_CHARACTERS: Final = 1_000_000
MAX_DEPTH: Final = 200
MAX_PARTS: Final = 50_000
MAX_REPEATS: Final = 100_000
MAX_LITERAL: Final = 20_000

_QUANTIFIER = re.compile(r"\{\s*+(\d{1,9})?+\s*+(,)?+\s*+(\d{1,9})?+\s*+\}")
_HUGE_QUANTIFIER = re.compile(r"\{[\s\d,]*\d{10}")


@dataclass(frozen=True, slots=True)
class Complexity:
    """What a grammar asks of its compiler.

    `depth` counts the levels that a compiler may descend through: nesting, and rules or definitions that refer to
    others. `parts` counts rules, schemas, alternatives and operators; `repeats` is the largest product of counted
    repetitions inside one another, which is how often something is written out. `levels` bounds the depth whatever
    the order in which a compiler resolves references. `literal` is the length of the longest text that is spelled out:
    each of its tokens takes time in proportion.
    """

    characters: int = 0
    depth: int = 0
    parts: int = 0
    repeats: int = 1
    levels: int = 0
    literal: int = 0

    def __add__(self, other: Complexity) -> Complexity:
        """The complexity of both side by side."""
        return Complexity(
            self.characters + other.characters,
            max(self.depth, other.depth),
            self.parts + other.parts,
            max(self.repeats, other.repeats),
            max(self.levels, other.levels),
            max(self.literal, other.literal),
        )

    @property
    def simple(self) -> bool:
        """Whether it is so small that no compiler can take long, or much memory or stack, for it."""
        deepest = max(self.depth, self.levels)
        return self.characters <= 20_000 and deepest <= 200 and self.parts <= 1_000 and self.repeats <= 100

    def check(self, param: str) -> None:
        """Raise `InvalidRequestError` if it is over a limit."""
        limits = (
            (self.depth, MAX_DEPTH, "levels of nesting, references included", "flatten it"),
            (self.repeats, MAX_REPEATS, "counted repetitions inside one another", "lower the counts, or use * or +"),
            (self.literal, MAX_LITERAL, "characters in one text", "shorten it"),
            (self.parts, MAX_PARTS, "rules, properties and alternatives", "split it into several requests"),
            (self.characters, MAX_CHARACTERS, "characters", "send a shorter one"),
        )
        for found, most, what, advice in limits:
            if found > most:
                shown = "more than " if found == MAX_REPEATS + 1 else ""
                raise InvalidRequestError(
                    f"the required form has {shown}{min(found, most) if shown else found:,} {what}; "
                    f"{most:,} are allowed: {advice}",
                    param=param,
                )


def measure_regex(regex: str) -> Complexity:
    """The complexity of a regular expression; also of text that only looks like one, such as a wrong one."""
    inner, last, depth, parts = [1], 1, 1, 1  # the largest product in each open group, and that of the last atom
    position, end, in_class = 0, len(regex), 0
    while position < end:
        character = regex[position]
        if character == "\\":
            position, last = position + 2, 1
            continue
        parts += character in "([|*+?{"
        counted = _QUANTIFIER.match(regex, position) if character == "{" and not in_class else None
        if character == "[":
            in_class += 1
        elif character == "]":
            in_class, last = max(0, in_class - 1), 1
        elif in_class:
            pass
        elif character == "(":
            inner.append(1)
            depth, last = max(depth, len(inner)), 1
        elif character == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif counted is not None:
            low, _, high = counted.groups()
            last = min(last * max(1, int(low or 0), int(high or 0)), MAX_REPEATS + 1)
            inner[-1] = max(inner[-1], last)
            position = counted.end() - 1
        elif character not in "*+?":
            last = 1
        position += 1
    repeats = MAX_REPEATS + 1 if _HUGE_QUANTIFIER.search(regex) else max(inner)
    return Complexity(end, depth, parts, repeats)


def satisfiable(rules: Sequence[Sequence[Sequence[int]]]) -> list[bool]:
    """Which rules have a finite text. A rule is a list of conditions, all of which must hold; a condition is a list of
    rules, one of which must have a finite text. Linear in the size of `rules`.
    """
    waiting = [len(conditions) for conditions in rules]
    asking: list[list[tuple[int, int]]] = [[] for _ in rules]
    for rule, conditions in enumerate(rules):
        for condition, others in enumerate(conditions):
            for other in others:
                asking[other].append((rule, condition))
    met = [[False] * len(conditions) for conditions in rules]
    found = deque(rule for rule, conditions in enumerate(rules) if not conditions)
    while found:
        for rule, condition in asking[found.popleft()]:
            if not met[rule][condition]:
                met[rule][condition] = True
                waiting[rule] -= 1
                if not waiting[rule]:
                    found.append(rule)
    return [not left for left in waiting]
