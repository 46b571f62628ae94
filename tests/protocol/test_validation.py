from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import MAX_JSON_DEPTH, MAX_JSON_VALUES, check_json

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_that_utf_8_can_write_passes(value: Any) -> None:
    check_json(value, "x")
    assert json.loads(json.dumps(value).encode()) == value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: ["a\ud800"], "surrogate"),
        (lambda: {"\udfff": 1}, "surrogate"),
        (lambda: [{"a": float("inf")}], "64-bit"),
        (lambda: [float("nan")], "64-bit"),
        (lambda: [10**400], "64-bit"),
        (lambda: {1: 2}, "not a string"),
        (lambda: [b"x"], "Python bytes"),
        (lambda: [object()], "Python object"),
        (lambda: nested(MAX_JSON_DEPTH + 1), "nested more than"),
        (lambda: nested(100_000), "nested more than"),
        (lambda: CIRCLE, "nested more than"),
        (lambda: [0] * (MAX_JSON_VALUES + 1), "more than 100,000"),
    ],
)
def test_a_refusal_names_the_field(made: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        check_json(made(), "field")
    assert caught.value.param == "field" and caught.value.message.startswith("field ")


def test_values_at_the_bounds_pass() -> None:
    check_json(nested(MAX_JSON_DEPTH), "x")
    check_json([0] * MAX_JSON_VALUES, "x")
    check_json((1, "é", {"a": (None,)}), "x")
