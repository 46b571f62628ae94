"""Exports stored sequences to a file and imports them again without adding duplicates.

A file begins with `{"agentspec_export": 1}`; every further line is one sequence, with its namespace and the last tokens
of the prompt before it. Sequence numbers, which only mean something to a running process, are not exported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from agentspec.cache.index import DEPTH
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.tokens import SequenceRecord, as_tokens
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.types import Labels, Namespace

VERSION = 1
HEADER = {"agentspec_export": VERSION}
_WAITING = 1 << 20  # tokens put into the store before `add` waits until they are written


def write(path: Path, rows: Iterable[SequenceRecord]) -> int:
    """Write sequences to `path`, readable by its owner only, whole or not at all; returns how many.

    Raises `ConfigurationError` if the file cannot be written, and passes on what `rows` raises.
    """
    written = 0
    with replacing(path) as file:
        file.write(_line(HEADER))
        for row in rows:
            file.write(_line(_record(row)))
            written += 1
    return written


def parse(line: bytes, place: str) -> SequenceRecord | None:
    """The sequence on a line, with number 0; None for a file's header line. Raises `ConfigurationError`."""
    try:
        record = json.loads(line)
        if "agentspec_export" in record:
            _check_version(record["agentspec_export"], place)
            return None
        row = SequenceRecord(
            0,
            Namespace(**record["namespace"]),
            Labels(record["session"], record["workflow"], record["step"]),
            as_tokens(record["tokens"]).copy(),
            as_tokens(record["context"]).copy(),
            float(record["created_at"]),
        )
        named = all(isinstance(name, str | None) for name in asdict(row.labels).values())
        named = named and all(isinstance(name, str) for name in asdict(row.namespace).values())
        if not len(row.tokens) or len(row.context) > DEPTH or not named or not math.isfinite(row.created_at):
            raise ValueError("no tokens, too many tokens before them, a name that is no string, or an impossible time")
    except (ValueError, KeyError, TypeError, AttributeError, InvalidRequestError) as error:
        raise ConfigurationError(f"{place}: not an exported sequence ({type(error).__name__}: {error})") from None
    return row


def add(store: SequenceStore, rows: Iterable[SequenceRecord]) -> tuple[int, int]:
    """Store the sequences that the store lacks, and wait until they are durable; returns (added, known).

    Each stored sequence with the same namespace, labels, tokens and end of the prompt stands for one of `rows`: a file
    that is imported again adds nothing, and an output that a workflow generated twice stays in the store twice.
    Raises `CacheError` if the sequences cannot be written.
    """
    there = Counter(map(identity, store.records()))
    added = known = waiting = 0
    for row in rows:
        if there[key := identity(row)] > 0:
            there[key] -= 1
            known += 1
            continue
        store.put(replace(row, sequence=next(store.numbering)))
        added, waiting = added + 1, waiting + len(row.tokens)
        if waiting > _WAITING:
            store.flush()
            waiting = 0
    store.flush()
    return added, known


def identity(row: SequenceRecord) -> bytes:
    """A hash over namespace, labels, context and tokens: equal for equal sequences, whenever they were stored."""
    names = json.dumps([row.namespace.key, row.labels.session, row.labels.workflow, row.labels.step])
    digest = hashlib.sha256(names.encode())
    for tokens in (row.context, row.tokens):
        digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes())
    return digest.digest()


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _record(row: SequenceRecord) -> dict[str, Any]:
    return {
        "namespace": asdict(row.namespace),
        **asdict(row.labels),
        "created_at": row.created_at,
        "context": row.context.tolist(),
        "tokens": row.tokens.tolist(),
    }


def _check_version(version: Any, place: str) -> None:
    if version != VERSION:
        raise ConfigurationError(
            f"{place}: an export of version {version!r}, not {VERSION}: update agentspec to read it"
        )


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside `path`, readable by its owner only, that replaces it at the end, once it is on disk.

    Raises `ConfigurationError` if it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)  # mode 0600
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from error
        raise
