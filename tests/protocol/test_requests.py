from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import parse_chat, with_extra
from agentspec.protocol.wire import encode
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def ask(**fields: Any) -> GenerateRequest:
    return parse_chat({**BODY, **fields}, max_messages=10)[0]


def test_the_local_engine_acts_on_the_extra_fields_of_a_client_in_this_process() -> None:
    request = GenerateRequest("m", messages=[{"role": "user", "content": "x"}], priority=4)
    extra = {"n": 2, "tools": [TOOL], "guided_regex": "a", "return_token_ids": True, "user": "u", "top_k": None}
    changed = with_extra(replace(request, extra=extra))
    assert changed == replace(
        request,
        sampling=SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="a")),
        tools=(TOOL,),
        return_prompt=True,
    )
    assert with_extra(request) is request
    for refused in ({"top_k": "3"}, {"messages": [{}]}, {"priority": "high"}):
        with pytest.raises(InvalidRequestError):
            with_extra(replace(request, extra=refused))


NAMES = [
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "logit_bias",
    "logprobs", "top_logprobs", "stream", "stream_options", "prediction", "messages", "model", "n", "tools",
    "stop_token_ids", "continue_final_message", "user", "other", "tool_choice", "response_format", "structured_outputs",
    "guided_json", "bad_words", "chat_template_kwargs",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), JSON, max_size=4))
def test_any_body_is_a_request_or_refused(fields: dict[str, Any]) -> None:
    try:
        assert isinstance(ask(**fields), GenerateRequest)
    except InvalidRequestError as error:
        encode(error.body())


# Completions --------------------------------------------------------------------------------------------------------
