"""Copies every row that can be read from a damaged SQLite database into an empty one, whatever tables there are."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agentspec.cache.storage.migrations.totals import FILL
from agentspec.cache.storage.schema import VERSION, deletions, meta, namespaces, processes, revision, sequences

_PIECE = 256  # rows that are read at a time
_ONE_BY_ONE = 4096  # ids in a row without a readable one; then ever more are passed over
_PIECE_BYTES = 1 << 20
_LAST = 2**63 - 1
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_NOTADB)
_RESTORED = (meta.name, revision.name, namespaces.name, processes.name)  # what they held is known from elsewhere
_UNREADABLE = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)  # by the disk
_KINDS: dict[str, tuple[type, ...]] = {
    "VARCHAR": (str,),
    "BLOB": (bytes,),
    "FLOAT": (float, int),
    **dict.fromkeys(("INTEGER", "BIGINT", "BOOLEAN"), (int,)),
}

Row = tuple[object, ...]  # its id, then the values


@dataclass(slots=True)
class _Table:
    name: str
    columns: list[str]
    counts: bool  # whether its ids are never used twice
    seen: set[int] = field(default_factory=set)
    gaps: list[tuple[int, int]] = field(default_factory=list)  # ranges of ids in which rows cannot be read

    @property
    def values(self) -> str:
        return ", ".join(f'"{name}"' for name in ("rowid", *self.columns))


def salvage(source: sqlite3.Connection, target: sqlite3.Connection) -> list[str]:
    """Copy all that can be read; returns what cannot, a line for each table. Raises `sqlite3.DatabaseError` where not
    even the list of tables can be read.

    Afterwards `target` keeps every promise of the tables: totals are counted anew, no id is handed out twice, and where
    deletions were lost, one that covers everything tells other processes to look for themselves.
    """
    listed = source.execute("SELECT type, name, sql FROM sqlite_master ORDER BY rowid").fetchall()
    texts = [row for row in listed if all(isinstance(value, str) for value in row)]  # others make themselves
    once = {name: (kind, name, sql) for kind, name, sql in reversed(texts)}  # damage may list one twice
    made = [one for name, one in reversed(once.items()) if not name.startswith("sqlite_")]
    names = {name for kind, name, _ in made if kind == "table"}
    if not {sequences.name, meta.name, deletions.name} <= names:
        error = sqlite3.DatabaseError("tables are missing")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    expected = _expected(source)
    lost: list[str] = []
    copied: dict[str, _Table] = {}
    for kind, name, sql in made:
        if kind == "table":
            target.execute(sql)
            copied[name] = _copy(source, target, name, counts="AUTOINCREMENT" in sql)
            if name not in _RESTORED:
                lost += _missing(target, copied[name], expected if name == sequences.name else None)
    for kind, _, sql in made:
        if kind != "table":
            target.execute(sql)
    _restore_version(target, names)
    _restore_counters(source, target, [table for table in copied.values() if table.counts])
    if namespaces.name in names:
        target.execute(f"DELETE FROM {namespaces.name}")
        target.execute(FILL)
    _note_lost_deletions(target)
    return lost


def _expected(source: sqlite3.Connection) -> int | None:
    """How many sequences there were, as far as the totals tell."""
    with contextlib.suppress(sqlite3.Error):
        found = source.execute(f"SELECT sum(sequences) FROM {namespaces.name}").fetchone()[0]
        return found if isinstance(found, int) else None
    return None


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, name: str, *, counts: bool) -> _Table:
    columns = target.execute(f'PRAGMA table_info("{name}")').fetchall()
    types = [_KINDS.get(column[2].partition("(")[0], (object,)) for column in columns]
    table = _Table(name, [column[1] for column in columns], counts)
    insert = f'INSERT OR IGNORE INTO "{name}" ({table.values}) VALUES ({", ".join("?" * (len(columns) + 1))})'
    for row in _rows(source, table):
        table.seen.add(int(row[0]))  # type: ignore[call-overload]
        if all(map(_is_sound, row[1:], types)):
            target.execute(insert, [_storable(value) for value in row])
    return table


def _is_sound(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value can be its column's. Where pages were exchanged it is of another row, or of another table, which
    the checksum tells: all bytes are zlib's.
    """
    if value is None:
        return True
    return isinstance(value, kinds) and (not value or not isinstance(value, bytes) or _is_whole(value))


def _is_whole(packed: bytes) -> bool:
    stream = zlib.decompressobj()
    try:
        while packed and not stream.eof:
            stream.decompress(packed, _PIECE_BYTES)
            packed = stream.unconsumed_tail
    except zlib.error:
        return False
    return stream.eof and not stream.unused_data


def _storable(value: object) -> object:
    """Text whose bytes are damaged cannot be written as it was read."""
    return value.encode(errors="surrogateescape").decode(errors="replace") if isinstance(value, str) else value


def _rows(source: sqlite3.Connection, table: _Table) -> Iterator[Row]:
    """The rows that can be read, some of them more than once.

    In the table's own order first, which finds rows that stand where no search looks for them; past damage from the
    other end, then between the two by one search for each.
    """
    query = f'SELECT {table.values} FROM "{table.name}" NOT INDEXED ORDER BY rowid'
    for order in ("", " DESC"):
        try:
            yield from source.execute(query + order)
            return
        except sqlite3.DatabaseError as error:
            require_damage(error)
    yield from _searched(source, table)


def _searched(source: sqlite3.Connection, table: _Table) -> Iterator[Row]:
    after = f'SELECT {table.values} FROM "{table.name}" NOT INDEXED WHERE rowid > ? ORDER BY rowid LIMIT ?'
    low, count, failed, step = 0, _PIECE, 0, 1
    while low < _LAST:
        rows: list[Row] | None = None
        with _past_damage():
            rows = source.execute(after, (low, count)).fetchall()
        if rows == []:
            return
        yield from rows or ()
        if (last := _last_in_order(rows or (), low)) > low:
            low, count, failed, step = last, min(_PIECE, count * 16), 0, 1
        elif count > 1:
            count = max(1, count // 16)
        else:
            if not failed:
                table.gaps.append((low + 1, low + 1))
            failed += 1
            step = step if failed < _ONE_BY_ONE else 2 * step
            low = min(_LAST, low + step)
            table.gaps[-1] = (table.gaps[-1][0], low)


@contextlib.contextmanager
def _past_damage() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        require_damage(error)


def _last_in_order(rows: Iterable[Row], low: int) -> int:
    """The last id of those that go up from `low`: a search in a damaged tree may lead to where it has been before."""
    for row in rows:
        if not (isinstance(row[0], int) and row[0] > low):
            break
        low = row[0]
    return low


def _missing(target: sqlite3.Connection, table: _Table, expected: int | None) -> list[str]:
    """What of a table could not be copied."""
    [there] = target.execute(f'SELECT count(*) FROM "{table.name}"').fetchone()
    odd = len(table.seen) - there
    lines = [f"{table.name}: {odd} rows are of another table, or damaged"] if odd > 0 else []
    if expected is not None and expected > there + max(0, odd):
        return [*lines, f"{table.name}: {expected - there} of {expected} rows cannot be read"]
    gaps = [(first, last) for first, last in table.gaps if not {first, last} <= table.seen]
    where = ", ".join(f"from {first} on" if last == _LAST else f"{first} to {last}" for first, last in gaps)
    return [*lines, f"{table.name}: rows that cannot be read: {where}"] if gaps else lines


def _restore_version(target: sqlite3.Connection, names: set[str]) -> None:
    """The version is written in two tables, either of which may be lost, or hold another table's rows."""
    written = [f"SELECT value FROM {meta.name} WHERE key = 'version'"]
    if revision.name in names:
        written.append(f"SELECT version_num FROM {revision.name}")
    values = [str(value) for query in written for [value] in target.execute(query)]
    known = [int(value) for value in values if value.isdecimal() and 0 < int(value) <= VERSION]
    version = known[0] if known else VERSION
    target.execute(f"DELETE FROM {meta.name}")
    target.execute(f"INSERT INTO {meta.name} VALUES ('version', ?)", (str(version),))
    if revision.name in names:
        target.execute(f"DELETE FROM {revision.name}")
        target.execute(f"INSERT INTO {revision.name} VALUES (?)", (f"{version:04}",))


def _restore_counters(source: sqlite3.Connection, target: sqlite3.Connection, tables: list[_Table]) -> None:
    """Hand out no id twice: other processes would take what is new for what they have seen."""
    last = {table.name: max(table.seen, default=0) for table in tables}
    known: dict[object, object] | None = {}
    try:
        known = dict(source.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
        sound = all(_counted(known.get(name, 0), least) for name, least in last.items()) and known.keys() <= last.keys()
    except sqlite3.DatabaseError:
        sound = False
    for name, least in last.items():
        value = known.get(name, 0) if sound and known else _beyond(target, name, least)
        target.execute("DELETE FROM sqlite_sequence WHERE name = ?", (name,))
        target.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, value))


def _counted(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < _LAST


def _beyond(target: sqlite3.Connection, name: str, least: int) -> int:
    """An id that was surely not reached: ids of rows go on from the clock, those of processes have 31 bits."""
    if name != processes.name:
        return max(least, int(time.time()) << 20)
    [lowest] = target.execute(f"SELECT min(number) FROM {sequences.name}").fetchone()
    return max(least, -((lowest or 0) >> 32)) + (1 << 20)


def _note_lost_deletions(target: sqlite3.Connection) -> None:
    """No deletion's row ever goes: where some are missing, other processes may not know what they cover."""
    [there] = target.execute(f"SELECT count(*) FROM {deletions.name}").fetchone()
    [made] = target.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = ?", (deletions.name,)).fetchone()
    if there != (made or 0):
        insert = f"INSERT INTO {deletions.name} (created_at, salt, searched) VALUES (?, '', 0)"
        target.execute(insert, (time.time(),))


def require_damage(error: sqlite3.DatabaseError) -> None:
    """Raise what says nothing of the rows: a lock, no memory, no room."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF not in DAMAGE and code not in _UNREADABLE:
        raise error
