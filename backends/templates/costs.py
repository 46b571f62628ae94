"""How much work an operation of a template is at most, told from the sizes of what it is given, before it begins.

One unit is about a nanosecond: a character that is compared or copied. What is not listed here is taken to be
quadratic in everything it is given.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Final

from agentspec.backends.templates.budget import Budget

_Cost = Callable[[Budget, Any, Sequence[Any]], int]

ELEMENT: Final = 50  # to copy, hash or look at one element
_SHORT_SEARCH: Final = 3_000_000  # where CPython's search for a text may still be quadratic, its work is below this
_ENCODINGS: Final = frozenset({"utf-8", "utf8", "ascii", "latin-1", "latin1", "iso-8859-1", "utf-16", "utf-32"})
_SAFE_KEYS: Final = (str, bytes, bool, float, type(None))
_SAFE_INTEGER: Final = 1 << 60  # smaller ones are their own hash values
_MOST_KEYS: Final = 1 << 40  # elements, whose square would not fit into a unit's meaning anyway


def size(budget: Budget, value: Any) -> int:
    """Characters and elements in `value`, which cannot be more than its work in one pass."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return budget.weigh_given(value)
    return length(value) or 1


def length(value: Any) -> int:
    """The number of elements of a collection; 0 for other values."""
    if isinstance(value, (str, bytes, bytearray, Sequence, Mapping, set, frozenset, KeysView, ItemsView, ValuesView)):
        return len(value)
    return 0


def sizes(budget: Budget, values: Sequence[Any]) -> int:
    return sum(size(budget, value) for value in values)


def constant(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """The arguments alone, since a key is hashed and compared."""
    return sizes(budget, args)


def linear(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    return size(budget, value) + sizes(budget, args)


def shallow(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """One look at each element, but not into it."""
    return ELEMENT * length(value) + sizes(budget, args)


def sorting(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """A comparison goes through what it compares."""
    return round((size(budget, value) + 20 * ELEMENT * length(value)) * (1 + math.log2(1 + length(value))))


def product(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    return size(budget, value) * (1 + sizes(budget, args))


def quadratic(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    numbers = sum(min(abs(arg), 1 << 20) for arg in args if isinstance(arg, (int, float)) and arg == arg)
    return (size(budget, value) + sizes(budget, args) + round(numbers)) ** 2


def search(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """A search for the first argument from the left, or through a list."""
    if isinstance(value, (str, bytes, bytearray)):
        return length(value) + sizes(budget, args) + min(product(budget, value, args[:1]), _SHORT_SEARCH)
    return contains(budget, value, args[0] if args else None)


def stripping(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """Without characters to strip, blanks are stripped."""
    return product(budget, value, args) if args and args[0] is not None else size(budget, value)


def coding(budget: Budget, value: Any, args: Sequence[Any]) -> int:
    """Some encodings, and what they put in the place of a character, take far more than a pass."""
    usual = len(args) < 2 and all(str(arg).lower().replace("_", "-") in _ENCODINGS for arg in args)
    return size(budget, value) if usual else quadratic(budget, value, args)


def hashing(budget: Budget, value: Any, args: Sequence[Any] = ()) -> int:
    """Keys of a new dict or set: quadratic if they may be chosen so that their hash values are equal."""
    pairs = value if isinstance(value, (list, tuple)) else list(value) if isinstance(value, Mapping) else ()
    keys = (pair[0] if isinstance(pair, (list, tuple)) and pair else pair for pair in pairs)
    safe = all(isinstance(key, _SAFE_KEYS) or (isinstance(key, int) and abs(key) < _SAFE_INTEGER) for key in keys)
    count = min(length(value), _MOST_KEYS)
    return ELEMENT * count * (1 if safe else 1 + count) + size(budget, value)


def comparison(budget: Budget, left: Any, right: Any) -> int:
    """`left == right`, `left < right`: as far as the shorter goes."""
    if isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
        return min(len(left), len(right))
    if isinstance(left, (list, tuple, dict)) and isinstance(right, (list, tuple, dict)):
        return ELEMENT * min(size(budget, left), size(budget, right))
    return length(left) + length(right) if isinstance(left, (KeysView, ItemsView)) else 1


def contains(budget: Budget, value: Any, item: Any) -> int:
    """`item in value`."""
    if isinstance(value, (str, bytes, bytearray)):
        return search(budget, value, [item])
    if isinstance(value, (Mapping, set, frozenset, KeysView)):
        return size(budget, item)
    if isinstance(item, (list, tuple, dict)):
        return ELEMENT * length(value) + ELEMENT * min(size(budget, value), length(value) * size(budget, item))
    return length(value) * ELEMENT + min(size(budget, value), length(value) * size(budget, item))


def _named(cost: _Cost, names: str) -> dict[str, _Cost]:
    return dict.fromkeys(names.split(), cost)


METHODS: Final[Mapping[str, _Cost]] = {
    **_named(constant, "get items keys values bit_length bit_count as_integer_ratio conjugate is_integer isascii"),
    **_named(
        linear,
        "capitalize casefold center endswith expandtabs format format_map fromhex hex isalnum isalpha isdecimal "
        "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper ljust lower maketrans removeprefix "
        "removesuffix rjust splitlines startswith swapcase title translate upper zfill join copy from_bytes to_bytes",
    ),
    **_named(search, "count find index partition replace split"),
    **_named(product, "rfind rindex rpartition rsplit"),
    **_named(stripping, "strip lstrip rstrip"),
    **_named(coding, "encode decode"),
    **_named(lambda budget, value, args: hashing(budget, args[0] if args else ()), "fromkeys isdisjoint"),
}  # of texts, numbers and collections

FILTERS: Final[Mapping[str, _Cost]] = {
    **_named(
        constant,
        "abs attr count d default first float items last length map random reject rejectattr round safe select "
        "selectattr filesizeformat",
    ),
    **_named(
        linear,
        "capitalize center e escape forceescape format indent int join lower string title tojson truncate upper "
        "urlencode wordcount xmlattr",
    ),
    **_named(shallow, "batch list reverse slice sum"),
    **_named(sorting, "dictsort groupby max min sort"),
    **_named(search, "replace"),
    **_named(stripping, "trim"),
    "unique": lambda budget, value, args: max(
        sorting(budget, value, args),
        hashing(budget, value) if not any(args[1:]) else length(value) ** 2,  # keys of an attribute are not known
    ),
}

TESTS: Final[Mapping[str, _Cost]] = {
    **_named(
        constant,
        "boolean callable defined divisibleby escaped even false filter float integer iterable mapping none number odd "
        "sameas sequence string test true undefined",
    ),
    **_named(linear, "lower upper"),
    **_named(
        lambda budget, value, args: comparison(budget, value, args[0] if args else None),
        "!= < <= == > >= eq equalto ge greaterthan gt le lessthan lt ne",
    ),
    "in": lambda budget, value, args: contains(budget, args[0], value) if args else 1,
}


def method_cost(budget: Budget, owner: Any, name: str, args: Sequence[Any]) -> int:
    """The work of a method of a built-in value."""
    return METHODS.get(name, quadratic)(budget, owner, args)


def pieces(text: str | bytes, name: str, args: Sequence[Any]) -> int:
    """How many texts the method `name` may cut `text` into."""
    if name == "splitlines":
        ends = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    elif args and isinstance(args[0], (str, bytes)):
        return 1 + (text.count(args[0]) if args[0] and type(args[0]) is type(text) else 0)  # type: ignore[arg-type]
    else:
        ends = string.whitespace + "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\u2000\u2001\u2002"
        ends += "\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    if isinstance(text, bytes):
        return 1 + sum(text.count(end.encode("latin-1")) for end in ends if end < "\x80")
    return 1 + sum(map(text.count, ends))
