"""A sequence as the database keeps it."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import sqlalchemy as sa

from agentspec.cache.storage.record import Row
from agentspec.cache.storage.schema import damaged
from agentspec.types import Labels, Namespace


def record(row: Row) -> dict[str, object]:
    """The values of a row of `schema.sequences`, all but its id."""
    packed = zlib.compress(np.concatenate((row.context, row.tokens)).astype("<i4").tobytes(), level=1)
    return {
        "number": row.sequence,
        "namespace": row.namespace.key,
        "tenant": row.namespace.tenant,
        "model_fingerprint": row.namespace.model_fingerprint,
        "tokenizer_hash": row.namespace.tokenizer_hash,
        "template_hash": row.namespace.template_hash,
        "session": row.labels.session,
        "workflow": row.labels.workflow,
        "step": row.labels.step,
        "token_count": len(row.tokens),
        "tokens": packed,
        "size": len(packed),
        "created_at": row.created_at,
        "hits": 0,
    }


def read(record: sa.Row[Any], database: str) -> Row:
    """The row that `record` holds. Raises `CacheFormatError`, naming the database, for one that is damaged."""
    try:
        packed = np.frombuffer(zlib.decompress(record.tokens), dtype="<i4").astype(np.int32)
    except (zlib.error, ValueError) as error:
        raise damaged(database, f"sequence {record.id}: {error}") from error
    if len(packed) < record.token_count or packed.min(initial=0) < 0:
        raise damaged(database, f"sequence {record.id}")
    split = len(packed) - record.token_count
    return Row(
        record.number,
        Namespace(record.tenant, record.model_fingerprint, record.tokenizer_hash, record.template_hash),
        Labels(record.session, record.workflow, record.step),
        packed[split:],
        packed[:split],
        record.created_at,
    )
