"""The C library's heaps: how many a process uses, and what is given back."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from agentspec.backends import heap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")

PROGRAM = """
import ctypes, threading
from agentspec.backends.heap import give_back, share_heaps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def heaps():
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(library.fopen(b"/dev/fd/1", b"w"))
    library.malloc_info(0, file)
    library.fclose(file)

share_heaps()
library, wait = ctypes.CDLL(None), threading.Barrier(13)
library.malloc.restype = ctypes.c_void_p

def work():
    kept = [ctypes.c_void_p(library.malloc(1000)) for _ in range(4000)]
    wait.wait()
    for one in kept[:-1]:  # the last one keeps the heap's end in use
        library.free(one)
    wait.wait()
    wait.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
wait.wait()
wait.wait()
before = resident()
give_back()
print("given", before - resident(), flush=True)
heaps()
wait.wait()
[thread.join() for thread in threads]
"""


def said(**environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_share_few_heaps_and_what_they_freed_is_given_back() -> None:
    text = said()
    assert 1 < text.count("<heap ") <= 4
    assert int(text.split()[1]) > 12 * 4000 * 1000 / 2


def test_the_environment_decides_how_many_heaps() -> None:
    assert said(MALLOC_ARENA_MAX="2").count("<heap ") == 2


def test_a_library_that_only_calls_itself_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers over musl do."""
    heap._glibc.cache_clear()
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(gnu_get_libc_version=lambda: b"2.8"))
    try:
        heap.share_heaps()
        heap.give_back()
        assert heap._glibc() is None
    finally:
        heap._glibc.cache_clear()
