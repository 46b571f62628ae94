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


_Epochs = WeakValueDictionary[tuple[str, str], SessionEpoch]

_lock = threading.Lock()
_named: _Epochs = WeakValueDictionary()  # of the process


class SessionEpochs:
    """The epochs of all sessions in use, by tenant and session. Thread-safe.

    The agents of a session share one, whichever speculator is theirs. A session without a name is the speculator's own.
    """

    def __init__(self) -> None:
        self._unnamed: _Epochs = WeakValueDictionary()

    def of(self, tenant: str, session: str) -> SessionEpoch:
        """The session's epoch, which is kept while anybody holds it."""
        epochs = _named if session else self._unnamed
        with _lock:
            known = epochs.get((tenant, session))
            if known is None:
                known = epochs[tenant, session] = SessionEpoch()
            return known
