"""The size of each sequence, so that what a tenant takes on disk can be summed up without reading it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("sequences", sa.Column("size", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE sequences SET size = length(tokens)")
    op.create_index("ix_sequences_tenant", "sequences", ["tenant", "id", "size"])
    # What came before the migrations reads the version here, and refuses this one.
    op.execute("DELETE FROM agentspec_meta WHERE key = 'version'")
    op.execute("INSERT INTO agentspec_meta (key, value) VALUES ('version', '2')")
