from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.json_scan import WINDOW, member_span, top_level_value

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


@pytest.mark.parametrize("place", [0, 1])
def test_the_ends_of_a_large_answer_are_enough(place: int) -> None:
    usage = b'"usage": {"prompt_tokens": 7, "completion_tokens": 1}'
    data = b'"data": [' + b'{"embedding": [0.1, -0.25e-3]},' * 300_000 + b"{}]"
    body = b"{" + b", ".join([usage, data] if place else [data, usage]) + b"}"
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert top_level_value(body, "usage") == {"prompt_tokens": 7, "completion_tokens": 1}
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1 and after.ru_maxrss - before.ru_maxrss < 10_000
    in_the_middle = b"{" + b", ".join([data, usage, data.replace(b"data", b"more")]) + b"}"
    assert top_level_value(in_the_middle, "usage") is None


@pytest.mark.parametrize(
    "unit", [b'"usage"', b'{"usage":', b'["usage",', b'\\"usage"', b'"usage":1,', b"[", b'"', b"{"]
)
def test_hostile_answers_cost_little(unit: bytes) -> None:
    body = b"{" + unit * (20 * WINDOW // len(unit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    top_level_value(body, "usage")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 1
