"""Describes errors for logs by class and location, without messages that may quote a prompt."""

from __future__ import annotations

import traceback
from pathlib import PurePath

from agentspec.errors import AgentSpecError

FRAMES = 8


def class_of(error: BaseException) -> str:
    """The name of the error's class, and of its cause's class if there is a cause."""
    cause = error.__cause__
    return type(error).__name__ + (f" from {type(cause).__name__}" if cause is not None else "")


def error_name(error: BaseException) -> str:
    """The code of an error of ours, the class of any other."""
    return getattr(error, "code", None) or type(error).__name__


def frames_of(error: BaseException) -> list[str]:
    """The innermost frames, outermost first, as `file.py:line function`."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]


def error_location(error: BaseException) -> str:
    """The error's class and frames in one line."""
    return f"{class_of(error)} at {' > '.join(frames_of(error)) or 'no frame'}"


def safe_message(error: BaseException) -> str:
    """The message of an `AgentSpecError` or `OSError`; class and frames of any other error."""
    return str(error) if isinstance(error, (AgentSpecError, OSError)) else error_location(error)
