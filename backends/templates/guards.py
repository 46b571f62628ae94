"""Checks before calls of methods and filters whose result can be far larger than what they are given."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence
from typing import Any, Final

from jinja2.utils import Namespace

from agentspec.backends.templates.budget import MAX_RENDERED, Budget, TemplateLimitError
from agentspec.backends.templates.costs import hashing, length, pieces, size, sizes

_WIDE = re.compile(r"\{[^{}]*\d{5}")  # a width or precision of five digits, in `format`
_WIDE_PERCENT = re.compile(r"%(?:\([^()]*+\))?+[-+ #0]*+[\d*]*?\.?\d{5}")  # the same after `%`
_NUMBER = re.compile(r"\d+")
_SLOW_ABOVE: Final = 200_000  # characters: filters whose time grows faster than their text
_MOST_PARTS: Final = 100_000
_PIECE: Final = 60  # bytes of a short text


def _require(holds: bool) -> None:
    if not holds:
        raise TemplateLimitError("the chat template makes texts or lists that are too large")


def _count(value: Any) -> None:
    """A width, a number of places, lines or parts."""
    _require(not isinstance(value, (int, float)) or abs(value) <= _MOST_PARTS)


def _count_all(values: Any) -> int:
    """All numbers in `values`, at any depth, since a format may pick any of them as a width. Returns their sum."""
    stack, total = [values], 0
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, Namespace):
            _require(False)
        else:
            _count(value)
            total += abs(int(value)) if isinstance(value, (int, float)) and value == value else 0
    return total


def widths(format: str) -> int:
    """The sum of the numbers in a format, any of which may be a width; those of five digits are refused where they are
    one.
    """
    return sum(int(number[:4]) for number in _NUMBER.findall(format))


def check_spec(budget: Budget, spec: str) -> None:
    """Before a value is formatted by `spec`, which may be made of values."""
    _require(re.search(r"\d{5}", spec) is None)
    budget.spend(widths(spec))


def check_format(budget: Budget, text: Any, values: Sequence[Any]) -> None:
    """Before `text.format(*values)`."""
    fields = text.replace("{{", "").replace("}}", "")
    _require(_WIDE.search(fields) is None)
    budget.spend(len(text) + text.count("{") * budget.weigh(values) + widths(fields))
    if has_nested_fields(text):
        _count_all(values)


def has_nested_fields(text: str) -> bool:
    """Whether widths in the format `text` may be among the values."""
    return re.search(r"\{[^}]*\{", text.replace("{{", "").replace("}}", "")) is not None


def check_percent(budget: Budget, text: Any, values: Any) -> None:
    """Before `text % values`."""
    if not isinstance(text, (str, bytes)):
        return
    shown = text if isinstance(text, str) else text.decode("latin-1")
    _require(_WIDE_PERCENT.search(shown.replace("%%", "")) is None)
    budget.spend(len(shown) + shown.count("%") * budget.weigh(values) + widths(shown))
    if "*" in shown:
        budget.spend(_count_all(values))


def check_replace(budget: Budget, text: Any, args: Sequence[Any]) -> None:
    """Before `text.replace(old, new)`."""
    kind = str if isinstance(text, str) else bytes
    if len(args) < 2 or not all(isinstance(one, kind) for one in (text, *args[:2])):
        return
    old, new = args[:2]
    times = text.count(old) if old else len(text) + 1
    budget.spend(len(text) + times * len(new))


def check_join(budget: Budget, separator: Any, values: Any) -> None:
    """Before `separator.join(values)`, whose values are already made. Those that are no texts are written as such."""
    count = length(values)
    if not count:
        return
    texts = isinstance(values, str) or all(isinstance(value, str) for value in values)
    budget.spend(count * budget.weigh(separator) + (budget.weigh(values) if texts else 0))
    if not texts:
        budget.spend_text(list(values) if isinstance(values, (bytes, bytearray)) else values)


def _width(budget: Budget, text: Any, args: Sequence[Any]) -> None:
    """Any number may be the width; beside a text to fill up with, it may be counted for each of its characters."""
    for arg in args:
        _count(arg)
    numbers = sum(abs(int(arg)) for arg in args if isinstance(arg, (int, float)))
    budget.spend(numbers * max([1, *(len(arg) for arg in args if isinstance(arg, (str, bytes)))]))


def _split(name: str) -> Callable[[Budget, Any, Sequence[Any]], None]:
    """Each piece is a text of its own."""

    def check(budget: Budget, text: Any, args: Sequence[Any]) -> None:
        if isinstance(text, (str, bytes)):
            budget.spend(_PIECE * (pieces(text, name, args) - 1) + 4 * len(text))

    return check


def _characters(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    """The elements of a text are texts of their own, but those of Latin-1 exist once."""
    if isinstance(value, str):
        budget.spend(len(value) * (8 if value.isascii() else 8 + _PIECE))


def _keys(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    """Elements are compared by copies in small letters; those without the attribute, by a default."""
    _characters(budget, value, args)
    budget.spend(size(budget, value) + length(value) * sizes(budget, [arg for arg in args if isinstance(arg, str)]))


def _written(budget: Budget, value: Any) -> str:
    """What a filter for texts makes of another value."""
    if isinstance(value, str):
        return value
    budget.spend_text(value)
    return str(value)


def _replace(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    check_replace(budget, _written(budget, value), [_written(budget, arg) for arg in args[:2]])


def _format(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    check_percent(budget, _written(budget, value), tuple(args))


def _tabs(budget: Budget, text: Any, args: Sequence[Any]) -> None:
    _width(budget, text, args)
    size = args[0] if args and isinstance(args[0], int) else 8
    budget.spend(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * max(0, size))


def _translate(budget: Budget, text: Any, args: Sequence[Any]) -> None:
    table = args[0] if args else {}
    if isinstance(table, Mapping):
        budget.spend(len(text) * max([1, *map(budget.weigh, table.values())]))


METHODS: Final[Mapping[str, Callable[[Budget, Any, Sequence[Any]], None]]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "to_bytes"), _width),
    **{name: _split(name) for name in ("split", "rsplit", "splitlines")},
    "expandtabs": _tabs,
    "translate": _translate,
    "replace": check_replace,
    "join": lambda budget, text, args: check_join(budget, text, args[0]) if args else None,
}


def _indent(budget: Budget, text: Any, args: Sequence[Any]) -> None:
    _width(budget, text, args)
    width = args[0] if args else 4
    size = width if isinstance(width, int) and not isinstance(width, bool) else budget.weigh(width)
    budget.spend(budget.weigh(text) + _written(budget, text).count("\n") * size)


def _slow(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    _require(budget.weigh(value) <= _SLOW_ABOVE)
    for arg in args:
        _count(arg)


def _to_json(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    """Options may be set by name or place: each adds a few characters to every element, and an indentation as many for
    each level around it.
    """
    options = [budget.weigh(arg) if isinstance(arg, (str, tuple, list)) else arg for arg in args]
    _require(all(not isinstance(option, int) or option <= 64 for option in options))
    extra = sum(option for option in options if isinstance(option, int) and not isinstance(option, bool))
    budget.spend(budget.weigh(value) * (2 + (extra * _depth(value) if extra else 0)))


def _depth(value: Any) -> int:
    """How deep lists and dicts in `value` are nested. Each is entered once, at its first place."""
    level, depth, entered = [value], 0, set[int]()
    while level:
        depth += 1
        inner: list[Any] = []
        for one in level:
            if isinstance(one, (list, tuple, Mapping)) and id(one) not in entered:
                entered.add(id(one))
                inner += one.values() if isinstance(one, Mapping) else one
        level = inner
    return depth


def _slice(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    _width(budget, value, args)
    _characters(budget, value, args)


def _sum(budget: Budget, items: Any, args: Sequence[Any]) -> None:
    """Adding texts or lists one by one copies what was added before each time."""
    if isinstance(items, (list, tuple)) and any(isinstance(item, (list, tuple, str)) for item in items):
        budget.work(len(items) * budget.weigh(items))
        budget.spend(len(items) * budget.weigh(items))


def _text(budget: Budget, value: Any, args: Sequence[Any]) -> None:
    budget.spend_text(value)


FILTERS: Final[Mapping[str, Callable[[Budget, Any, Sequence[Any]], None]]] = {
    **dict.fromkeys(("center", "batch", "round", "truncate", "filesizeformat"), _width),
    **dict.fromkeys(("wordwrap", "urlize", "striptags", "pprint", "xmlattr", "title", "wordcount"), _slow),
    **dict.fromkeys(("list", "reverse"), _characters),
    **dict.fromkeys(("sort", "unique", "groupby", "dictsort"), _keys),
    **dict.fromkeys(("string", "pprint"), _text),
    "slice": _slice,
    "sum": _sum,
    "indent": _indent,
    "replace": _replace,
    "format": _format,
    "join": lambda budget, values, args: check_join(budget, args[0] if args else "", values),
    "tojson": _to_json,
}


def check_multiply(budget: Budget, left: Any, right: Any) -> None:
    """Before `left * right`."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
            budget.spend((8 * len(sequence) if isinstance(sequence, (list, tuple)) else len(sequence)) * max(0, times))
            _require(budget.weigh(sequence) * max(0, times) <= MAX_RENDERED)
    if isinstance(left, int) and isinstance(right, int):
        _require(left.bit_length() + right.bit_length() <= 20_000)


def check_power(budget: Budget, left: Any, right: Any) -> None:
    """Before `left ** right`."""
    if isinstance(left, int) and isinstance(right, int):
        _require(left.bit_length() * max(0, right) <= 20_000 or abs(left) <= 1)


def check_add(budget: Budget, left: Any, right: Any) -> None:
    """Before `left + right`."""
    for value in (left, right):
        if isinstance(value, (str, bytes, list, tuple)):
            budget.spend(len(value) * (8 if isinstance(value, (list, tuple)) else 1))


def check_subtract(budget: Budget, left: Any, right: Any) -> None:
    """Before `left - right`, which may be keys of dicts."""
    if not isinstance(left, (int, float)):
        keys = list(left) if isinstance(left, (KeysView, ItemsView)) else []
        budget.work(hashing(budget, keys) + size(budget, right))


OPERATORS: Final[Mapping[str, Callable[[Budget, Any, Any], None]]] = {
    "-": check_subtract,
    "*": check_multiply,
    "**": check_power,
    "+": check_add,
    "%": check_percent,
}
