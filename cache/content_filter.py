"""The filter that keeps outputs from being shared when their text matches a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentspec.cache.deletion import Decode
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError


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
        """Whether a text matches a pattern."""
        return any(pattern.search(text) for pattern in self._patterns)
