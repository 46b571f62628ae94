"""What arguments look like: canonical JSON, the shape of an identifier, and the spans of a text that have a shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_TEXT = 20_000  # characters of one text that are searched for spans
MOST_LEAVES = 2000  # values of one result
_LONGEST = 120  # characters of a value that may be an argument's source; of a list or an object in JSON

_TOKEN = re.compile(r"[#@]?\w[\w@.+:/#-]*\w|[#@]?\w")


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces. Raises `ValueError` and `TypeError` for what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_json(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        canonical(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def shape(text: str) -> str:
    """The pattern of an identifier: digits with their number, capitals with theirs, words without.

    `#W1234567` is `#A1d7`, `mia_li_3668` is `a_a_d4`, `35V5SM` is `X6`.
    """
    if len(text) >= 3 and text.isascii() and text.isalnum() and text.upper() == text and not text.isdigit():
        return f"X{len(text)}"
    parts = []
    for run in re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+|.", text):
        if run.isdigit():
            parts.append(f"d{len(run)}")
        elif run.isalpha():
            parts.append("a" if run.islower() else f"A{len(run)}" if run.isupper() else "Aa")
        else:
            parts.append(run)
    return "".join(parts)


def spans(text: str) -> list[str]:
    """Every word, identifier and date of a text, in its order."""
    return _TOKEN.findall(text[:MOST_TEXT])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, scalar) of a JSON value in its order; list positions and keys with digits in them are `*` in the path."""
    waiting: list[tuple[str, Any]] = [(path, value)]
    given = 0
    while waiting and given < MOST_LEAVES:
        at, one = waiting.pop()
        if isinstance(one, dict):
            inside = []
            for key, item in one.items():
                if any(letter.isdigit() for letter in key):
                    inside.append((f"{at}.*key", key))
                    inside.append((f"{at}.*", item))
                else:
                    inside.append((f"{at}.{key}", item))
            waiting.extend(reversed(inside))
        elif isinstance(one, list):
            waiting.extend((f"{at}[]", item) for item in reversed(one))
        elif usable(one):
            given += 1
            yield at, one


def usable(value: Any) -> bool:
    """Whether a value may be an argument's: not empty, not long, and nothing that JSON cannot hold, such as NaN."""
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST
    return value is not None and is_json(value) and len(canonical(value)) <= _LONGEST
