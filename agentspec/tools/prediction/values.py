"""What arguments look like: canonical JSON, the shape of an identifier, and the spans of a text that have a shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_TEXT = 20_000  # characters of one text that are searched for spans
MOST_LEAVES = 2000  # values of one result
_LONGEST = 120  # characters of a value that may be an argument's source; of a list or an object in JSON
_LONGEST_WORD = 20  # characters of a word before a value

_TOKEN = re.compile(r"[#@]?\w[\w@.+:/#-]*\w|[#@]?\w")
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS)
_DATES = (
    re.compile(rf"\b(?P<month>{_MONTH})\.?\s+(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b(?:,?\s+(?P<year>\d{{4}}))?", re.I),
    re.compile(
        rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<month>{_MONTH})\b(?:,?\s+(?P<year>\d{{4}}))?", re.I
    ),
)
_YEAR = re.compile(r"\b((?:19|20)\d\d)-\d\d-\d\d\b")


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


def spans(text: str) -> Iterator[tuple[str, str]]:
    """(word before, span) for every word, identifier and date of a text, in its order.

    The word is kept with what is learned, so an identifier, a number or a long word is "" there: it may be private.
    """
    before = ""
    for match in _TOKEN.finditer(text[:MOST_TEXT]):
        yield before, match[0]
        before = match[0].lower() if match[0].isalpha() and len(match[0]) <= _LONGEST_WORD else ""


def dates(text: str, year: str | None) -> Iterator[str]:
    """Dates written in words, as YYYY-MM-DD; those without a year are of `year`."""
    found = []
    for pattern in _DATES:
        for match in pattern.finditer(text[:MOST_TEXT]):
            month = next(at for at, name in enumerate(_MONTHS, 1) if name.startswith(match["month"].casefold()[:3]))
            said = match["year"] or year
            if said and 1 <= int(match["day"]) <= 31:
                found.append((match.start(), f"{said}-{month:02}-{int(match['day']):02}"))
    yield from dict.fromkeys(date for _, date in sorted(found))


def last_year(text: str) -> str | None:
    """The year of the last ISO date in a text; None if there is none."""
    years = _YEAR.findall(text[:MOST_TEXT])
    return years[-1] if years else None


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
