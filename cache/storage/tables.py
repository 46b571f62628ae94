"""Prepares a database at opening: creates its tables, or refuses those of another version."""

from __future__ import annotations

import sqlalchemy as sa

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import VERSION, damaged, meta, metadata
from agentspec.errors import CacheFormatError, CacheVersionError

# The triggers that keep `namespaces`, the running totals of `sequences`, whichever process adds or deletes rows.
_NAMES = "tenant, model_fingerprint, tokenizer_hash, template_hash"

_ADDED = "sequences = {t}sequences + ({n}), tokens = {t}tokens + ({k}), bytes = {t}bytes + ({b})"

SQLITE = (
    f"""
CREATE TRIGGER sequences_added AFTER INSERT ON sequences BEGIN
    INSERT INTO namespaces (key, {_NAMES}, sequences, tokens, bytes, last)
    SELECT NEW.namespace, NEW.tenant, NEW.model_fingerprint, NEW.tokenizer_hash, NEW.template_hash, 0, 0, 0, 0
    WHERE NOT EXISTS (SELECT 1 FROM namespaces WHERE key = NEW.namespace);
    UPDATE namespaces SET last = NEW.id, {_ADDED.format(t="", n="1", k="NEW.token_count", b="NEW.size")}
    WHERE key = NEW.namespace;
END
""",
    f"""
CREATE TRIGGER sequences_deleted AFTER DELETE ON sequences BEGIN
    UPDATE namespaces SET {_ADDED.format(t="", n="-1", k="-OLD.token_count", b="-OLD.size")} WHERE key = OLD.namespace;
    DELETE FROM namespaces WHERE key = OLD.namespace AND sequences <= 0;
END
""",
)

_FUNCTION = "RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS"

POSTGRES = (
    f"""
CREATE FUNCTION agentspec_sequences_added() {_FUNCTION} $$ BEGIN
    INSERT INTO namespaces (key, {_NAMES}, sequences, tokens, bytes, last)
    SELECT namespace, max(tenant), max(model_fingerprint), max(tokenizer_hash), max(template_hash),
           count(*), sum(token_count), sum(size), max(id)
    FROM added GROUP BY namespace
    ON CONFLICT (key) DO UPDATE
    SET {_ADDED.format(t="namespaces.", n="excluded.sequences", k="excluded.tokens", b="excluded.bytes")},
        last = excluded.last;
    RETURN NULL;
END $$
""",
    f"""
CREATE FUNCTION agentspec_sequences_deleted() {_FUNCTION} $$ BEGIN
    UPDATE namespaces SET {_ADDED.format(t="namespaces.", n="-gone.n", k="-gone.k", b="-gone.b")}
    FROM (SELECT namespace, count(*) AS n, sum(token_count) AS k, sum(size) AS b FROM deleted GROUP BY namespace)
         AS gone
    WHERE key = gone.namespace;
    DELETE FROM namespaces WHERE sequences <= 0 AND key IN (SELECT namespace FROM deleted);
    RETURN NULL;
END $$
""",
    """
CREATE TRIGGER sequences_added AFTER INSERT ON sequences REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION agentspec_sequences_added()
""",
    """
CREATE TRIGGER sequences_deleted AFTER DELETE ON sequences REFERENCING OLD TABLE AS deleted
    FOR EACH STATEMENT EXECUTE FUNCTION agentspec_sequences_deleted()
""",
)

TRIGGERS = {"sqlite": SQLITE, "postgresql": POSTGRES}


def prepare(database: Database) -> None:
    """Create the tables where there are none, in one transaction, even while other processes do.

    Raises `CacheVersionError` if they are of another version, and `CacheFormatError` if they are damaged, or another
    program's.
    """
    with database.engine.connect() as connection:
        if is_prepared(connection, database):  # the usual case, which takes no lock
            return
    with database.writing() as connection:
        if not is_prepared(connection, database):
            metadata.create_all(connection)
            for statement in TRIGGERS[connection.dialect.name]:
                connection.exec_driver_sql(statement)
            connection.execute(meta.insert().values(key="version", value=str(VERSION)))


def is_prepared(connection: sa.Connection, database: Database) -> bool:
    """Whether the tables are there. Raises as `prepare`."""
    name, tables = database.name, set(sa.inspect(connection).get_table_names())
    if not tables:
        return False
    if meta.name not in tables:
        raise CacheFormatError(f"{name} is another program's database; choose another")
    if missing := metadata.tables.keys() - tables:
        database.mark_damage()
        raise damaged(name, f"without {', '.join(sorted(missing))}")
    version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar()
    if version == str(VERSION):
        return True
    if version is None or not version.isdecimal():
        database.mark_damage()
        raise damaged(name, f"version {version!r}")
    raise CacheVersionError(
        f"{name} is of version {version}, and this agentspec reads version {VERSION} alone: use the agentspec that"
        " wrote it (its `cache export` takes the sequences along), or move the database away to start a new cache"
    )
