from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol import json_scan
from agentspec.protocol.json_scan import WINDOW, array_items, member_span, top_level_value

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.just("usage"), inner, max_size=3)
    ),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(max_size=6) | st.sampled_from(["usage", '"usage', "usage\\"]), JSON, max_size=4)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]))
def test_every_member_is_found(value: dict[str, Any], ascii: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii, indent=indent).encode("utf-8", "replace" if not ascii else "strict")
    parsed = json.loads(body)
    for name, one in parsed.items():
        start, end = member_span(body, name)
        assert json.loads(body[start:end]) == one
        assert top_level_value(body, name) == one
    with pytest.raises(KeyError):
        member_span(body, "not there")
    assert top_level_value(body, "not there") is None
    if "usage" not in parsed:
        assert top_level_value(body, "usage") is None


def test_only_the_top_level_counts() -> None:
    for text in (
        '{"a": {"usage": 1}}',
        '{"a": [{"usage": 1}]}',
        '{"a": "\\"usage\\": 1}"}',
        '{"x\\"usage": 1}',
        '[{"usage": 1}]',
        '{"a": "usage"}',
        '{"usage": ',
        "",
        "usage",
        '"usage"',
        '{"usage": 1} trailing',
        '{"usage"',
    ):
        assert top_level_value(text.encode(), "usage") in (None, 1 if text.endswith("trailing") else None), text


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_small_member_of_a_large_answer_is_found_wherever_it_is(place: int) -> None:
    usage = b'"usage": {"prompt_tokens": 7, "completion_tokens": 1}'
    vector = b'{"embedding": [0.1, -0.25e-3], "usage": {"prompt_tokens": 8}, "text": "\\\\\\" \\"usage\\": {["},'
    parts = [b'"data": [' + vector * 10_000 + b"{}]", b'"more": [' + vector * 10_000 + b'"usage"]']
    parts.insert(place, usage)
    body = b"{" + b", ".join(parts) + b"}"
    assert json.loads(body)["usage"]["prompt_tokens"] == 7
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert top_level_value(body, "usage") == {"prompt_tokens": 7, "completion_tokens": 1}
    assert top_level_value(body, "speculation") is None
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 30  # a second of it at most; quadratic work takes hours
    assert after.ru_maxrss - before.ru_maxrss < 10_000


@given(OBJECTS, st.integers(1, 9))
def test_steps_of_any_size_find_the_same(value: dict[str, Any], step: int) -> None:
    body = json.dumps(value | {"usage": {"a": 1}, "z": ["]", '"', "\\" * 3]}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "STEP", step)
        assert json_scan._anywhere(body, "usage") == {"a": 1}


def test_the_items_of_an_array() -> None:
    items: list[Any] = [1, "a,]b", {"x": [1, {"y": "}"}]}, [], "\\", None, -0.5]
    for text in (json.dumps({"data": items}), json.dumps({"data": items, "b": [2]}, indent=1)):
        span = member_span(text.encode(), "data")
        assert [json.loads(item) for item in array_items(text.encode(), *span)] == items
    assert list(array_items(b"[]", 0, 2)) == list(array_items(b"[", 0, 1)) == []
    assert list(array_items(b'[1, {"a": 2', 0, 11)) == [b"1"]


@pytest.mark.parametrize(
    "unit", [b'"usage"', b'{"usage":', b'["usage",', b'\\"usage"', b'"usage":1,', b"[", b'"', b"{"]
)
def test_hostile_answers_cost_little(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is looked at in a bounded number of places. What took quadratic time would not end before the timeout."""
    advance, looked = json_scan._Nesting.advance, [0]

    def counted(nesting: Any, place: int) -> None:
        looked[0] += 1
        advance(nesting, place)

    monkeypatch.setattr(json_scan, "_MOST_PLACES", 100)
    monkeypatch.setattr(json_scan._Nesting, "advance", counted)
    top_level_value(b"{" + unit * (8 * WINDOW // len(unit)), "usage")
    assert looked[0] <= 100
