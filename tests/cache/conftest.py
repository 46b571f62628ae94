"""What the cache's tests share: where caches are, texts and requests, and a look at the databases from outside."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.types import Namespace

DATABASE, STATE = "sequences.sqlite3", "state.sqlite3"


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new cache can be stored, in each kind of database."""
    return tmp_path / "cache" if request.param == "sqlite" else request.getfixturevalue("postgres")


SQLITE_FIRST = pytest.mark.parametrize(
    "location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True
)


def text(seed: int, length: int, vocabulary: int = 2**31 - 2) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def record(cache: SuffixCache, output: Any, prompt: Any = (1, 2), **labels: Any) -> None:
    """Have a request produce an output."""
    with cache.request(prompt, **labels) as request:
        request.extend(output)


def knows(cache: SuffixCache, output: Any, namespace: str | Namespace = "default", at: int = 4) -> bool:
    """Whether another session drafts how an output goes on after its first tokens."""
    with cache.request(output[:at], namespace=namespace, session="probe", store=False) as request:
        return bool(request.draft(1).tokens.tolist() == [int(output[at])])


def execute(location: str | Path, *statements: str, file: str = DATABASE) -> list[Any]:
    """The rows of the last statement, executed in the database by another connection."""
    engine = sa.create_engine(location if isinstance(location, str) else f"sqlite:///{location / file}")
    with engine.begin() as connection:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        rows = [tuple(row) for row in results[-1]] if results[-1].returns_rows else []
    engine.dispose()
    return rows


def outputs(location: str | Path) -> list[list[int]]:
    """The stored outputs, in the order of their rows."""
    rows = execute(location, "SELECT token_count, tokens FROM sequences ORDER BY id")
    unpacked = [(count, np.frombuffer(zlib.decompress(packed), "<i4").tolist()) for count, packed in rows]
    return [tokens[len(tokens) - count :] for count, tokens in unpacked]


def wait(condition: Callable[[], object], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)
