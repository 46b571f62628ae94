from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import (
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    REQUIRED,
    Body,
    Content,
    Count,
    Model,
    Number,
    Text,
    Texts,
    TokenIds,
    check_json,
    must,
    only,
)


class Inner(Model):
    name: Text = REQUIRED


class Sample(Body):
    flag: bool = False
    size: Count | None = None
    ratio: Number | None = None
    text: Text | None = None
    content: Content | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    table: dict[str, Any] | None = None
    inner: list[Inner] | None = None
    even: Annotated[int, must(lambda value: value % 2 == 0, " must be even")] | None = None
    beam: Annotated[Any, only(False, "off")] = None


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("flag", 1, "flag must be a boolean, not a number"),
        ("size", True, "size must be an integer, not a boolean"),
        ("size", 1.5, "size must be an integer, not a number"),
        ("size", -1, "size must lie between 0 and 2147483647"),
        ("size", 2**31, "size must lie between 0 and 2147483647"),
        ("ratio", "1", "ratio must be a number, not a string"),
        ("ratio", 10**400, "ratio is too large"),
        ("ratio", float("nan"), "ratio is too large"),
        ("text", ["a"], "text must be a string, not an array"),
        ("text", "\udfff", "text holds half a surrogate pair, which is not text"),
        ("content", {}, "content must be a string or an array of text parts, not an object"),
        ("stop", {}, "stop must be an array, not an object"),
        ("stop", ["a", 1], "stop must be a string, not a number"),
        ("stop", ["a"] * 65, "stop has 65 entries; 64 are allowed"),
        ("stop", ["a" * 1025], "stop must have at most 1024 characters"),
        ("stop_token_ids", [-1], "stop_token_ids must lie between 0 and 2147483647"),
        ("table", [], "table must be an object, not an array"),
        ("inner", [{"name": "a"}, 5], "inner[1] must be an object, not a number"),
        ("inner", [{}], "inner[0].name must be a string, not null"),
        ("even", 3, "even must be even"),
        ("beam", True, "beam = True is not supported by this model"),
        ("beam", 0, "beam = 0 is not supported by this model"),
        ("beam", [0], "beam = an array is not supported by this model"),
    ],
)
def test_a_refusal_is_a_sentence_that_begins_with_the_field(field: str, value: Any, refusal: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sample.parse({field: value})
    assert caught.value.message == refusal and refusal.startswith(f"{caught.value.param} ")


def test_null_is_absent_and_only_what_is_given_counts() -> None:
    sample = Sample.parse({"size": None, "ratio": 1, "stop": ["a"], "beam": "off"})
    assert sample.given("size", "ratio", "stop") == {"ratio": 1.0, "stop": ("a",)}


def test_unknown_fields_are_refused() -> None:
    Sample.parse({"size": 1, "user": "inert", "other": None})
    with pytest.raises(InvalidRequestError, match=r"caf\? is not known") as caught:
        Sample.parse({"café": 1})
    assert caught.value.param == "caf?"
    with pytest.raises(InvalidRequestError, match=r"by this model; did you mean 'size'\?$") as caught:
        Sample.parse({"sise": 1})
    assert caught.value.param == "sise"


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_json_writes_as_utf_8_passes(value: Any) -> None:
    check_json(value, "x")
    assert json.loads(json.dumps(value).encode()) == value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def require_refusal(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        check_json(value, "field")
    assert caught.value.param == "field" and caught.value.message.startswith("field ")


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["a\ud800"], "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ([{"a": float("inf")}], "64-bit"),
        ([float("nan")], "64-bit"),
        ([10**400], "64-bit"),
        ({1: 2}, "not a string"),
        ([b"x"], "Python bytes"),
        ([object()], "Python object"),
    ],
)
def test_what_is_refused_names_the_field(value: Any, says: str) -> None:
    require_refusal(value, says)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: nested(MAX_JSON_DEPTH + 1), "nested more than"),
        (lambda: nested(100_000), "nested more than"),
        (circle, "nested more than"),
        (lambda: [0] * (MAX_JSON_VALUES + 1), "more than 100,000"),
    ],
    ids=["too-deep", "far-too-deep", "circle", "too-many"],
)
def test_large_values_are_refused(made: Callable[[], Any], says: str) -> None:
    require_refusal(made(), says)


def test_values_at_the_bounds_pass() -> None:
    check_json(nested(MAX_JSON_DEPTH), "x")
    check_json([0] * MAX_JSON_VALUES, "x")
    check_json((1, "é", {"a": (None,)}), "x")
