"""What a request will take, read from its body before it runs."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from agentspec.proxy.metering.demand import ANSWER_TOKENS, MEDIA_TOKENS, Demand, demand_of


def demand(path: str, **fields: Any) -> Demand:
    return demand_of(path, json.dumps(fields).encode(), fields)


@pytest.mark.parametrize(
    ("path", "fields", "answer", "bounded"),
    [
        (CHAT, {}, ANSWER_TOKENS, False),
        (CHAT, {"max_tokens": 10}, 10, True),
        (CHAT, {"max_tokens": 10, "max_completion_tokens": 20, "n": 3}, 60, True),
        (CHAT, {"max_tokens": "10", "n": "3"}, ANSWER_TOKENS, False),
        (COMPLETIONS, {"max_tokens": 10, "prompt": ["a", "b"], "best_of": 4}, 40, True),
        (COMPLETIONS, {"max_tokens": 10, "prompt": ["a", "b"], "n": 2}, 40, True),
        (RESPONSES, {"max_output_tokens": 7}, 7, True),
        (MESSAGES, {"max_tokens": 0}, 0, True),
        (EMBEDDINGS, {"input": "a"}, 0, True),
        ("/v1/rerank", {"query": "a"}, 0, True),
    ],
)
def test_the_answer_is_as_long_as_the_request_allows(
    path: str, fields: dict[str, Any], answer: int, bounded: bool
) -> None:
    found = demand(path, **fields)
    assert (found.answer, found.bounded) == (answer, bounded)
    assert found.prompt == -(-len(json.dumps(fields)) // 4)


def test_an_image_is_not_as_long_as_its_bytes() -> None:
    picture = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()
    text = {"type": "text", "text": "what is this? " * 20}
    content = [text, {"type": "image_url", "image_url": {"url": picture}}]
    found = demand(CHAT, messages=[{"role": "user", "content": content}], max_tokens=5).prompt
    assert MEDIA_TOKENS + 70 < found < MEDIA_TOKENS + 100
    said = demand(CHAT, messages=[{"role": "user", "content": "base64 " * 1000}]).prompt
    assert 1750 <= said < 1800


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from("max_tokens n best_of prompt messages input type base64".split()), json_values))
def test_no_body_breaks_the_estimate(fields: dict[str, Any]) -> None:
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES):
        found = demand(path, **fields)
        assert found.prompt >= 0 and found.answer >= 0


@given(st.integers(0, 100), st.integers(0, 500), st.booleans(), st.integers(1, 300))
def test_what_is_charged_lies_between_what_is_asked_and_what_is_guessed(
    prompt: int, answer: int, bounded: bool, limit: int
) -> None:
    one = Demand(prompt, answer, bounded)
    assert one.least <= one.within(limit) <= one.within(None) == prompt + answer
    assert one.within(limit) <= limit or one.within(limit) == one.least
