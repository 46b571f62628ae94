from __future__ import annotations

from typing import Any

import pytest

from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.workers.scrapes import Scrapes
from agentspec.settings.server import ServerSettings

pytestmark = pytest.mark.anyio


class Process:
    """A `Child` that notes what it is sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        self.sent.append(message)


def scrapes() -> Scrapes:
    return Scrapes("1", ConcurrencyLimiter(ServerSettings()), Connections(ServerSettings(), 10))


async def test_an_answer_comes_once_all_have_reported() -> None:
    found, asker, other = scrapes(), Process("1"), Process("2")
    found.begin(asker, 7, [asker, other])  # type: ignore[arg-type, list-item]
    [(name, key)] = other.sent
    assert name == "collect" and asker.sent == []
    found.reported(other, "[]", key)  # type: ignore[arg-type]
    [(name, number, dumps)] = asker.sent
    assert (name, number, dumps[-1]) == ("scraped", 7, "[]")


async def test_a_process_that_takes_the_place_of_another_gets_no_answer_of_its() -> None:
    """Both ask for the first time, under the same number."""
    found, asker, other = scrapes(), Process("1"), Process("2")
    found.begin(asker, 1, [asker, other])  # type: ignore[arg-type, list-item]
    found.ended(asker)  # type: ignore[arg-type]
    found.begin(asker, 1, [asker, other])  # type: ignore[arg-type, list-item]
    (_, old), (_, fresh) = other.sent
    found.reported(other, "[]", old)  # type: ignore[arg-type]
    assert asker.sent == []
    found.reported(other, "[]", fresh)  # type: ignore[arg-type]
    assert len(asker.sent) == 1
