from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.json_object import parse_object, set_values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "line 1, column"),
        (b"[]", "object, not list"),
        (b'"text"', "object, not str"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"model": "a", "model": "b"}', "'model' twice"),
        (b'{"a": {"x": 1, "x": 1}}', "'x' twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
    ],
)
def test_what_is_not_one_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_object(body)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_objects_are_read_as_json_reads_them(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@given(st.binary(max_size=64))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    with suppress(InvalidRequestError):
        assert isinstance(parse_object(body), dict)


@given(
    st.dictionaries(st.text(max_size=6).filter(lambda name: name != "model"), JSON, max_size=4),
    st.integers(0, 4),
    st.sampled_from([None, 2]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
def test_only_the_model_is_replaced(others: dict[str, Any], position: int, indent: int | None, name: str) -> None:
    items = list(others.items())
    items.insert(position, ("model", 'old " } model'))
    body = json.dumps(dict(items), indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    renamed = set_values(body, {"model": ""}, {"model": name})
    assert parse_object(renamed) == {**dict(items), "model": name}
    old, new = json.dumps('old " } model').encode(), json.dumps(name).encode()
    assert (
        renamed == body.replace(b'"model": ' + old, b'"model": ' + new, 1) or b'"model"' in json.dumps(others).encode()
    )


def test_spelling_of_numbers_and_escapes_is_kept() -> None:
    body = b' {\n"x":1.10,"y":1e400 , "mod\\u0065l" :"a","z":"\\u00e9\\/", "n":100000000000000000000}'
    assert set_values(body, {"model": "a"}, {"model": "b"}) == body.replace(b'"a"', b'"b"')


def test_a_key_that_is_missing_is_put_first() -> None:
    assert set_values(b" { }", {}, {"k": {"\u00e9": 1}}) == b' { "k": {"\\u00e9": 1}}'
    assert set_values(b'{\n "x":1.10}', {"x": 1.1}, {"k": None}) == b'{\n "k": null, "x":1.10}'
