"""Programs that do a part of the work, such as unpacking a file, and that can be ended with this process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence

_running: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and return its exit status and what it wrote."""
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
    """End every program that `run` waits for, in whatever thread."""
    with _lock:
        for child in _running:
            child.kill()
