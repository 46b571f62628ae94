"""Converts a sequence to a row of the database and back."""

from __future__ import annotations

import math
import zlib
from base64 import b85decode, b85encode
from functools import lru_cache
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from agentspec.cache.index import DEPTH
from agentspec.cache.storage.schema import Kinds, is_sound
from agentspec.cache.tokens import MOST_TOKEN, SequenceRecord
from agentspec.errors import CacheFormatError
from agentspec.types import Namespace

NAMES = ("namespace", "tenant", "model_fingerprint", "tokenizer_hash", "template_hash")
_KINDS: Kinds = (
    *((name, str) for name in NAMES),
    ("session", str | None),
    *(("number", int), ("token_count", int), ("tokens", bytes), ("created_at", float | int)),
)
_MOST_LEARNED = 4096  # bytes of a learned state, which takes 2,254 and 12 for each end token
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
        "session": record.session,
        "token_count": len(record.tokens),
        "tokens": packed,
        "size": len(packed),
        "created_at": record.created_at,
    }


def decode(row: sa.Row[Any]) -> SequenceRecord:
    """The sequence that a row holds. Raises `CacheFormatError`, which says what is wrong, for a damaged row."""
    if not is_sound(row, _KINDS):
        raise CacheFormatError("a value is not of its column's type")
    if not names_agree(row):
        raise CacheFormatError("its names are not those of its namespace")
    try:
        most = 4 * (min(row.token_count, _MOST_TOKENS) + DEPTH)
        packed = np.frombuffer(_inflate(row.tokens, most), dtype="<i4").astype(np.int32)
    except (zlib.error, ValueError) as error:
        raise CacheFormatError(str(error)) from error
    if not 0 <= row.token_count <= len(packed) or not math.isfinite(row.created_at):
        raise CacheFormatError("impossible numbers")
    if packed.view(np.uint32).max(initial=0) > MOST_TOKEN:  # negative ones too
        raise CacheFormatError("impossible token ids")
    split = len(packed) - row.token_count
    return SequenceRecord(
        row.number,
        namespace_of(row),
        row.session,
        packed[split:],
        packed[:split],
        float(row.created_at),
    )


def encode_learned(state: NDArray[np.uint8]) -> str:
    """What a drafter has learned, as the text that is stored: about a kilobyte, with a checksum."""
    return b85encode(zlib.compress(state.tobytes(), level=9)).decode()


def decode_learned(text: str) -> NDArray[np.uint8]:
    """The learned state that was stored. Raises `CacheFormatError` for a damaged text."""
    try:
        return np.frombuffer(_inflate(b85decode(text), _MOST_LEARNED), dtype=np.uint8)
    except (zlib.error, ValueError, TypeError) as error:
        raise CacheFormatError(str(error)) from error


def _inflate(packed: bytes, most: int) -> bytes:
    """Decompress what zlib packed. Raises `ValueError` for more than `most` bytes, `zlib.error` for damaged data."""
    stream = zlib.decompressobj()
    data = stream.decompress(packed, max(1, most))
    if not stream.eof:
        raise ValueError(f"more than {most} bytes, or cut off")
    return data


def namespace_of(row: sa.Row[Any]) -> Namespace:
    return Namespace(row.tenant, row.model_fingerprint, row.tokenizer_hash, row.template_hash)


def names_agree(row: sa.Row[Any]) -> bool:
    """Whether a row's names are those that its namespace is the key of."""
    names = row.tenant, row.model_fingerprint, row.tokenizer_hash, row.template_hash
    return all(isinstance(name, str) for name in names) and _key(*names) == row.namespace


@lru_cache(maxsize=1024)
def _key(*names: str) -> str:
    return Namespace(*names).key
