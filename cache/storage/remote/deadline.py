"""Objects of a place that may not answer: each call has a deadline, after which the caller goes on without it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from agentspec.cache.storage.remote.objects import SegmentObjects

T = TypeVar("T")

ANSWER = 30.0  # seconds to answer, besides what is to be copied
_RATE = 1 << 20  # bytes a second that the slowest connection copies
_REST = 60.0  # seconds until a place that did not answer is asked again, twice as many for each call that hangs
_LONGEST_REST = 3600.0


class BoundedObjects:
    """The objects of another place. A call that takes longer than its deadline raises `TimeoutError`, an `OSError`.

    Nobody can end such a call: it stays in its thread. For a while the next ones fail at once, and for longer the more
    calls hang: few threads do, and a place that answers again is found.
    `late` counts calls that ended after their deadline: then something may be there that was believed not to be.
    """

    def __init__(self, objects: SegmentObjects) -> None:
        self.late = 0
        self._objects = objects
        self._lock = threading.Lock()
        self._hung = 0
        self._again = 0.0  # when it is asked again

    def names(self) -> list[str]:
        return self._within(ANSWER, self._objects.names)

    def read(self, name: str, size: int | None = None) -> bytes:
        return self._within(ANSWER, lambda: self._objects.read(name, size))

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        def copy() -> None:
            # Who gave up has removed the folder of `path`, which a file system may make anew.
            with tempfile.TemporaryDirectory(prefix="agentspec-remote-", ignore_cleanup_errors=True) as folder:
                whole = Path(folder) / "object"
                self._objects.fetch(name, whole, size)
                shutil.move(whole, path)

        self._within(ANSWER + size / _RATE, copy)

    def send(self, path: Path, name: str) -> None:
        self._within(ANSWER + path.stat().st_size / _RATE, lambda: self._objects.send(path, name))

    def delete(self, name: str) -> None:
        self._within(ANSWER, lambda: self._objects.delete(name))

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        with self._lock:
            if self._hung and time.monotonic() < self._again:
                raise TimeoutError("it did not answer, and is asked again later")
        answer: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(call, answer), name="agentspec-remote", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the interpreter ends
            raise OSError(f"it cannot be asked: {error}") from error
        try:
            return answer.result(seconds)
        except TimeoutError:
            with self._lock:
                if not answer.done():
                    answer.set_running_or_notify_cancel()  # the thread knows by this that nobody waits
                    self._hung += 1
                    self._again = time.monotonic() + min(_REST * 2 ** min(self._hung - 1, 10), _LONGEST_REST)
                    raise TimeoutError(f"no answer within {seconds:.0f} seconds") from None
            return answer.result()  # it came at the last moment, or is an error of its own

    def _run(self, call: Callable[[], T], answer: Future[T]) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        with self._lock:
            if answer.running():
                self._hung -= 1
                self.late += 1
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]
