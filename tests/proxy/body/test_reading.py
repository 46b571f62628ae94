from __future__ import annotations

import json
import resource
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message

from agentspec.errors import AgentSpecError, InvalidRequestError
from agentspec.proxy.body.reading import MAX_DEPTH, MOST, parse_object, read_body, set_values


def receiver(*messages: Message) -> Any:
    pending = list(messages)

    async def receive() -> Message:
        return pending.pop(0)

    return receive


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


JSON_TYPE, PLAIN = ("content-type", "application/json"), ("content-encoding", "identity")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        *(([JSON_TYPE, ("content-length", length)], None) for length in ("2", "2 ", "\t2")),
        ([("content-type", "Application/JSON; charset=utf-8")], None),
        *(([JSON_TYPE, ("content-length", length)], "larger") for length in ("4", "9" * 26, "-1", "x", "")),
        *(([("content-type", kind)], "Content-Type") for kind in ("text/plain", "multipart/form-data")),
        ([], "Content-Type"),
        ([JSON_TYPE, ("content-encoding", "gzip")], "Content-Encoding"),
        *(([("content-type", f"application/json; charset={name}")], "UTF-8")
          for name in ("utf-7", "utf-16", "utf-8; charset=utf-16", "'utf-8'")),
        *(([JSON_TYPE, PLAIN, second], "Content-")
          for second in (("content-type", "text/plain"), JSON_TYPE, ("content-encoding", "gzip"))),
    ],
)  # fmt: skip
async def test_a_head_declares_plain_json_of_a_length_within_the_limit(
    headers: list[tuple[str, str]], refused: str | None
) -> None:
    given = Headers(raw=[(name.encode(), value.encode()) for name, value in headers])
    if refused is None:
        assert await read_body(given, receiver(part(b"{}")), 3) == b"{}"
        return
    with pytest.raises(AgentSpecError, match=refused):
        await read_body(given, receiver(part(b"{}")), 3)


MAX_CONTAINERS, MAX_MEMBERS, MAX_COMMAS = MOST.values()

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
        (b'{"a" :1, "a" :2, "b" :3}', "'a' twice"),
        (b'{"a":1, "a":2, "b" :3}', "'a' twice"),
        (b'{"a":1, "a":2, "b":"\\u0022:"}', "'a' twice"),
        (b'{"a":1, "a":2, "b":"\\"\\u003A"}', "'a' twice"),
        (b"[]", "object, not list"),
        (b'"text"', "object, not str"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"model": "a", "model": "b"}', "'model' twice"),
        (b'{"a": {"x": 1, "x": 1}}', "'x' twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
        (b'{"a": 1e400}', "not valid JSON"),
        (b'{"a": ' + b"9" * 400 + b"}", "not valid JSON"),
        (b'{"a": "\\ud83d"}', "not valid JSON"),
        (b'{"a": "\\ude00\\ud83d"}', "not valid JSON"),
        (b'{"\\udc00": 1}', "not valid JSON"),
        (b'{"a": [{"\\u0061": 1, "a": 2}]}', "'a' twice"),
        (b'{"a": "\x01"}', "not valid JSON"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "more than 128"),
        (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"0]}", "more than 262,144 times"),
        (b'{"a": [' + b"1," * (MAX_COMMAS + 1) + b"0]}", "more than 1,310,720 times"),
        (b"{" + b'"a":1,' * MAX_MEMBERS + b'"b":1}', "more than 524,288 times"),
    ],
)
def test_anything_but_one_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_object(body)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_objects_are_read_as_json_reads_them(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


def test_bodies_at_the_limits_are_read() -> None:
    parse_object(b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")
    assert len(parse_object(b'{"a": [' + b"[]," * (MAX_CONTAINERS - 3) + b"[]]}")["a"]) == MAX_CONTAINERS - 2
    assert len(parse_object(b'{"a": [' + b"1," * (MAX_COMMAS - 3) + b"1]}")["a"]) == MAX_COMMAS - 2
    assert len(parse_object(b"{" + b",".join(b'"%d":1' % key for key in range(40_000)) + b"}")) == 40_000


def test_numbers_are_exact() -> None:
    whole = [2**64, -(2**63) - 1, 10**100, 2**64 - 1, -(2**63), 10**18]
    numbers = [*whole, 0.1, 1e308, 5e-324, 1e-400, -0.0, 12345678901234567890.5]
    body = json.dumps({"a": numbers, "12345678901234567890123": 1}).encode()
    read = parse_object(body)["a"]
    assert read == numbers and list(map(type, read)) == list(map(type, numbers))


ESCAPES = st.text(st.sampled_from(list('\\"{}[]:, a\u00e9\n\U0001f600')), max_size=12)
NESTED = st.recursive(
    ESCAPES | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ESCAPES, inner, max_size=3)
)


@given(NESTED, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : "), (",", "\t:")]))
def test_a_key_that_comes_twice_is_found_and_no_other(value: Any, ascii: bool, separators: tuple[str, str]) -> None:
    """However it is written, and whatever the strings say."""
    comma, colon = separators
    text = json.dumps({"a": value, "b": [value]}, ensure_ascii=ascii, separators=separators)
    assert parse_object(text.encode()) == {"a": value, "b": [value]}
    for twice in (f'{{"a"{colon}1{comma}{text[1:]}', f'{text[:-1]}{comma}"\\u0061"{colon}{{"x"{colon}1}}}}'):
        with pytest.raises(InvalidRequestError, match="'a' twice"):
            parse_object(twice.encode())
    inside = f'{{"c"{colon}[{{"d"{colon}1{comma}"d"{colon}1}}]{comma}{text[1:]}'
    with pytest.raises(InvalidRequestError, match="'d' twice"):
        parse_object(inside.encode())


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


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4), st.text(st.characters(exclude_categories=["Cs"])))
def test_only_the_model_is_replaced(others: dict[str, Any], name: str) -> None:
    body = json.dumps({**others, "model": "old"}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        fields = parse_object(body)
    except InvalidRequestError:  # half a surrogate pair
        return
    assert parse_object(set_values(fields, {"model": name})) == {**others, "model": name}


def test_a_body_is_written_again_with_the_new_fields_first() -> None:
    body = b' {\n"x":1.10, "mod\\u0065l" :"a","z":"\\u00e9\\/", "n":100000000000000000000}'
    assert set_values(parse_object(body), {"k": 1, "model": "b"}) == (
        '{"k":1,"x":1.1,"model":"b","z":"\u00e9/","n":100000000000000000000}'.encode()
    )
