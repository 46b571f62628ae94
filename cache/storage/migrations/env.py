"""Alembic's environment: the caller provides the connection and its transaction."""

from __future__ import annotations

from alembic import context

from agentspec.cache.storage.schema import metadata, revision

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=revision.name,
    transactional_ddl=True,
)
context.run_migrations()
