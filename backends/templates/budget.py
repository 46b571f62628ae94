"""What one rendering of a chat template may spend: work, processor time, and bytes of texts and lists that it makes."""

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
_ESCAPED: Final = 8  # bytes that a character may take where it is written with escapes; few characters take more
_MAX_BITS: Final = 20_000
_STEPS: Final = 32  # between two looks at the clock
STEP: Final = 200  # units of work of any operation, about a nanosecond each
WORK: Final = 2_000_000_000
_WORK_PER_INPUT: Final = 1_000  # units for each byte that a template is given
MOST_AT_ONCE: Final = 250_000_000  # units of one operation, after which the clock is looked at
_PLAIN: Final = (int, float, bool, type(None), Undefined)


class TemplateLimitError(TemplateRuntimeError):
    """A template went beyond its budget."""


@dataclass(slots=True)
class Budget:
    """What is left for one rendering. Not thread-safe."""

    bytes_left: int
    ends: float
    work_left: int = WORK
    _steps: int = 0
    _weights: dict[int, tuple[Any, int]] = field(default_factory=dict)  # of containers, which it keeps alive

    @classmethod
    def of(cls, given: Any) -> Budget:
        """A budget for a template that is given `given`, a JSON value."""
        budget = cls(sys.maxsize, time.thread_time() + 60.0)
        size = budget.weigh(given, sys.maxsize)
        return cls(_BYTES + _PER_INPUT * size, time.thread_time() + SECONDS, WORK + _WORK_PER_INPUT * size)

    def work(self, units: int = 0) -> None:
        """Count an operation that is about to begin, of `units` of work besides its own step.

        Raises `TemplateLimitError` if that is too much, alone or with what went before, or if the time is over. Looks
        at the clock every few small steps, and at large ones.
        """
        self.work_left -= STEP + units
        if units > MOST_AT_ONCE or self.work_left < 0:
            raise TemplateLimitError("the chat template does too much work with texts or lists this large")
        self._steps -= 1 + (units >> 14)
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

    def spend_text(self, *values: Any) -> int:
        """Count `values` about to be written as text, and return their size. Quotes and escapes may make it longer."""
        total = 0
        for value in values:
            size = self.weigh(value)
            self.spend(size if isinstance(value, (str, *_PLAIN)) else _ESCAPED * size)
            total += size
        return total

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

    def weigh_given(self, value: Any) -> int:
        """`weigh` of what may be larger than what a template may make."""
        return self.weigh(value, sys.maxsize)

    def weigh(self, value: Any, most: int = MAX_RENDERED) -> int:
        """How many characters and elements `value` has if it is written out: a list in itself counts as often as it
        occurs. Raises `TemplateLimitError` beyond `most`. Never recursive.
        """
        if isinstance(value, (str, bytes, bytearray)):
            return len(value)
        if isinstance(value, (list, tuple, dict, set, frozenset)) and id(value) in self._weights:
            return self._checked(self._weights[id(value)][1], most)
        total, seen, stack = 0, 0, [value]
        while stack:
            one = stack.pop()
            seen += 1
            if seen & 4095 == 0:  # to look at so many takes time, too
                self.work(4096 * STEP)
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
            elif isinstance(one, int):
                total += 1 + 20 * (one.bit_length() >> 6)
            elif isinstance(one, Namespace):
                raise TemplateLimitError("the chat template writes a namespace as text")
            else:
                total += 1 if isinstance(one, _PLAIN) else 100
            self._checked(total + len(stack), most)
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            self._weights[id(value)] = (value, total)
        return total

    @staticmethod
    def _checked(total: int, most: int) -> int:
        if total > most:
            raise TemplateLimitError("the chat template makes texts or lists that are too large")
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
