"""The tables of a cache's databases: the sequences, and stored answers."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from agentspec.cache.deletion import CLOCKS_DIFFER
from agentspec.errors import CacheDamagedError

VERSION = 11  # a change of the tables takes another: there are no migrations

metadata = sa.MetaData()

Kinds = Sequence[tuple[str, Any]]  # a column's name and the type, or union of types, of its values

_FOREVER = 1e12  # seconds
_UNSAFE = re.compile("[\0\x1a\ud800-\udfff]")
_ESCAPED = re.compile("\x1a([0-9a-f]{4})")


class Name(sa.types.TypeDecorator[str]):
    """Any Python string. Escapes the characters that databases refuse: NUL and lone surrogates."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if not isinstance(value, str):
            return value  # none, or a damaged one that was read
        return _UNSAFE.sub(lambda found: f"\x1a{ord(found[0]):04x}", value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if not isinstance(value, str):
            return value  # none, or a damaged one, which `is_sound` finds
        return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value)


class Bytes(sa.LargeBinary):
    """What is stored, also where that is damaged and no bytes, which `is_sound` finds."""

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> None:
        return None


_Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite increments only columns of exactly this type

meta = sa.Table(
    "agentspec_meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)

sequences = sa.Table(
    "sequences",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False, unique=True),  # random per process, then counted
    sa.Column("namespace", sa.String(64), nullable=False, index=True),  # Namespace.key of the next four
    sa.Column("tenant", Name, nullable=False),
    sa.Column("model_fingerprint", Name, nullable=False),
    sa.Column("tokenizer_hash", Name, nullable=False),
    sa.Column("template_hash", Name, nullable=False),
    sa.Column("session", Name),
    sa.Column("token_count", sa.Integer, nullable=False),
    sa.Column("tokens", Bytes, nullable=False),  # zlib of context and tokens, little-endian int32
    sa.Column("created_at", sa.Float, nullable=False),  # seconds since 1970
    sa.Column("size", sa.Integer, nullable=False, server_default="0"),  # bytes of `tokens`
    sa.Index("ix_sequences_tenant", "tenant", "id", "size"),  # covers the query for a tenant's sum of sizes
    sqlite_autoincrement=True,
)

deletions = sa.Table(
    "deletions",  # one row per deletion: its Scope, for other processes to apply
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("tenant", sa.String),  # tenant and session are hashes
    sa.Column("session", sa.String),
    sa.Column("tokenizer", Name),
    sa.Column("before", sa.Float),
    sa.Column("searched", sa.Boolean, nullable=False),
    sqlite_autoincrement=True,
)


def _answers(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", Name(128), primary_key=True),
        sa.Column("tenant", Name, nullable=False),
        sa.Column("session", Name),
        sa.Column("created_at", sa.Float, nullable=False, index=True),  # seconds since 1970
        sa.Column("previous", Name(128)),
        sa.Column("backend", sa.String),
        sa.Column("size", sa.Integer, nullable=False),  # bytes of `body`
        sa.Column("body", Bytes, nullable=False),
        sa.Index(f"ix_{name}_tenant", "tenant", "created_at", "size"),  # covers the sums of the bounds
    )


responses = _answers("responses")  # of the Responses API
runs = _answers("runs")  # one row for each call of a model


def _keep_no_statistics(table: sa.Table, *columns: str) -> None:
    """The planner's statistics of PostgreSQL would keep deleted names and texts."""
    for column in columns:
        ddl = sa.DDL(f"ALTER TABLE {table.name} ALTER COLUMN {column} SET STATISTICS 0")  # type: ignore[no-untyped-call]
        event.listen(table, "after_create", ddl.execute_if(dialect="postgresql"))


_keep_no_statistics(sequences, "tenant", "session", "tokens")
_keep_no_statistics(responses, "tenant", "session", "body")
_keep_no_statistics(runs, "tenant", "session", "body")
# PostgreSQL need not compress tokens a second time.
_as_they_are = sa.DDL("ALTER TABLE sequences ALTER COLUMN tokens SET STORAGE EXTERNAL")  # type: ignore[no-untyped-call]
event.listen(sequences, "after_create", _as_they_are.execute_if(dialect="postgresql"))


def is_sound(row: sa.Row[Any], kinds: Kinds) -> bool:
    """Whether each value is of its column's kind: SQLite keeps any value in any column."""
    return all(isinstance(getattr(row, name), kind) for name, kind in kinds)


def is_older(column: sa.ColumnElement[float], before: float) -> sa.ColumnElement[bool]:
    """Whether a time lies before another, or is none that could be: one ahead of now, or damaged."""
    return sa.or_(column < before, sa.not_(column.between(-_FOREVER, time.time() + CLOCKS_DIFFER)))


def damaged(name: object, reason: object) -> CacheDamagedError:
    advice = (
        "in a folder, the next process that opens it to write (restart the server) renames it and starts a new"
        " cache; elsewhere, restore it or move it away"
    )
    return CacheDamagedError(f"{name} is damaged: {reason}; {advice}")
