"""Rows of the database: converts a sequence to a row and back, and reads rows."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import sqlalchemy as sa

from agentspec.cache.index import DEPTH
from agentspec.cache.record import SequenceRecord, StoredNamespace
from agentspec.cache.storage.schema import damaged, sequences
from agentspec.cache.tokens import inflate
from agentspec.types import Labels, Namespace

_MOST_TOKENS = 1 << 24  # of a sequence: a row with a forged count cannot take more memory than these


def encode(record: SequenceRecord) -> dict[str, object]:
    """The values of the row in `schema.sequences`, except its id."""
    packed = zlib.compress(np.concatenate((record.context, record.tokens)).astype("<i4").tobytes(), level=1)
    return {
        "number": record.sequence,
        "namespace": record.namespace.key,
        "tenant": record.namespace.tenant,
        "model_fingerprint": record.namespace.model_fingerprint,
        "tokenizer_hash": record.namespace.tokenizer_hash,
        "template_hash": record.namespace.template_hash,
        "session": record.labels.session,
        "workflow": record.labels.workflow,
        "step": record.labels.step,
        "token_count": len(record.tokens),
        "tokens": packed,
        "size": len(packed),
        "created_at": record.created_at,
        "hits": 0,
    }


def decode(row: sa.Row[Any], database: str) -> SequenceRecord:
    """The sequence that a row holds. Raises `CacheFormatError`, naming the database, for a damaged row."""
    try:
        most = 4 * (min(row.token_count, _MOST_TOKENS) + DEPTH)
        packed = np.frombuffer(inflate(row.tokens, most), dtype="<i4").astype(np.int32)
    except (zlib.error, ValueError) as error:
        raise damaged(database, f"sequence {row.id}: {error}") from error
    if not 0 <= row.token_count <= len(packed) or packed.min(initial=0) < 0:
        raise damaged(database, f"sequence {row.id}")
    split = len(packed) - row.token_count
    return SequenceRecord(
        row.number,
        Namespace(row.tenant, row.model_fingerprint, row.tokenizer_hash, row.template_hash),
        Labels(row.session, row.workflow, row.step),
        packed[split:],
        packed[:split],
        row.created_at,
    )


def newest_rows(connection: sa.Connection, limit: int, *conditions: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
    """The newest rows of at most `limit` tokens together, oldest first."""
    query = sa.select(sequences).where(*conditions).order_by(sequences.c.id.desc()).execution_options(yield_per=256)
    found: list[sa.Row[Any]] = []
    with connection.execute(query) as rows:
        for row in rows:
            limit -= row.token_count
            if limit < 0:
                break
            found.append(row)
    return found[::-1]


def stored_namespaces(connection: sa.Connection) -> list[StoredNamespace]:
    """All namespaces, that of the newest row last."""
    columns = sequences.c
    counts = (sa.func.count(), sa.func.sum(columns.token_count), sa.func.sum(columns.size))
    names = (columns.tenant, columns.model_fingerprint, columns.tokenizer_hash, columns.template_hash)
    query = sa.select(*(sa.func.min(name) for name in names), *counts).group_by(columns.namespace)
    rows = connection.execute(query.order_by(sa.func.max(columns.id)))
    return [StoredNamespace(Namespace(*row[:4]), *map(int, row[4:])) for row in rows]


def last_row(connection: sa.Connection) -> int:
    """Id of the newest row; 0 if there is none."""
    return int(connection.scalar(sa.select(sa.func.max(sequences.c.id))) or 0)


def rows_of(namespace: Namespace, until: int | None) -> list[sa.ColumnElement[bool]]:
    """What holds for the rows of a namespace, up to the row `until` if given."""
    mine = sequences.c.namespace == namespace.key
    return [mine] if until is None else [mine, sequences.c.id <= until]
