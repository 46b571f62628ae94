"""Sends a chat with a prediction of ours, and once more without it where the upstream refuses it.

An upstream that answers 400 or 422 has not begun to run the request, so that nothing runs twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from agentspec.errors import UpstreamStatusError
from agentspec.proxy.forwarding.auto_prediction import HEADER, PredictedAnswer
from agentspec.proxy.forwarding.passthrough import Again
from agentspec.proxy.request_record import RequestRecord
from agentspec.types import Delta


def without_prediction(predicted: PredictedAnswer, plain: bytes, record: RequestRecord) -> Again:
    """Sends `plain`, the body without the prediction, where that is refused."""

    def again(status: int, content: bytes) -> bytes | None:
        if not predicted.withdraw(status, content):
            return None
        record.prediction, record.prediction_refused = "", True
        record.response_headers = {name: one for name, one in record.response_headers.items() if name != HEADER}
        return plain

    return again


async def predicted_deltas(
    predicted: PredictedAnswer,
    ask: Callable[[bytes], AsyncGenerator[Delta]],
    body: bytes,
    again: Again,
) -> AsyncGenerator[Delta]:
    """The answer to the chat in `body`, or to what `again` says. Raises as `ask` does."""
    status = 200
    try:
        while body:
            try:
                async with aclosing(ask(body)) as deltas:
                    async for delta in deltas:
                        predicted.follow(delta)
                        yield delta
                return
            except UpstreamStatusError as error:
                other = again(error.status, error.upstream_body)
                if other is None:
                    status = error.status
                    raise
                body = other
    finally:  # a client that has its answer may have left
        await predicted.finish(status)
