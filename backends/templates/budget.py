"""What one rendering of a chat template may spend: processor time, and bytes of texts and lists that it makes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateRuntimeError, Undefined
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RENDERED: Final = 10_000_000  # characters: more than the largest body of a request has by default
SECONDS: Final = 0.6  # processor time of the rendering thread, which one more operation may exceed
_BYTES: Final = 32 << 20
_PER_INPUT: Final = 32  # bytes that a template may make of each byte that it is given
_MAX_BITS: Final = 20_000
_STEPS: Final = 32  # between two looks at the clock
_PLAIN: Final = (int, float, bool, type(None), Undefined)


class TemplateLimitError(TemplateRuntimeError):
    """A template went beyond its budget."""


@dataclass(slots=True)
class Budget:
    """What is left for one rendering. Not thread-safe."""

    bytes_left: int
    ends: float
    _steps: int = 0
    _weights: dict[int, tuple[Any, int]] = field(default_factory=dict)  # of containers, which it keeps alive

    @classmethod
    def of(cls, given: Any) -> Budget:
        """A budget for a template that is given `given`, a JSON value."""
        budget = cls(sys.maxsize, time.thread_time() + 60.0)
        size = budget.weigh(given, sys.maxsize)
        return cls(_BYTES + _PER_INPUT * size, time.thread_time() + SECONDS)

    def tick(self, size: int = 0) -> None:
        """Raise `TemplateLimitError` if the time is over. Looks at the clock every few small steps, and at large ones.

        `size` is that of the texts that the next step goes through.
        """
        self._steps -= 1 + (size >> 14)
        if self._steps > 0:
            return
        self._steps = _STEPS
        if time.thread_time() > self.ends:
            raise TemplateLimitError(f"the chat template takes more than {SECONDS:g} seconds of processor time")

    def spend(self, size: int) -> None:
        """Count `size` bytes about to be made. Raises `TemplateLimitError`."""
        self.bytes_left -= size
        self._steps -= size >> 14
        if self.bytes_left < 0 or size > 4 * MAX_RENDERED:
            raise TemplateLimitError("the chat template makes texts or lists that are too large")

    def charge(self, value: Any) -> Any:
        """Count a value that was made, and return it. Raises `TemplateLimitError`."""
        kind = type(value)
        if kind is str:
            if len(value) > 64:
                self.spend(sys.getsizeof(value))
        elif kind in (list, tuple, dict, set, frozenset):
            self.spend(sys.getsizeof(value))
            self.weigh(value)
        elif kind is int:
            if value.bit_length() > _MAX_BITS:
                raise TemplateLimitError("the chat template makes a number that is too large")
        elif isinstance(value, (str, bytes, bytearray)):
            self.spend(sys.getsizeof(value))
        return value

    def weigh(self, value: Any, most: int = MAX_RENDERED) -> int:
        """How many characters and elements `value` has if it is written out: a list in itself counts as often as it
        occurs. Raises `TemplateLimitError` beyond `most`. Never recursive.
        """
        if isinstance(value, (str, bytes, bytearray)):
            return len(value)
        if isinstance(value, (list, tuple, dict, set, frozenset)) and id(value) in self._weights:
            return self._weights[id(value)][1]
        total, stack = 0, [value]
        while stack:
            one = stack.pop()
            known = self._weights.get(id(one)) if one is not value else None
            if known is not None:
                total += known[1]
            elif isinstance(one, (str, bytes, bytearray)):
                total += len(one) + 1
            elif isinstance(one, (dict, Mapping)):
                total += 1
                stack += one.keys()
                stack += one.values()
            elif isinstance(one, (list, tuple, set, frozenset)):
                total += 1
                stack += one
            elif isinstance(one, Namespace):
                raise TemplateLimitError("the chat template writes a namespace as text")
            else:
                total += 1 if isinstance(one, _PLAIN) else 100
            if total + len(stack) > most:
                raise TemplateLimitError("the chat template makes texts or lists that are too large")
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            self._weights[id(value)] = (value, total)
        return total


_current: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def current() -> Budget:
    """The budget of the rendering that runs in this thread; a new one outside of any."""
    return _current.get() or Budget.of(None)


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Let templates spend `budget` inside the block."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)
