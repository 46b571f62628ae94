"""The triggers that keep `namespaces`, the running totals of `sequences`, whichever process inserts or deletes rows."""

from __future__ import annotations

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
