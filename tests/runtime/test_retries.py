from __future__ import annotations

import pytest

from agentspec.errors import UpstreamStatusError
from agentspec.runtime.retries import delay_before


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
