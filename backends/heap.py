"""Memory that was freed and that the C library keeps: bounded, and given back. Does nothing without glibc."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Final

HEAPS: Final = 4
_M_ARENA_MAX: Final = -8  # of malloc.h


def share_heaps() -> None:
    """Let the threads of this process share a few heaps, unless MALLOC_ARENA_MAX says how many.

    Usually there are eight for each core. Every heap keeps what was freed in it, so that the same work, which comes to
    another thread each time, takes the memory as many times. Call it before threads start.
    """
    if (library := _glibc()) is not None and "MALLOC_ARENA_MAX" not in os.environ:
        library.mallopt(_M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Give whole pages that are free back to the system: tens of milliseconds, in which other threads may wait."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    needed = ("gnu_get_libc_version", "mallopt", "malloc_trim")  # musl has none, and layers over it only the first
    return library if all(hasattr(library, name) for name in needed) else None
