"""The connection to SQLite or PostgreSQL: who may read, who may write, and the schema's version.

SQLite has one writer and several readers, each on its own connection; writers queue in order of arrival. A commit is on
disk when it returns (``synchronous=FULL`` costs a quarter of a millisecond here), so that an accepted operation
survives a power cut too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import alembic.command
from alembic.config import Config
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from space.errors import HostError, Unavailable

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_MS = 10_000
READERS = 4
POOL = 10
TRANSACTION_TIMEOUT_S = 30


class Database:
    """One store. ``read`` and ``write`` give a connection inside a transaction; no transaction outlives its block.

    Keep the blocks free of other awaits: while one is open in ``write``, SQLite's other writers wait.
    """

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            parsed = parsed.set(drivername="postgresql+asyncpg")
        elif parsed.get_backend_name() == "sqlite":
            parsed = parsed.set(drivername="sqlite+aiosqlite")
        else:
            raise HostError("store_url must be a sqlite or postgresql URL.", code="invalid-settings", key="store_url")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self._writer = _sqlite_engine(parsed, pool_size=1, readonly=False)
            self._reader = _sqlite_engine(parsed, pool_size=READERS, readonly=True)
            self._turn: contextlib.AbstractAsyncContextManager[Any] = asyncio.Lock()
        else:
            self._writer = create_async_engine(parsed, pool_size=POOL, max_overflow=0, pool_pre_ping=True)
            self._reader = self._writer
            self._turn = contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncConnection]:
        """Open a read-only view of one moment. Raises ``Unavailable`` when the database does not answer."""
        with _foreign_errors():
            async with asyncio.timeout(TRANSACTION_TIMEOUT_S), self._reader.begin() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncGenerator[AsyncConnection]:
        """Open a transaction: everything in the block is committed at its end, or nothing when it raises."""
        with _foreign_errors():
            async with asyncio.timeout(TRANSACTION_TIMEOUT_S), self._turn, self._writer.begin() as connection:
                yield connection

    async def migrate(self) -> None:
        """Bring the schema to this version's, or raise ``HostError`` when it is a later version's."""
        async with self._writer.begin() as connection:
            if not self.is_sqlite:
                # Two processes starting at once must not migrate side by side.
                await connection.execute(text("select pg_advisory_xact_lock(7783301)"))
            await connection.run_sync(_upgrade)

    async def close(self) -> None:
        await self._writer.dispose()
        if self._reader is not self._writer:
            await self._reader.dispose()


@contextlib.contextmanager
def _foreign_errors() -> Generator[None]:
    try:
        yield
    except (PoolTimeout, TimeoutError, OSError) as error:
        raise Unavailable("The store does not answer.", code="store-unavailable") from error
    except DBAPIError as error:
        # SQLAlchemy's message quotes the statement's values, which may be a caller's: keep only the driver's class.
        raise Unavailable(f"The store failed ({type(error.orig).__name__}).", code="store-unavailable") from None
    except SQLAlchemyError as error:
        raise HostError(f"The store failed ({type(error).__name__}).", code="store-failed") from None


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, "head")
    except alembic.command.util.CommandError as error:
        raise HostError(
            f"The store's schema cannot be brought to this version: {error}", code="store-version"
        ) from error


def _sqlite_engine(url: Any, *, pool_size: int, readonly: bool) -> AsyncEngine:
    engine = create_async_engine(
        url, pool_size=pool_size, max_overflow=0, connect_args={"timeout": BUSY_TIMEOUT_MS / 1e3}
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        # The driver must not open transactions by itself: a write starts with BEGIN IMMEDIATE below.
        connection.isolation_level = None
        cursor = connection.cursor()
        if not readonly:
            cursor.execute("PRAGMA journal_mode=WAL")
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "synchronous=FULL",
            "foreign_keys=ON",
            "temp_store=MEMORY",
            f"query_only={'ON' if readonly else 'OFF'}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.exec_driver_sql("BEGIN" if readonly else "BEGIN IMMEDIATE")

    return engine
