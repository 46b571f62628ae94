"""Adds each sequence's size, so that a tenant's bytes on disk can be summed without reading the tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("sequences", sa.Column("size", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE sequences SET size = length(tokens)")
    op.create_index("ix_sequences_tenant", "sequences", ["tenant", "id", "size"])
    # Releases from before the migrations read the version here, and refuse this one.
    op.execute("DELETE FROM agentspec_meta WHERE key = 'version'")
    op.execute("INSERT INTO agentspec_meta (key, value) VALUES ('version', '2')")
