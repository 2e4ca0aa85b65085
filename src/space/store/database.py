"""The connection to SQLite or PostgreSQL: who may read, who may write, and the schema's version.

A transaction is a plain function of a connection, run away from the event loop: it cannot await anything, so no
transaction is ever open while the world is touched, and a cancelled caller cannot leave half of one.

SQLite has one writer thread and several readers, each with a connection of its own; writers queue in order of arrival.
A commit is on disk when it returns (``synchronous=FULL``), so an accepted operation survives a power cut.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import alembic.command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine

from space.errors import HostError, HostFull, Unavailable

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_S = 10
WAL_PAUSE_S = 0.01
READERS = 4
POOL = 10
TRANSACTION_TIMEOUT_S = 30

Result = TypeVar("Result")
Transaction = Callable[[Connection], Result]


class Database:
    """One store. ``read`` and ``write`` run a function of a connection as one transaction and return its result."""

    def __init__(self, url: str) -> None:
        self._backend = _backend(url)
        self.took: Callable[[str, float], None] = lambda _access, _seconds: None
        """Told of every transaction: ``read`` or ``write``, and how long it took, its waiting included."""
        self.generation = 0
        """Counts this process's writes, at start and end: what was read under another number may be out of date."""

    async def read(self, transaction: Transaction[Result]) -> Result:
        """Run ``transaction`` on a view of one moment. Raises ``Unavailable`` when the database does not answer."""
        began = time.perf_counter()
        try:
            return await _bounded(self._backend.read, transaction)
        finally:
            self.took("read", time.perf_counter() - began)

    async def write(self, transaction: Transaction[Result]) -> Result:
        """Run ``transaction`` and commit what it did, or nothing of it when it raises.

        A caller that is cancelled meanwhile does not know which; the transaction itself is whole either way.
        """
        self.generation += 1
        began = time.perf_counter()
        try:
            return await _bounded(self._backend.write, transaction)
        finally:
            self.generation += 1
            self.took("write", time.perf_counter() - began)

    async def migrate(self) -> None:
        """Bring the schema to this version's, or raise ``HostError`` when it is a later version's."""
        await _bounded(self._backend.write, _upgrade)

    async def close(self) -> None:
        await self._backend.close()


class _Sqlite:
    def __init__(self, url: URL) -> None:
        self._writer = _sqlite_engine(url, connections=1, readonly=False)
        self._reader = _sqlite_engine(url, connections=READERS, readonly=True)
        self._writing = ThreadPoolExecutor(1, "store-writer")
        self._reading = ThreadPoolExecutor(READERS, "store-reader")

    async def read(self, transaction: Transaction[Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._reading, _run, self._reader, transaction)

    async def write(self, transaction: Transaction[Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._writing, _run, self._writer, transaction)

    async def close(self) -> None:
        for executor, engine in ((self._writing, self._writer), (self._reading, self._reader)):
            await asyncio.to_thread(executor.shutdown)
            engine.dispose()


class _Postgres:
    def __init__(self, url: URL) -> None:
        self._engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg"), pool_size=POOL, max_overflow=0, pool_pre_ping=True
        )

    async def read(self, transaction: Transaction[Result]) -> Result:
        return await self.write(transaction)

    async def write(self, transaction: Transaction[Result]) -> Result:
        async with self._engine.begin() as connection:
            return await connection.run_sync(transaction)

    async def close(self) -> None:
        await self._engine.dispose()


def _backend(url: str) -> _Sqlite | _Postgres:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise HostError("store_url is not a URL.", code="invalid-settings", key="store_url") from error
    match parsed.get_backend_name():
        case "sqlite":
            return _Sqlite(parsed.set(drivername="sqlite"))
        case "postgresql":
            return _Postgres(parsed)
        case other:
            message = f"store_url must be a sqlite or postgresql URL, not {other}."
            raise HostError(message, code="invalid-settings", key="store_url")


async def _bounded(run: Callable[[Transaction[Result]], Any], transaction: Transaction[Result]) -> Result:
    with _own_errors():
        async with asyncio.timeout(TRANSACTION_TIMEOUT_S):
            return await run(transaction)


@contextlib.contextmanager
def _own_errors() -> Generator[None]:
    try:
        yield
    except (PoolTimeout, TimeoutError, OSError) as error:
        raise Unavailable("The store does not answer.", code="store-unavailable") from error
    # SQLAlchemy's message quotes the statement's values, which may be a caller's: keep only the class.
    except (DataError, IntegrityError, ProgrammingError) as error:
        raise HostError(f"The store refused a statement ({type(error).__name__}).", code="store-failed") from None
    except DBAPIError as error:
        if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise HostFull("The host's disk is full: nothing can be recorded.") from None
        raise Unavailable(f"The store failed ({type(error).__name__}).", code="store-unavailable") from None
    except SQLAlchemyError as error:
        raise HostError(f"The store failed ({type(error).__name__}).", code="store-failed") from None


def _run(engine: Engine, transaction: Transaction[Result]) -> Result:
    with engine.begin() as connection:
        return transaction(connection)


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # Two processes starting at once must not migrate side by side.
        connection.execute(text("select pg_advisory_xact_lock(7783301)"))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, "head")
    except CommandError as error:
        message = f"The store's schema cannot be brought to this version: {error}"
        raise HostError(message, code="store-version") from error


def _use_wal(connection: Any) -> None:
    """Two that begin with a new file at once are in each other's way, and SQLite lets neither wait for that."""
    ends = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
            time.sleep(WAL_PAUSE_S)
        else:
            return


def _sqlite_engine(url: URL, *, connections: int, readonly: bool) -> Engine:
    engine = create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        pool_reset_on_return=None,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        # The driver must not open transactions by itself: `_begin` does.
        connection.isolation_level = None
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA temp_store=MEMORY")
        if readonly:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # A deferred transaction that reads and then writes fails when another process wrote in between.
        connection.exec_driver_sql("BEGIN" if readonly else "BEGIN IMMEDIATE")

    return engine
