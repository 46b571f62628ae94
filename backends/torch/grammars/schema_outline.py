"""Walks a JSON schema as a compiler would, without calling itself: how deep it leads, and whether any value fits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from agentspec.backends.torch.grammars.complexity import MAX_REPEATS, Complexity, measure_regex, satisfiable
from agentspec.errors import InvalidRequestError

_SINGLE: Final = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains")
_LISTED: Final = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas")
_COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf", "enum")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def measure_schema(schema: Any, param: str) -> Complexity:
    """The complexity of a schema that `check_json` accepts. Raises `InvalidRequestError` if no finite value fits it."""
    walk = _Walk(schema)
    complexity = walk.run()
    if not satisfiable(walk.conditions)[0]:
        raise InvalidRequestError(
            "no finite value fits this schema: it requires itself, or a value that is never allowed", param=param
        )
    return complexity


class _Walk:
    """A depth-first walk from the root that enters every schema once, and definitions where they are referred to."""

    def __init__(self, root: Any) -> None:
        self.conditions: list[list[list[int]]] = []
        self._root = root
        self._numbers: dict[int, int] = {}

    def run(self) -> Complexity:
        """Walk; `opened` has what is left of each schema on the way down."""
        found, deepest, entered, references = Complexity(), 1, {self._number(self._root)}, 0
        opened = [iter(self._inside(self._root))]
        while opened:
            child = next(opened[-1], None)
            if child is None:
                opened.pop()
            elif self._number(child) not in entered:
                entered.add(self._number(child))
                opened.append(iter(self._inside(child)))
                deepest = max(deepest, len(opened))
                found += _own(child)
                references += isinstance(child, Mapping) and "$ref" in child
        found += _own(self._root)
        return found + Complexity(depth=deepest, levels=deepest * (1 + references))

    def _number(self, schema: Any) -> int:
        number = self._numbers.setdefault(id(schema), len(self._numbers))
        if number == len(self.conditions):
            self.conditions.append([])
        return number

    def _inside(self, schema: Any) -> list[Any]:
        """The schemas inside `schema`, in order; notes which of them must have a finite value."""
        conditions = self.conditions[self._number(schema)]
        if schema is False:
            conditions.append([])
        if not isinstance(schema, Mapping):
            return []
        inside: list[Any] = []
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                inside += self._resolved(value)
            elif key in _NAMED and isinstance(value, Mapping):
                inside += value.values()
            elif key in _LISTED and isinstance(value, list):
                inside += value
            elif key in _SINGLE and isinstance(value, (Mapping, bool)):
                inside.append(value)
        conditions += [[self._number(option) for option in options] for options in self._required(schema)]
        return inside

    def _required(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Lists of schemas of which one must have a finite value so that `schema` has one."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._resolved(reference) or [True]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                yield schema[key]
        if isinstance(schema.get("allOf"), list):
            yield from ([one] for one in schema["allOf"])
        kind, properties = schema.get("type"), schema.get("properties")
        if kind == "object" and isinstance(properties, Mapping) and isinstance(schema.get("required"), list):
            yield from (
                [properties[name]] for name in schema["required"] if isinstance(name, str) and name in properties
            )
        if kind == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            yield from ([one] for one in first[:least])
            if least > len(first) and "items" in schema:
                yield [schema["items"]]

    def _resolved(self, reference: str) -> list[Any]:
        """The schema that a JSON pointer into the root names; nothing if there is none, which the compiler refuses."""
        found = self._root
        for part in reference.removeprefix("#").strip("/").split("/") if reference.strip("#/") else ():
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
                found = found[int(part)]
            else:
                return []
        return [found]


def _refers_by_name(schema: Mapping[str, Any]) -> bool:
    """Whether it has names for references that are not followed here, so that its size is not known."""
    reference = schema.get("$ref", "#")
    by_name = not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/"))
    return by_name or any(key in schema for key in ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$id"))


def _own(schema: Any) -> Complexity:
    """What a schema adds by itself, without those inside it."""
    if not isinstance(schema, Mapping):
        return Complexity(parts=1)
    counts = [schema[key] for key in _COUNTS if isinstance(schema.get(key), int)]
    lists = [schema[key] for key in ("enum", "required", "type") if isinstance(schema.get(key), list)]
    all_of = schema["allOf"] if isinstance(schema.get("allOf"), list) else ()
    combined = len(all_of) > 1 or sum(key in schema for key in _COMBINING) > 1 or _refers_by_name(schema)
    repeats = MAX_REPEATS if combined else min(MAX_REPEATS, max([1, *counts]))  # alternatives in each other multiply
    enum = schema["enum"] if isinstance(schema.get("enum"), list) else ()
    literals = [
        *enum,
        schema.get("const"),
        *(schema["properties"] if isinstance(schema.get("properties"), Mapping) else ()),
    ]
    longest = max((len(text) for text in literals if isinstance(text, str)), default=0)
    own = Complexity(0, 1, 1 + sum(map(len, lists)), repeats, literal=longest)
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, Mapping) else ())):
        if isinstance(pattern, str):
            own += measure_regex(pattern)
    return own
