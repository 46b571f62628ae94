from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentspec.cache.settings import CacheSettings


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("30d", 2592000), ("12 h", 43200), ("90m", 5400), ("1.5w", 907200), ("45s", 45), ("45", 45), (7, 7), (None, None)],
)
def test_retention_is_a_time_span(written: object, seconds: float | None) -> None:
    assert CacheSettings(retention=written).retention == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["a month", "30x", "-1d", -1, "d", "1d2h", "nan"])
def test_what_is_no_time_span(written: object) -> None:
    with pytest.raises(ValidationError, match="retention"):
        CacheSettings(retention=written)  # type: ignore[arg-type]


def test_patterns_are_regular_expressions() -> None:
    assert CacheSettings(refuse_patterns=("sk-[a-z]+",)).refuse_patterns == ("sk-[a-z]+",)
    with pytest.raises(ValidationError, match=r"'\(open' is no regular expression: missing"):
        CacheSettings(refuse_patterns=("fine", "(open"))
