"""One record for each request: kept to be asked for, and written to a file of JSON lines for others to take.

Records are queued and written in groups by a thread of their own; when that falls behind, requests wait. A SIGKILL
loses what was queued in the last moments. No record has a value of a secret, a query, a header or a body in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.handlers
import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger(__name__)

QUEUE_MAX = 4096
GATHER_S = 0.02
GROUP_MAX = 512
KEPT_PER_SANDBOX, KEPT = 20_000, 1_000_000
PRUNE_S = 60.0
EXPORT_BYTES_MAX, EXPORT_FILES = 64 * 1024 * 1024, 8
FOLLOWER_QUEUE_MAX = 1024
PAGE_MAX = 1000
SEARCHED_AT_ONCE = 20_000
"""So many records are looked through while nothing can be written."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    n INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, sandbox TEXT NOT NULL, project TEXT NOT NULL,
    decision TEXT NOT NULL, host TEXT, secrets TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS records_sandbox ON records (sandbox, n);
CREATE INDEX IF NOT EXISTS records_project ON records (project, n);
"""
_COLUMNS = ("at", "sandbox", "project", "decision", "host")
_INSERT = f"INSERT INTO records ({', '.join(_COLUMNS)}, secrets, record) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - ours
_OLDEST_KEPT = "SELECT n FROM records ORDER BY n DESC LIMIT 1 OFFSET ?"
_PRUNE_SANDBOXES = """
DELETE FROM records WHERE n IN (
    SELECT n FROM (SELECT n, row_number() OVER (PARTITION BY sandbox ORDER BY n DESC) AS place FROM records)
    WHERE place > ?
)
"""


@dataclass(slots=True)
class Record:
    """What became of one request. ``n`` is given when it is written. Times in seconds, sizes in bytes."""

    sandbox: str
    project: str
    kind: str
    """http, dns, tcp (raw, to a network) or tls (passed through)."""
    at: float = field(default_factory=time.time)
    generation: int = 0
    decision: str = "deny"
    """allow, deny, or error: it may go out, and did not get there."""
    rule: str | None = None
    reason: str = ""
    host: str | None = None
    port: int | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    duration_s: float = 0.0
    first_byte_s: float | None = None
    address: str | None = None
    secrets: list[str] = field(default_factory=list[str])
    protocol: str | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records somebody wants. None: all."""

    sandbox: str | None = None
    project: str | None = None
    decision: str | None = None
    host: str | None = None
    secret: str | None = None

    def fits(self, record: Mapping[str, Any]) -> bool:
        return (
            self.sandbox in {None, record["sandbox"]}
            and self.project in {None, record["project"]}
            and self.decision in {None, record["decision"]}
            and self.host in {None, record["host"]}
            and (self.secret is None or self.secret in record["secrets"])
        )


class Audit:
    """Writes records, and gives them back. ``run`` it beside its use."""

    def __init__(self, directory: Path) -> None:
        self._thread = ThreadPoolExecutor(1, "audit")
        self._queue: asyncio.Queue[Record] = asyncio.Queue(QUEUE_MAX)
        self._added = self._done = 0
        """How many records were queued so far, and how many of these are written, or lost."""
        self._progress = asyncio.Event()
        self._searching = asyncio.Lock()
        self._followers: set[tuple[Filter, asyncio.Queue[dict[str, Any] | None]]] = set()
        self._directory = directory
        self._database: sqlite3.Connection | None = None
        self.lost = 0
        """Records that could not be written."""
        self._export = logging.Logger("egress-export")  # noqa: LOG001 - not one of the tree: its lines are data

    async def add(self, record: Record) -> None:
        """Have a record written; waits while too many are."""
        await self._queue.put(record)
        self._added += 1

    async def run(self) -> None:
        """Write what comes, until cancelled; then what is left."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._open)
        pruned = time.monotonic()
        gathered: list[Record] = []
        try:
            while True:
                gathered = [await self._queue.get()]
                await asyncio.sleep(GATHER_S)  # each group costs a commit
                group, gathered = gathered, []
                await self._write(group)
                if time.monotonic() - pruned > PRUNE_S:
                    pruned = time.monotonic()
                    await loop.run_in_executor(self._thread, self._prune)
        finally:
            await self._write(gathered)
            while not self._queue.empty():
                await self._write([])
            self._thread.submit(self._close)
            self._thread.shutdown(wait=True)

    async def read(
        self, wanted: Filter, *, after: int = 0, before: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Return records that fit, the newest last: the first ones after ``after``, else the last ones there are.

        Whoever searches for long, and for what there is not, does so step by step: others' records are written between.
        """
        await self._wait_written()
        loop = asyncio.get_running_loop()
        forward, left, found = bool(after), min(limit, PAGE_MAX), list[dict[str, Any]]()
        begin, end = after, before
        while left > 0:
            async with self._searching:  # one step at a time is in the way of what is to be written
                rows, edge = await loop.run_in_executor(self._thread, self._select, wanted, begin, end, left, forward)
            found += rows
            left -= len(rows)
            if edge is None:
                break
            begin, end = (edge, end) if forward else (begin, edge)
        return found if forward else found[::-1]

    async def follow(self, wanted: Filter, *, after: int = 0) -> AsyncGenerator[dict[str, Any]]:
        """Yield records that fit as they come. Who does not keep up is told ``{"missed": true}`` once, and goes on."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(FOLLOWER_QUEUE_MAX)
        follower = (wanted, queue)
        self._followers.add(follower)
        try:
            last = after
            while after and (page := await self.read(wanted, after=last, limit=PAGE_MAX)):
                for record in page:
                    yield record
                last = page[-1]["n"]
            while True:
                record = await queue.get()
                if record is None:
                    yield {"missed": True}
                elif record["n"] > last:
                    yield record
        finally:
            self._followers.discard(follower)

    # --- private

    async def _wait_written(self) -> None:
        """Wait until what was queued by now is written, however much comes meanwhile."""
        added = self._added
        while self._done < added:
            await self._progress.wait()

    async def _write(self, group: list[Record]) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while len(group) < GROUP_MAX:
                group.append(self._queue.get_nowait())
        if not group:
            return
        loop = asyncio.get_running_loop()
        try:
            written = await loop.run_in_executor(self._thread, self._insert, [_fields(record) for record in group])
        except (sqlite3.Error, OSError) as error:
            # A full disk: what is let out does not change by that, so it goes on, and says what is missing.
            self.lost += len(group)
            log.warning("records-lost", count=len(group), error=str(error))
            written = []
        for record in written:
            for wanted, queue in self._followers:
                if wanted.fits(record):
                    _offer(queue, record)
        self._done += len(group)
        self._progress.set()
        self._progress = asyncio.Event()

    def _open(self) -> None:
        self._database = sqlite3.connect(self._directory / "audit.db", check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        self._export.addHandler(
            logging.handlers.RotatingFileHandler(
                self._directory / "egress.jsonl", maxBytes=EXPORT_BYTES_MAX, backupCount=EXPORT_FILES
            )
        )

    def _insert(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        database = self._open_database()
        texts = [json.dumps(record) for record in records]
        rows = [
            (*(record[name] for name in _COLUMNS), json.dumps(record["secrets"]), text)
            for record, text in zip(records, texts, strict=True)
        ]
        with database:
            database.executemany(_INSERT, rows)
            (last,) = database.execute("SELECT max(n) FROM records").fetchone()  # nobody else writes
        for n, record in enumerate(records, last - len(records) + 1):
            record["n"] = n
        self._export.info("%s", "\n".join(texts))
        return records

    def _select(
        self, wanted: Filter, begin: int, end: int | None, limit: int, forward: bool
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Search some of the records between two numbers, both left out, in one direction; return what fits, and the
        number from which the search is to go on; None: it is at its end.
        """
        inner, values = ["n > ?"], list[Any]([begin])
        for column in ("sandbox", "project"):  # of these there are indexes
            if (value := getattr(wanted, column)) is not None:
                inner.append(f"{column} = ?")
                values.append(value)
        if end is not None:
            inner.append("n < ?")
            values.append(end)
        outer, more = ["1"], list[Any]()
        for column in ("decision", "host"):
            if (value := getattr(wanted, column)) is not None:
                outer.append(f"{column} = ?")
                more.append(value)
        if wanted.secret is not None:
            outer.append("secrets != '[]' AND EXISTS (SELECT 1 FROM json_each(secrets) WHERE value = ?)")
            more.append(wanted.secret)
        order = "ASC" if forward else "DESC"
        # The parts of the statements are ours; every value is bound.
        some = f"SELECT * FROM records WHERE {' AND '.join(inner)} ORDER BY n {order} LIMIT {SEARCHED_AT_ONCE}"  # noqa: S608
        fitting = f"SELECT n, record FROM ({some}) WHERE {' AND '.join(outer)} ORDER BY n {order} LIMIT ?"  # noqa: S608
        database = self._open_database()
        found = [{**json.loads(record), "n": n} for n, record in database.execute(fitting, (*values, *more, limit))]
        if len(found) == limit:
            return found, None
        reached = f"SELECT count(*), min(n), max(n) FROM ({some.replace('*', 'n', 1)})"  # noqa: S608
        count, least, most = database.execute(reached, values).fetchone()
        return found, None if count < SEARCHED_AT_ONCE else most if forward else least

    def _prune(self) -> None:
        database = self._open_database()
        with database:
            database.execute(_PRUNE_SANDBOXES, (KEPT_PER_SANDBOX,))
            # By how many there are and not by their numbers: those that one sandbox has used up say nothing of others'.
            database.execute(f"DELETE FROM records WHERE n <= ({_OLDEST_KEPT})", (KEPT,))  # noqa: S608

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        for handler in self._export.handlers:
            handler.close()

    def _open_database(self) -> sqlite3.Connection:
        if self._database is None:
            raise RuntimeError("the audit is not open")
        return self._database


def _offer(queue: asyncio.Queue[dict[str, Any] | None], record: dict[str, Any]) -> None:
    """Give a follower a record; one that is full is emptied, and told so."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
    queue.put_nowait(record)


_FIELDS = tuple(one.name for one in fields(Record))


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _FIELDS}
