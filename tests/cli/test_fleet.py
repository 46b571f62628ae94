"""What `agentspec fleet` says where no gateway is."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.http.endpoint import Endpoint


def test_without_a_gateway_there_is_a_hint_where_to_look(program: Any) -> None:
    done = program("fleet", "status", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1 and "http://127.0.0.1:9" in done.output and "--url" in done.output


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]"])
def test_what_is_no_gateway_is_said_to_be_none(program: Any, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    async def fetch(*_: Any, **__: Any) -> bytes:
        return answer

    monkeypatch.setattr(Endpoint, "fetch", fetch)
    done = program("fleet", "status", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1 and "is no gateway" in done.output
