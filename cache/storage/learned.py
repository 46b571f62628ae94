"""What the drafters of namespaces had learned when a process closed the cache, as values of the table of all caches.

No version of the tables changes by it: a database without such values is as good, and others leave them alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from agentspec.cache.storage import codec
from agentspec.cache.storage.database import Database, write_rows
from agentspec.cache.storage.schema import meta, sequences

_PREFIX = "learned "  # of the keys, before that of the namespace


def read(connection: sa.Connection, namespace: str) -> NDArray[np.uint8] | None:
    """The state of a namespace; None where there is none. Raises `CacheFormatError` where it is damaged."""
    query = sa.select(meta.c.value).where(meta.c.key == _PREFIX + namespace)
    text = connection.execute(query).scalar()
    return None if text is None else codec.decode_learned(text)


def write(database: Database, connection: sa.Connection, states: Mapping[str, NDArray[np.uint8]]) -> None:
    """Replace the states of these namespaces, and drop those of which no sequence is stored."""
    insert = database.insert(meta)
    insert = insert.on_conflict_do_update(index_elements=[meta.c.key], set_={"value": insert.excluded.value})
    rows = [{"key": _PREFIX + key, "value": codec.encode_learned(state)} for key, state in states.items()]
    write_rows(database, connection, insert, rows)
    stored = sa.exists().where(_PREFIX + sequences.c.namespace == meta.c.key)
    connection.execute(meta.delete().where(meta.c.key.startswith(_PREFIX), ~stored))


def forget(connection: sa.Connection, some: sa.ColumnElement[bool]) -> None:
    """Drop the states of the namespaces of some sequences: they hold the tokens that outputs ended with."""
    keys = sa.select(_PREFIX + sequences.c.namespace).where(some)
    connection.execute(meta.delete().where(meta.c.key.in_(keys)))
