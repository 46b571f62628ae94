"""What a deletion covers: a selection, as the caller gives it, and its scope, as it is logged for other processes;
and the filter for text that is never shared.

The database keeps the scope of each deletion for the processes that follow. A scope holds names as hashes, since
otherwise it would preserve what was to be deleted.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import numpy as np

from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheError, ConfigurationError, InvalidRequestError

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, with the tokenizer of a namespace."""

CLOCKS_DIFFER = 300.0
"""Seconds by which a clock may be ahead of another: what is dated further ahead is as old as can be."""


class ContentFilter:
    """Regular expressions that no shared text may match anywhere. Raises `ConfigurationError` for an invalid one."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str) or not isinstance(patterns, Sequence):
            message = f"refuse_patterns must be a list of regular expressions, not {patterns!r}"
            raise ConfigurationError(message, param="refuse_patterns")
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
            for pattern in self._patterns:
                pattern.search("")  # raises for one of bytes
        except (re.error, TypeError) as error:
            message = f"refuse_patterns must be regular expressions, not {list(patterns)!r}: {error}"
            raise ConfigurationError(message, param="refuse_patterns") from error

    def refuses(self, context: Tokens, tokens: Tokens, decode: Decode | None) -> bool:
        """Whether the text of `context` and `tokens` matches a pattern; true without `decode`, as it might match."""
        if decode is None:
            return True
        return self.matches(decode(np.concatenate((context, tokens)).tolist()))

    def matches(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self._patterns)


@dataclass(frozen=True, slots=True)
class Scope:
    """The tenant, session and time that a deletion applies to; None: any. Names are hashes, so that only a process
    that knows a name can recognise it. `before` is a time in seconds since 1970.
    """

    tenant: str | None = None
    session: str | None = None
    before: float | None = None

    def concerns(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == _digest(tenant)

    def covers(self, session: str | None, time_: float) -> bool:
        """Whether a sequence of this session (None: nameless) and time lies in the scope."""
        if self.before is not None and self.before <= time_ <= time.time() + CLOCKS_DIFFER:
            return False
        return self.session is None or (session is not None and self.session == _digest(session))


@dataclass(frozen=True)
class Selection:
    """The conditions of a deletion, all of which must hold. `before` is a time in seconds since 1970."""

    session: str | None = None
    tenant: str | None = None
    before: float | None = None

    @cached_property
    def scope(self) -> Scope:
        tenant, session = (None if name is None else _digest(name) for name in (self.tenant, self.session))
        return Scope(tenant, session, self.before)


class PartlyForgottenError(CacheError):
    """A deletion is done, of `count` sequences, but not of what lies where the database cannot be read or opened."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


def select(
    *, session: str | None = None, tenant: str | None = None, older_than: float | timedelta | None = None
) -> Selection:
    """A checked selection. Raises `InvalidRequestError`, whose `param` names the invalid condition."""
    for name, value in (("session", session), ("tenant", tenant)):
        if not isinstance(value, str | None):
            raise InvalidRequestError(f"{name} must be a string or None, not {value!r}", param=name)
    if all(condition is None for condition in (session, tenant, older_than)):
        raise InvalidRequestError("say what to forget: session, tenant or older_than")
    before = None if older_than is None else time.time() - seconds_of(older_than, "older_than")
    return Selection(session, tenant, before)


def seconds_of(span: float | timedelta, name: str) -> float:
    """A time span in seconds. Raises `InvalidRequestError` unless it is 0 or more."""
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.number) or not 0 <= seconds < 1e12:
        raise InvalidRequestError(f"{name} must be seconds or a timedelta, 0 or more, not {span!r}", param=name)
    return float(seconds)


def pause_between_looks(term: float | None, most: float) -> float:
    """Seconds until what is older than `term` (None: nothing is too old) is looked for again: a 24th of the term, at
    least one and `most` at most.
    """
    return most if term is None else min(most, max(1.0, term / 24))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
