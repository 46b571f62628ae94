from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.protocol.usage import (
    read_speculation,
    read_usage,
    speculation_object,
    summed,
    usage_object,
)
from agentspec.types import (
    KnnSpeculation,
    LossyAcceptanceSpeculation,
    RetrievalSpeculation,
    Speculation,
    StepSpeculation,
    Usage,
)

COUNTS = st.integers(0, 2**53)


@given(st.builds(Usage, COUNTS, COUNTS, COUNTS))
@pytest.mark.parametrize("predicted", [None, 3])
def test_usage_is_read_as_it_was_written(predicted: int | None, usage: Usage) -> None:
    usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, predicted, predicted, predicted)
    written = json.loads(json.dumps(usage_object(usage)))
    assert read_usage(written) == usage and written["total_tokens"] == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "speculation",
    [
        Speculation(4, 2, 3, 0.5),
        StepSpeculation(4, 2, 3, -0.25, strategy="specreason", knobs={"threshold": 7}, kept_tokens={"base": 3}),
        RetrievalSpeculation(4, 2, 3, 0.5, strategy="ralmspec", knowledge="docs", hit_rate=None, strides=(3, 0)),
        KnnSpeculation(4, 2, 3, 0.5, wrong=1, queries=5, searches=2, strides=(4, 1), search_seconds=0.25),
    ],
    ids=lambda one: type(one).__name__,
)
def test_speculation_is_read_as_the_class_it_was(speculation: Speculation) -> None:
    written = json.loads(json.dumps(speculation_object(speculation)))
    assert read_speculation(written) == speculation
    assert read_speculation({**written, "of a later version": 1}) == speculation


def test_the_sum_of_several_answers_keeps_what_they_are() -> None:
    assert summed([]) is None
    lossy = LossyAcceptanceSpeculation(4, 2, 3, 0.5, knobs={"rule": "typical", "epsilon": 0.5}, substituted=1)
    assert summed([lossy, lossy]) == replace(
        lossy, drafted=8, accepted=4, steps=6, estimated_seconds_saved=1.0, substituted=2
    )
    assert summed([Speculation(1, 1, 1, 0.5), lossy]) == replace(
        lossy, drafted=5, accepted=3, steps=4, estimated_seconds_saved=1.0
    )
    read = RetrievalSpeculation(4, 2, 3, knowledge="docs", queries=2, hit_rate=0.5, strides=(3,), seconds={"read": 1.0})
    other = replace(read, hit_rate=1.0, strides=(1, 0), seconds={"read": 0.5, "wait": 1.0})
    assert summed([read, other]) == RetrievalSpeculation(
        8, 4, 6, knowledge="docs", queries=4, strides=(3, 1, 0), seconds={"read": 1.5, "wait": 1.0}
    )


def test_speculation_of_another_product_is_none() -> None:
    assert read_speculation({"drafted": 3, "accepted": 2}) is None


def test_counts_of_the_responses_api() -> None:
    details = {"input_tokens_details": {"cached_tokens": 1}}
    assert read_usage({"input_tokens": 2, "output_tokens": 3, **details}) == Usage(2, 3, 1)


def test_tokens_of_a_cache_count_once_wherever_they_are_told() -> None:
    cached = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 1}
    assert read_usage({"input_tokens": 2, "output_tokens": 3, **cached}) == Usage(7, 3, 4)
    # LiteLLM's chats of Anthropic's models: all tokens of the prompt, and Anthropic's counts beside them.
    assert read_usage({"prompt_tokens": 7, "completion_tokens": 3, **cached}) == Usage(7, 3, 4)
    assert read_usage({"prompt_tokens": None, "input_tokens": 2}) == Usage(2, 0)
