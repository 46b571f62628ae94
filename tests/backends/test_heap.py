"""How many of the C library's heaps a process uses."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agentspec.backends.heap import share_heaps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")

PROGRAM = """
import ctypes, threading
from agentspec.backends.heap import share_heaps

share_heaps()
library, wait = ctypes.CDLL(None), threading.Barrier(13)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p

def work():
    library.malloc(1000)
    wait.wait()
    wait.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
wait.wait()
file = ctypes.c_void_p(library.fopen(b"/dev/fd/1", b"w"))
library.malloc_info(0, file)
library.fclose(file)
wait.wait()
[thread.join() for thread in threads]
"""


@pytest.mark.parametrize(("environment", "most"), [({}, 4), ({"MALLOC_ARENA_MAX": "2"}, 2)], ids=["few", "as it says"])
def test_threads_share_few_heaps(environment: dict[str, str], most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert 1 < done.stdout.count("<heap ") <= most


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    share_heaps()
