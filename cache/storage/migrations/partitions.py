"""The statements that divide `sequences` among partitions by tenant, in PostgreSQL.

What is deleted of a tenant is erased by writing its partition anew and not the whole table, and other partitions can be
used meanwhile. Time has no partitions but an index of ranges (BRIN): rows expire by the hour, and a partition for each
hour would be too many.

The rows move with their ids and numbers, which segments and followers go by.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from agentspec.cache.storage.migrations.totals import POSTGRES
from agentspec.cache.storage.schema import Name

COUNT = 8
"""Partitions. Each costs every query that names no tenant a look; more than these save little."""

_NAMES = "tenant", "session", "workflow", "step", "tokens"
_PARTITIONS = [f"sequences_p{number}" for number in range(COUNT)]

# Whoever opens the database, the table stays its owner's, and what others may do with it.
_AS_BEFORE = f"""
DO $$ DECLARE owner text; name text; may record; BEGIN
    SELECT relowner::regrole::text INTO owner FROM pg_class WHERE oid = 'sequences_whole'::regclass;
    FOREACH name IN ARRAY ARRAY['{"', '".join(("sequences", *_PARTITIONS))}'] LOOP
        EXECUTE 'ALTER TABLE ' || name || ' OWNER TO ' || owner;
    END LOOP;
    FOR may IN
        SELECT privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS grantee,
               CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS further
        FROM pg_class, aclexplode(relacl) WHERE oid = 'sequences_whole'::regclass AND grantee <> relowner
    LOOP
        EXECUTE 'GRANT ' || may.privilege_type || ' ON sequences TO ' || may.grantee || may.further;
    END LOOP;
END $$
"""

DIVIDE = (
    "ALTER TABLE sequences RENAME TO sequences_whole",
    "CREATE TABLE sequences (LIKE sequences_whole INCLUDING DEFAULTS INCLUDING STORAGE) PARTITION BY HASH (tenant)",
    *(
        f"CREATE TABLE {name} PARTITION OF sequences FOR VALUES WITH (MODULUS {COUNT}, REMAINDER {number})"
        for number, name in enumerate(_PARTITIONS)
    ),
    # The planner's statistics would keep deleted names and texts.
    *(
        f"ALTER TABLE {table} {', '.join(f'ALTER COLUMN {name} SET STATISTICS 0' for name in _NAMES)}"
        for table in ("sequences", *_PARTITIONS)
    ),
    _AS_BEFORE,
    "INSERT INTO sequences SELECT * FROM sequences_whole",
    "ALTER SEQUENCE sequences_id_seq OWNED BY sequences.id",
    "DROP TABLE sequences_whole",
    "ALTER TABLE sequences ADD CONSTRAINT sequences_pkey PRIMARY KEY (id, tenant)",
    "ALTER TABLE sequences ADD CONSTRAINT sequences_number_key UNIQUE (number, tenant)",
    "CREATE INDEX ix_sequences_namespace ON sequences (namespace)",
    "CREATE INDEX ix_sequences_tenant ON sequences (tenant, id, size)",
    "CREATE INDEX ix_sequences_created_at ON sequences USING brin (created_at)",
    *(statement for statement in POSTGRES if "CREATE TRIGGER" in statement),
)


def partitions_of(connection: sa.Connection, tenants: Collection[str]) -> list[str]:
    """The names of the partitions that hold the rows of these tenants."""
    query = sa.text(
        f"SELECT DISTINCT number FROM generate_series(0, {COUNT - 1}) AS number,"
        " unnest(CAST(:tenants AS varchar[])) AS name"
        f" WHERE satisfies_hash_partition('sequences'::regclass, {COUNT}, number, name) ORDER BY number"
    ).bindparams(sa.bindparam("tenants", list(tenants), sa.ARRAY(Name)))
    return [_PARTITIONS[number] for number in connection.execute(query).scalars()]
