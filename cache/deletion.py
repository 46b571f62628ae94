"""What a deletion covers: a selection, as the caller gives it, and its scope, as it is logged for other processes;
and the filter for text that is never shared.

The database keeps the scope of each deletion for the processes that follow. A scope holds names as hashes and
no text, since otherwise it would preserve what was to be deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import numpy as np

from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheError, ConfigurationError, InvalidRequestError
from agentspec.types import Namespace

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
    """The tenant, session, tokenizer and time that a deletion applies to; None: any. Names are hashes, so that
    only a process that knows a name can recognise it.

    `before` is a time in seconds since 1970. `searched`: only sequences that held a text were deleted.
    """

    tenant: str | None = None
    session: str | None = None
    tokenizer: str | None = None
    before: float | None = None
    searched: bool = False

    def concerns(self, namespace: Namespace) -> bool:
        if self.tokenizer is not None and namespace.tokenizer_hash != self.tokenizer:
            return False
        return self.concerns_tenant(namespace.tenant)

    def concerns_tenant(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == _digest(tenant)

    def covers(self, session: str | None, time_: float) -> bool:
        """Whether a sequence of this session (None: nameless) and time lies in the scope."""
        if self.before is not None and self.before <= time_ <= time.time() + CLOCKS_DIFFER:
            return False
        return self.session is None or (session is not None and self.session == _digest(session))


@dataclass(frozen=True, slots=True)
class Reach:
    """What a deletion covers of what an engine keeps by tenant and session for a model, whose `namespace` it knows."""

    scope: Scope
    namespace: Callable[[str], Namespace]

    def concerns(self, tenant: str) -> bool:
        return self.scope.concerns(self.namespace(tenant))

    def covers(self, tenant: str, session: str | None, made: float) -> bool:
        """Whether it covers what was learned of a session (None: nameless) at that time, in seconds since 1970."""
        return self.scope.covers(session, made) and self.concerns(tenant)


@dataclass(frozen=True)
class Selection:
    """The conditions of a deletion, all of which must hold. `before` is a time in seconds since 1970."""

    session: str | None = None
    tenant: str | None = None
    tokenizer: str | None = None
    before: float | None = None
    text: str | None = None
    decode: Decode | None = None

    @property
    def searched(self) -> bool:
        return self.text is not None

    @cached_property
    def scope(self) -> Scope:
        tenant, session = (None if name is None else _digest(name) for name in (self.tenant, self.session))
        return Scope(tenant, session, self.tokenizer, self.before, self.searched)

    def holds(self, tokens: Tokens) -> bool:
        """Whether the text of a stored sequence, with the context before it, holds the one that is searched for."""
        return self.text is None or (self.decode is not None and self.text in self.decode(tokens.tolist()))

    def is_in(self, texts: Iterable[str]) -> bool:
        """Whether one of these texts holds the one that is searched for, as it is or as JSON writes it."""
        return self.text is None or any(form in one for form in json_forms(self.text) for one in texts)


def json_forms(text: str) -> set[str]:
    """How a text stands in a JSON text: as it is, inside a string, and inside a string of JSON in a string."""
    forms = {text}
    for _ in range(2):
        forms |= {json.dumps(one, ensure_ascii=ascii_only)[1:-1] for one in forms for ascii_only in (False, True)}
    return forms


class PartlyForgottenError(CacheError):
    """A deletion is done, of `count` sequences, but not of what lies where the database cannot be read or opened."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


def select(
    *,
    session: str | None = None,
    tenant: str | None = None,
    tokenizer: str | None = None,
    older_than: float | timedelta | None = None,
    text: str | None = None,
    decode: Decode | None = None,
) -> Selection:
    """A checked selection. Raises `InvalidRequestError`, whose `param` names the invalid condition."""
    for name, value in (("session", session), ("tenant", tenant), ("tokenizer", tokenizer), ("text", text)):
        if not isinstance(value, str | None):
            raise InvalidRequestError(f"{name} must be a string or None, not {value!r}", param=name)
    if all(condition is None for condition in (session, tenant, older_than, text)):
        raise InvalidRequestError("say what to forget: session, tenant, older_than or text")
    if decode is not None and not callable(decode):
        raise InvalidRequestError(f"decode must be a function of token ids, not {decode!r}", param="decode")
    if text is not None and (not text or decode is None):
        raise InvalidRequestError("text must not be empty, and needs decode, the tokenizer's", param="text")
    before = None if older_than is None else time.time() - seconds_of(older_than, "older_than")
    return Selection(session, tenant, tokenizer, before, text, decode)


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
