"""Counts bytecode instructions, so that a claim about cost holds on a busy machine too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_instructions(*left_out: str) -> Iterator[Callable[[], int]]:
    """How many bytecode instructions the block takes in the functions that it calls, but those of modules whose names
    begin with `left_out`.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_globals.get("__name__", "").startswith((__name__, *left_out)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()  # which counts the lines for coverage
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
