"""Creates the tables of the time before migrations. Tables that exist already stay unchanged."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    existing = set(sa.inspect(op.get_bind()).get_table_names())
    for name, create in {"agentspec_meta": _meta, "learned": _learned, "deletions": _deletions}.items():
        if name not in existing:
            create()
    if "sequences" not in existing:
        _sequences()
        op.create_index("ix_sequences_namespace", "sequences", ["namespace"])


def _meta() -> None:
    op.create_table(
        "agentspec_meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
    )


def _learned() -> None:
    op.create_table(
        "learned",
        sa.Column("namespace", sa.String(64), primary_key=True),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )


def _deletions() -> None:
    op.create_table(
        "deletions",
        sa.Column("id", _Id, primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("salt", sa.String, nullable=False),
        sa.Column("tenant", sa.String),
        sa.Column("session", sa.String),
        sa.Column("tokenizer", sa.String),
        sa.Column("before", sa.Float),
        sa.Column("searched", sa.Boolean, nullable=False),
        sqlite_autoincrement=True,
    )


def _sequences() -> None:
    op.create_table(
        "sequences",
        sa.Column("id", _Id, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False, unique=True),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("model_fingerprint", sa.String, nullable=False),
        sa.Column("tokenizer_hash", sa.String, nullable=False),
        sa.Column("template_hash", sa.String, nullable=False),
        sa.Column("session", sa.String),
        sa.Column("workflow", sa.String),
        sa.Column("step", sa.String),
        sa.Column("token_count", sa.Integer, nullable=False),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("hits", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
