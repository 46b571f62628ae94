"""The counts of an answer as the Responses API has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from agentspec.types import Delta, Usage


def responses_usage(usage: Usage) -> dict[str, Any]:
    """The `usage` object of a response. It has prediction counts only if the request carried a prediction.

    No tokens are said to be written to a cache: nobody is charged for that.
    """
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens or 0,
            **({} if accepted is None else predicted),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(slots=True)
class ReasoningCounter:
    """Counts the tokens of an answer's thoughts.

    Tokens that have no text yet, such as a mark that begins thoughts, belong to what is written next.
    """

    tokens: int = 0
    _waiting: int = 0

    def add(self, delta: Delta) -> None:
        self._waiting += len(delta.token_ids)
        if delta.extra.get("reasoning") or delta.extra.get("reasoning_content"):
            self.tokens += self._waiting
            self._waiting = 0
        elif delta.text or delta.extra:
            self._waiting = 0


async def count_reasoning(deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
    """Yield the deltas; a usage that does not tell the tokens of thoughts gets those that were counted."""
    counter = ReasoningCounter()
    async with aclosing(cast(Any, deltas)):
        async for delta in deltas:
            counter.add(delta)
            if delta.usage is not None and delta.usage.reasoning_tokens is None:
                most = min(counter.tokens, delta.usage.completion_tokens)
                delta = replace(delta, usage=replace(delta.usage, reasoning_tokens=most))
            yield delta
