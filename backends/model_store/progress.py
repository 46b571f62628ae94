"""Progress bars for work that reports no progress itself: they show the bytes in a folder, or the time that passed.

On a terminal a bar is shown; elsewhere (a service's log) one log line says what begins.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INTERVAL = 0.2
_log = logging.getLogger("agentspec.models")


@contextlib.contextmanager
def arriving(folder: Path, total: int, label: str, *, show: bool) -> Iterator[None]:
    """Show how many of `total` bytes lie in `folder` and below while the block runs."""
    _log.info("%s", label)
    if not show:
        yield
        return
    from tqdm import tqdm

    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=total, desc=label, disable=None, **options) as bar, _watching(folder, bar):
        yield
        bar.update(total - bar.n)


@contextlib.contextmanager
def elapsing(label: str, *, show: bool) -> Iterator[None]:
    """Show that time passes while the block runs."""
    _log.info("%s", label)
    if not show:
        yield
        return
    from tqdm import tqdm

    with tqdm(desc=label, disable=None, bar_format="{desc} [{elapsed}]") as bar, _watching(None, bar):
        yield


@contextlib.contextmanager
def _watching(folder: Path | None, bar: Any) -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, bar, done), name="agentspec-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(folder: Path | None, bar: Any, done: threading.Event) -> None:
    while not done.wait(_INTERVAL):
        if folder is not None:
            bar.update(max(0, min(_bytes_in(folder), bar.total) - bar.n))
        bar.refresh()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while we look
            total += path.stat().st_size if path.is_file() else 0
    return total
