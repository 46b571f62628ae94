from __future__ import annotations

from agentspec.errors import CacheError
from agentspec.telemetry.safe_errors import FRAMES, class_of, error_location, frames_of, safe_message


def dig(depth: int) -> None:
    if depth:
        dig(depth - 1)
    raise ValueError("a prompt")


def raised(depth: int) -> Exception:
    try:
        dig(depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_class_and_frames_without_the_message():
    assert error_location(raised(0)).startswith("ValueError at test_safe_errors.py:")
    assert "dig" in error_location(raised(0)) and "a prompt" not in error_location(raised(0))
    assert len(frames_of(raised(3 * FRAMES))) == FRAMES and frames_of(raised(9))[-1].endswith(" dig")


def test_the_cause_is_named():
    error = OSError("x")
    error.__cause__ = ValueError("y")
    assert (class_of(error), error_location(error)) == (
        "OSError from ValueError",
        "OSError from ValueError at no frame",
    )


def test_what_we_wrote_ourselves_may_be_said():
    assert (safe_message(CacheError("full")), safe_message(OSError("gone"))) == ("full", "gone")
    assert "a prompt" not in safe_message(raised(1)) and safe_message(raised(1)).startswith("ValueError")
