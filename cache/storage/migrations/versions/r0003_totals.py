"""Adds running totals by namespace, and a table that hands out the upper half of sequence numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from agentspec.cache.storage.migrations.totals import FILL, TRIGGERS

revision = "0003"
down_revision = "0002"

_Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAMES = ("tenant", "model_fingerprint", "tokenizer_hash", "template_hash")


def upgrade() -> None:
    op.create_table(
        "namespaces",
        sa.Column("key", sa.String(64), primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in _NAMES),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("sequences", "tokens", "bytes", "last")),
    )
    op.create_table("processes", sa.Column("id", _Id, primary_key=True), sqlite_autoincrement=True)
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":
        for name in _NAMES:
            op.execute(f"ALTER TABLE namespaces ALTER COLUMN {name} SET STATISTICS 0")
    op.execute(FILL)
    for statement in TRIGGERS[dialect]:
        op.execute(statement)
    # Releases from before the migrations read the version here, and refuse this one.
    op.execute("UPDATE agentspec_meta SET value = '3' WHERE key = 'version'")
