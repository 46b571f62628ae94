"""When the parent kills a process that hangs: by its own ticks, and not by the clock."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.proxy.workers.child import ENGINE, Child, Life


class Process:
    killed = 0

    def kill(self) -> None:
        self.killed += 1


def watched(seconds: int, *, ready: bool, heard: bool, **limits: float) -> int:
    """How often a process is killed that is watched for so many seconds."""
    process: Any = Process()
    child = Child("engine", ENGINE, Life(process, channel=None, since=0.0, ready=ready))  # type: ignore[arg-type]
    for _ in range(seconds):
        child.watch(1.0, **{"hang_timeout": 60.0, "load_timeout": 0.0, **limits})
        if heard:
            child._heard(["alive"], lambda child, message: None)
    return int(process.killed)


@pytest.mark.parametrize(
    ("seconds", "state", "killed"),
    [
        (60, {"ready": True, "heard": False}, 0),
        (61, {"ready": True, "heard": False}, 1),
        (500, {"ready": True, "heard": True}, 0),
        (500, {"ready": True, "heard": False, "hang_timeout": 0.0}, 0),
        (500, {"ready": False, "heard": False}, 0),
        (100, {"ready": False, "heard": False, "load_timeout": 100.0}, 0),
        (101, {"ready": False, "heard": False, "load_timeout": 100.0}, 1),
        (101, {"ready": False, "heard": True, "load_timeout": 100.0}, 1),
        (500, {"ready": True, "heard": True, "load_timeout": 100.0}, 0),
    ],
)
def test_silence_and_loading_have_limits(seconds: int, state: Any, killed: int) -> None:
    assert watched(seconds, **state) == killed
