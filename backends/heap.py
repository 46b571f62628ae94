"""Memory that was freed and that the C library keeps: bounded. Does nothing without glibc."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

HEAPS: Final = 4
_M_ARENA_MAX: Final = -8  # of malloc.h


def share_heaps() -> None:
    """Let the threads of this process share a few heaps, unless MALLOC_ARENA_MAX says how many.

    Usually there are eight for each core. Every heap keeps what was freed in it, so that the same work, which comes to
    another thread each time, takes the memory as many times. Call it before threads start.
    """
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(_M_ARENA_MAX, HEAPS)
