"""The gateways and the scripted upstreams of `tests/proxy`, for promises about the gateway as a whole."""

from __future__ import annotations

import asyncio
import importlib.util
import selectors
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("proxy_fixtures", Path(__file__).parents[1] / "proxy" / "conftest.py")
assert _SPEC and _SPEC.loader
_fixtures = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _fixtures
_SPEC.loader.exec_module(_fixtures)

gateway = _fixtures.gateway
shared_gateway = _fixtures.shared_gateway
upstream = _fixtures.upstream
shared_upstream = _fixtures.shared_upstream
until = _fixtures.until
hanging_up = _fixtures.hanging_up


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait for the next timer but moves the clock on to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in a loop whose clock jumps: what sleeps takes no time, and every run is the same."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(work)

    return run
