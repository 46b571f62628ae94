from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.amounts import check_amounts
from agentspec.settings.server import ServerSettings


def check(fields: dict[str, Any], path: str = CHAT, **settings: Any) -> None:
    check_amounts(fields, path, ServerSettings(**settings))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"n": [1]}, "n"),
        ({"n": 1 << 80}, "n"),
        ({"best_of": 16384}, "best_of"),
        ({"max_tokens": 131073}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 1e9}, "max_completion_tokens"),
        ({"min_tokens": 10**9}, "min_tokens"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"n_predict": -1}, "n_predict"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"messages": [{}] * 2049}, "messages"),
        ({"tools": [{}] * 129}, "tools"),
        ({"functions": [{}] * 129}, "functions"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x", "x" * 1025]}, "stop"),
        ({"bad_words": ["x" * 100_000]}, "bad_words"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ],
)
def test_amounts_are_bounded(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(fields)
    assert caught.value.param == param


def test_prompts_and_inputs_are_counted() -> None:
    check({"prompt": ["x"] * 128}, COMPLETIONS)
    check({"prompt": list(range(100_000))}, COMPLETIONS)
    check({"input": ["x"] * 2048}, EMBEDDINGS)
    for fields, path in (
        ({"prompt": ["x"] * 129}, COMPLETIONS),
        ({"prompt": ["x"] * 65, "best_of": 2}, COMPLETIONS),
        ({"prompt": [[1]] * 129}, COMPLETIONS),
        ({"prompt": [1, *(["x"] * 129)]}, COMPLETIONS),
        ({"input": [[1]] * 2049}, EMBEDDINGS),
        ({"input": [{"text": "x"}] * 2049}, EMBEDDINGS),
    ):
        with pytest.raises(InvalidRequestError, match="more than"):
            check(fields, path)
