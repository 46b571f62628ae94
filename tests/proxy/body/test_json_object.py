from __future__ import annotations

import json
import resource
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.proxy.body import json_object
from agentspec.proxy.body.json_object import (
    EXPLAINED_BYTES,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_VALUES,
    parse_object,
    set_values,
)

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
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
        (b'{"a": 1e400}', "number is too large"),
        (b'{"a": ' + b"9" * 400 + b"}", "number is too large"),
        (b'{"a": "\\ud83d"}', "half a surrogate pair"),
        (b'{"a": "\\ude00\\ud83d"}', "half a surrogate pair"),
        (b'{"\\udc00": 1}', "half a surrogate pair"),
        (b'{"a": [{"\\u0061": 1, "a": 2}]}', "'a' twice"),
        (b'{"a": "\x01"}', "not valid JSON"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "more than 128"),
        (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"0]}", "arrays and objects"),
        (b'{"a": [' + b"1," * MAX_VALUES + b"0]}", "values"),
        (b"{" + b'"a":1,' * MAX_MEMBERS + b'"b":1}', "members"),
        (b'{"' + b"x" * EXPLAINED_BYTES + b'": 1, "a": 1, "a": 2}', "names a key twice"),
        (b'{"' + b"x" * EXPLAINED_BYTES + b'": 1, "a": NaN}', r"not valid JSON: .* line 1, column"),
    ],
)
def test_what_is_not_one_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_object(body)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_objects_are_read_as_json_reads_them(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


def test_what_is_just_within_the_limits_is_read() -> None:
    parse_object(b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")
    assert len(parse_object(b'{"a": [' + b"[]," * (MAX_CONTAINERS - 3) + b"[]]}")["a"]) == MAX_CONTAINERS - 2
    assert len(parse_object(b'{"a": [' + b"1," * (MAX_VALUES - 3) + b"1]}")["a"]) == MAX_VALUES - 2
    assert len(parse_object(b"{" + b",".join(b'"%d":1' % key for key in range(40_000)) + b"}")) == 40_000


def test_numbers_are_exact() -> None:
    numbers = [
        2**64,
        -(2**63) - 1,
        10**100,
        2**64 - 1,
        -(2**63),
        10**18,
        0.1,
        1e308,
        5e-324,
        1e-400,
        -0.0,
        12345678901234567890.5,
    ]
    body = json.dumps({"a": numbers, "12345678901234567890123": 1}).encode()
    read = parse_object(body)["a"]
    assert read == numbers and list(map(type, read)) == list(map(type, numbers))


ESCAPES = st.text(st.sampled_from(list('\\"{}[]:,a\u00e9\n\U0001f600')), max_size=12)


@given(
    st.recursive(
        ESCAPES | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ESCAPES, inner, max_size=3)
    ),
    st.booleans(),
    st.integers(1, 9),
)
def test_strings_never_count_as_structure(value: Any, ascii: bool, step: int) -> None:
    """Wherever the text is cut into pieces."""
    body = json.dumps({"a": value}, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_object, "_STEP", step)
        assert parse_object(body) == {"a": value}


@pytest.mark.parametrize(
    "unit",
    [b"[", b"{", b'{"a":', b"[],", b'"",', b"1,", b'"', b'\\"', b"\\", b'"\\', b'"a":1,', b"1" * 19 + b" ", b"-",
     b"\xff", b"\x00", b'{"a":1},', b"\\ud800", b'"\\u', b":", b",", b"/", b"e1", b"0" * 19 + b"1"],
)  # fmt: skip
@pytest.mark.parametrize("head", [b"", b'{"a":', b'{"a":"', b'{"a":['])
def test_no_body_is_expensive(unit: bytes, head: bytes) -> None:
    """Half a million bytes; what is quadratic in any way takes minutes."""
    body = head + unit * (500_000 // len(unit))
    before = resource.getrusage(resource.RUSAGE_SELF)
    for end in (b"", b'"}', b"]}", b"0]}"):
        with suppress(InvalidRequestError):
            parse_object(body + end)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 30 and after.ru_maxrss - before.ru_maxrss < 50_000


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
