"""Bounds of the JSON values inside a request's fields: schemas, descriptions of tools, template arguments; reads what a
model wrote.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import NOT_TEXT, is_text

MAX_JSON_DEPTH = 100  # levels of objects and arrays: whatever writes or compiles a value calls itself for each
MAX_JSON_VALUES = 100_000


def check_json(value: Any, name: str, *, param: str | None = None) -> None:
    """Raise `InvalidRequestError` unless `value`, of the field `name`, is JSON that every later reader can take.

    Refuses nesting beyond `MAX_JSON_DEPTH` levels, more than `MAX_JSON_VALUES` keys and values, strings that are not
    text, numbers beyond 64-bit floats, and Python objects that JSON cannot write. Never recursive: goes level by level.
    `param` is the error's, the name itself if not given.
    """
    param = param or name
    level, count = [value], 0
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            kind = type(one)
            if kind is str:
                fault = None if one.isascii() or is_text(one) else NOT_TEXT.strip()
            elif kind is dict or isinstance(one, Mapping):
                inner += one.keys()
                inner += one.values()
                fault = None if all(isinstance(key, str) for key in one) else "has a key that is not a string"
            elif isinstance(one, (list, tuple)):
                inner += one
                fault = None
            else:
                fault = _fault(one)
            if fault is not None:
                raise InvalidRequestError(f"{name} {fault}", param=param)
            if count + len(inner) > MAX_JSON_VALUES:
                raise InvalidRequestError(f"{name} has more than {MAX_JSON_VALUES:,} keys and values", param=param)
        if not inner:
            return
        level, count = inner, count + len(inner)
    raise InvalidRequestError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", param=param)


def read_json(text: str) -> Any:
    """The value of a JSON text that a model wrote, with line breaks inside of strings, too.

    Raises `RecursionError`, and `ValueError` also for what JSON cannot write again: Python reads NaN, and numbers
    beyond a double's range as infinity.
    """
    value = json.loads(text, strict=False)
    json.dumps(value, allow_nan=False)
    return value


def _fault(value: Any) -> str | None:
    """What is wrong with a value that is neither a plain string nor a container."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return None if is_text(value) else NOT_TEXT.strip()
    if isinstance(value, (int, float)):
        large = not math.isfinite(value) if isinstance(value, float) else abs(value) > sys.float_info.max
        return "holds a number beyond the range of 64-bit floats" if large else None
    return f"holds a Python {type(value).__name__}, which is not JSON"
