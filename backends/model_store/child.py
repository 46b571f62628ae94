"""Runs child programs, such as `unpack.py`, and can kill all of them before this process ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence

_running: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; returns its exit status and its output."""
    with subprocess.Popen(command, text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        with _lock:
            _running.add(child)
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.kill()
            raise
        finally:
            with _lock:
                _running.discard(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end_all() -> None:
    """Kill every program that a thread waits for in `run`."""
    with _lock:
        for child in _running:
            child.kill()
