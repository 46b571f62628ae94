"""What the database holds of each namespace."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from agentspec.cache.storage.schema import sequences
from agentspec.types import Namespace


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """Counts of one namespace's rows in the database."""

    namespace: Namespace
    sequences: int
    tokens: int
    bytes: int


def read(connection: sa.Connection) -> list[StoredNamespace]:
    """All namespaces, that of the newest row last."""
    columns = sequences.c
    counts = (sa.func.count(), sa.func.sum(columns.token_count), sa.func.sum(columns.size))
    names = (columns.tenant, columns.model_fingerprint, columns.tokenizer_hash, columns.template_hash)
    query = sa.select(*(sa.func.min(name) for name in names), *counts).group_by(columns.namespace)
    rows = connection.execute(query.order_by(sa.func.max(columns.id)))
    return [StoredNamespace(Namespace(*row[:4]), *map(int, row[4:])) for row in rows]
