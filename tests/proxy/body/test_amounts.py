from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.amounts import check_amounts
from agentspec.settings.server import ServerSettings


def check(fields: dict[str, Any], path: str = CHAT, **settings: Any) -> None:
    check_amounts(fields, path, ServerSettings(**settings))


REFUSED: dict[str, list[Any]] = {
    "n": [129, 0, "2", 2.0, True, [1], 1 << 80],
    "best_of": [16384],
    "max_tokens": [131073, -1],
    "max_completion_tokens": [1e9],
    "min_tokens": [10**9],
    "max_new_tokens": [10**9],
    "n_predict": [-1],
    "top_logprobs": [21],
    "prompt_logprobs": [-1],
    "logprobs": [1000],
    "messages": [[{}] * 2049],
    "tools": [[{}] * 129],
    "functions": [[{}] * 129],
    "stop": [["x"] * 65, "x" * 1025, ["x", "x" * 1025]],
    "bad_words": [["x"] * 65, ["x" * 100_000]],
    "stop_token_ids": [[1] * 65],
    "logit_bias": [{str(token): 1 for token in range(1025)}],
}


@pytest.mark.parametrize("param", REFUSED)
def test_amounts_are_bounded(param: str) -> None:
    for value in REFUSED[param]:
        with pytest.raises(InvalidRequestError) as caught:
            check({param: value})
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
