"""Converts a sequence to a row of the database and back."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import sqlalchemy as sa

from agentspec.cache.index import DEPTH
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.schema import damaged
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
