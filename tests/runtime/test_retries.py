from __future__ import annotations

import pytest

from agentspec.errors import NoServerError, OverloadedError, UpstreamError, UpstreamStatusError
from agentspec.runtime.runtime import delay_before


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "90"}, 30.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "\xb2"}, 1.0),
        ({}, 1.0),
    ],
)
def test_a_retry_waits_as_long_as_the_server_asks(headers: dict[str, str], seconds: float) -> None:
    assert delay_before(UpstreamStatusError("busy", status=503, body=b"", headers=headers), 1) == seconds


def test_a_retry_waits_as_long_as_the_engine_or_the_pool_asks() -> None:
    assert delay_before(OverloadedError("full", retry_after=3.0), 0) == 3.0
    assert delay_before(NoServerError("all are down", retry_after=8.0), 0) == 8.0
    assert [delay_before(UpstreamError("nobody answers"), attempt) for attempt in range(3)] == [0.5, 1.0, 2.0]
