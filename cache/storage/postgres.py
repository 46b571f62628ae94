"""PostgreSQL: several machines can share a cache in a database, or in a schema on the search path."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.schema import metadata
from agentspec.errors import CacheLockedError, ConfigurationError, extra_of, install_advice

SCHEMES = ("postgresql", "postgresql+psycopg")

_log = logging.getLogger(__name__)

# Keys of the advisory locks: the kind and the schema's name, so that one database can hold several caches.
_WRITER, _ORDER = 0x61675701, 0x61675702
_KEY = "hashtext(current_schema()::text)"
_TABLES = ", ".join(metadata.tables)
_HELD = (  # the writer's lock, where a session holds it
    f"locktype = 'advisory' AND classid = {_WRITER} AND objid = ({_KEY}::bigint & 4294967295)::oid AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)

_NETWORK = {
    "connect_timeout": 5,  # seconds
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # milliseconds
}

# SQLSTATE classes and codes of transient errors: connection, resources, operator intervention, conflicts, a standby.
_PASSING = re.compile("08|53|57P|57014|40001|40P01|55P03|25006|25P03|58030")

_LIMITS = "54"  # such as the size of an index's row

_DAMAGE = ("XX", "22")  # pages and large values that cannot be read; data that cannot be converted


class PostgresDatabase(Database):
    """A PostgreSQL database. Raises `ConfigurationError` for an invalid address. Connects at first use."""

    folder = None
    overwrites = False

    def __init__(self, address: str) -> None:
        url = _url(address)
        self.name = url.render_as_string(hide_password=True)
        defaults = {key: value for key, value in _NETWORK.items() if key not in url.query}
        try:
            self.engine = sa.create_engine(url, pool_pre_ping=True, hide_parameters=True, connect_args=defaults)
        except ModuleNotFoundError as error:
            if not extra_of(error.name, ["postgres"]):
                raise
            message = f"{self.name} needs {error.name}; {install_advice('postgres')}"
            raise ConfigurationError(message, param="path") from None
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        event.listen(self.engine, "connect", lambda connection, _: self._connections.add(connection))
        self._refuse_when_closed()
        self._lease: sa.Connection | None = None
        self._session = 0  # the server's number of the session that holds the lease
        self._is_candidate = False
        self._lock = threading.Lock()

    # The writer holds a session-level advisory lock on a dedicated connection, and loses it with the connection.

    def acquire_writer(self) -> None:
        with self._lock:
            self._is_candidate = True
            self._lease = self._acquire_lease()

    @property
    def is_writer(self) -> bool:
        return self._lease is not None

    def renew_lease(self) -> None:
        with self._lock, contextlib.suppress(CacheLockedError):
            if self._lease is not None:
                try:
                    self._lease.exec_driver_sql("SELECT 1")
                    return
                except exc.DBAPIError as error:
                    _log.warning("no longer the writer of %s: %s", self.name, reason(error))
                    self._release_lease()
            if self._is_candidate:
                self._lease = self._acquire_lease()

    def confirm_writer(self, connection: sa.Connection) -> bool:
        query = f"SELECT EXISTS (SELECT FROM pg_locks WHERE {_HELD} AND pid = %s)"
        return self.is_writer and bool(connection.exec_driver_sql(query, (self._session,)).scalar())

    def _acquire_lease(self) -> sa.Connection:
        with self.engine.connect() as connection:  # asked often: no connection is made while another process has it
            holder = f"SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE {_HELD}"
            if name := connection.exec_driver_sql(holder).scalar():
                raise self._locked_by(str(name).removeprefix("agentspec writer: "))
        connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # a connection back in the pool would keep the lock
        try:
            # The session's name tells others who the writer is: the server does not know a client's process id.
            name = f"agentspec writer: process {os.getpid()} on {socket.gethostname()}"[:63]
            connection.execute(sa.text("SELECT set_config('application_name', :name, false)"), {"name": name})
            if connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_WRITER}, {_KEY})").scalar_one():
                self._session = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                return connection
            raise self._locked_by("another process")
        except BaseException:
            connection.close()
            raise

    def _locked_by(self, holder: str) -> CacheLockedError:
        return CacheLockedError(f"{self.name} is written by {holder}; open it as a follower")

    def _release_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        with contextlib.suppress(exc.SQLAlchemyError):  # it may be broken
            # Closing alone would keep the lock until the server has noticed.
            lease.exec_driver_sql(f"SELECT pg_advisory_unlock({_WRITER}, {_KEY})")
        with contextlib.suppress(exc.SQLAlchemyError):
            lease.close()

    # Work.

    def connect(self) -> None:
        with self.engine.connect():
            pass

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        with self.engine.begin() as connection:
            # Do not wait for a process that hangs, and do not keep others waiting if this one hangs.
            connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '60s'")
            # A row gets its id at insert and becomes visible at commit. Without this lock, held until the commit,
            # id 7 might appear after a follower has read up to id 8.
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ORDER}, {_KEY})")
            yield connection

    def disk_bytes(self) -> int:
        with self.engine.connect() as connection:
            listed = ", ".join(f"'{table}'" for table in metadata.tables)
            query = f"SELECT sum(pg_total_relation_size(one::regclass)) FROM unnest(ARRAY[{listed}]) AS one"
            return int(connection.exec_driver_sql(query).scalar_one())

    def shrink(self) -> bool:
        return self.secure_erase(rewrite=True)  # a plain VACUUM keeps the room for new rows

    def secure_erase(self, *, rewrite: bool) -> bool:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("SET lock_timeout = '5s'")
            try:
                connection.exec_driver_sql(f"VACUUM {'(FULL)' if rewrite else ''} {_TABLES}")
            except exc.DBAPIError as error:
                if not self.is_transient(error):
                    raise
                return False
            finally:
                if not connection.invalidated:
                    connection.exec_driver_sql("RESET lock_timeout")
        return True

    def problems(self) -> list[str]:
        return []  # a server checks its pages itself, as they are read

    def is_transient(self, error: BaseException) -> bool:
        if not isinstance(error, exc.DBAPIError):
            return isinstance(error, exc.TimeoutError)
        state = getattr(error.orig, "sqlstate", None)
        if state is None:  # it did not come from the server
            return isinstance(error, exc.OperationalError | exc.InterfaceError)
        return _PASSING.match(state) is not None

    def is_damage(self, error: BaseException) -> bool:
        state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
        return state.startswith(_DAMAGE)

    def is_refusal(self, error: BaseException) -> bool:
        state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
        return state.startswith(_LIMITS) or super().is_refusal(error)

    def leave_behind(self, reason: str) -> None:
        # Whenever the copies of the parent's connections are closed, nothing of it must reach the server.
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for connection in list(self._connections):
            if not connection.closed:
                os.dup2(nowhere, connection.fileno(), inheritable=False)
        os.close(nowhere)
        super().leave_behind(reason)

    def close(self) -> None:
        with self._lock:
            self._is_candidate = False
            self._release_lease()
        super().close()


def _url(address: str) -> sa.URL:
    """The address as a URL; a password in its query moves to where SQLAlchemy can hide it."""
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        known = " or ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigurationError(f"path must be a folder, or begin with {known}, not with {scheme}://", param="path")
    try:
        url = sa.make_url(address).set(drivername="postgresql+psycopg")
    except (exc.ArgumentError, ValueError):
        form = "postgresql://user@host:5432/database"
        raise ConfigurationError(f"path is no address of a database; write {form}", param="path") from None
    if isinstance(password := url.query.get("password"), str):
        url = url.difference_update_query(["password"]).set(password=password)
    return url
