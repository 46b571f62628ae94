"""The epoch of each session: any call that may change something begins a new one, and voids what was read before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary


class SessionEpoch:
    """One session's epoch. Thread-safe. While a call that may change something runs, nothing is started early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._writing = 0

    @property
    def number(self) -> int:
        return self._number

    @property
    def quiet(self) -> bool:
        """Whether no call that may change something is running."""
        return self._writing == 0

    def advance(self) -> None:
        with self._lock:
            self._number += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a call that may change something: a new epoch at its beginning and at its end.

        A call that is cancelled may go on, in a thread or elsewhere: then nothing is started early any more.
        """
        with self._lock:
            self._number += 1
            self._writing += 1
        ended = True
        try:
            yield
        except asyncio.CancelledError:
            ended = False
            raise
        finally:
            with self._lock:
                self._number += 1
                self._writing -= ended


_epochs: WeakValueDictionary[tuple[str, str], SessionEpoch] = WeakValueDictionary()  # of the process
_lock = threading.Lock()


def epoch_of(tenant: str, session: str) -> SessionEpoch:
    """The epoch of a session, which all its agents share, whichever speculator is theirs. Kept while it is in use."""
    with _lock:
        known = _epochs.get((tenant, session))
        if known is None:
            known = _epochs[tenant, session] = SessionEpoch()
        return known
