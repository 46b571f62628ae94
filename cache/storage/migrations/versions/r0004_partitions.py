"""Divides the sequences by tenant, in PostgreSQL; elsewhere all stays as it is."""

from __future__ import annotations

from alembic import op

from agentspec.cache.storage.migrations.partitions import DIVIDE

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for statement in DIVIDE:
            op.execute(statement)
    # Releases from before the migrations read the version here, and refuse this one.
    op.execute("UPDATE agentspec_meta SET value = '4' WHERE key = 'version'")
