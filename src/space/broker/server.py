"""The root process's socket: who may speak, the lines, the limits. What is done for a request is in `verbs.py`.

Run it with `serve`. A request once read is carried out also when its connection is lost: the node asks again and
finds it done.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from space import error_wire, tracing
from space.broker import recovery, requests, stalls, verbs
from space.broker.choice import Choice
from space.broker.figures import Figures, Span
from space.broker.host import Account, Host, node_account
from space.broker.journal import Journal
from space.broker.locks import exclusive
from space.broker.machines import Machines
from space.broker.requests import LINE_BYTES_MAX, OfHost, Request
from space.broker.sweep import Stray, sweep
from space.drivers.base import Driver, Need
from space.errors import SpaceError
from space.settings import Settings

CONNECTIONS_MAX = 16
REQUESTS_MAX = 256
"""At once, over all connections; beyond that no more lines are read."""
SEND_S = 30.0
GOES_ON = "goes-on"
"""The note that a machine which stood still for a request runs again, while the rest is being done."""
Send = Callable[[dict[str, Any]], Awaitable[None]]
NICE = -5
LOCK_S = 1.0
FIGURES_S = 120.0
DRIVERS_S = 60.0
SWEEP_EVERY_S = 60.0
DRAIN_S = 8.0
"""How long requests under way may take to end when the broker is told to stop."""
_PEER = struct.Struct("iII")
log = structlog.get_logger()


async def serve(settings: Settings, drivers: Mapping[str, Driver]) -> None:
    """Serve the node until SIGTERM, SIGINT or cancellation. Machines run on. `drivers` by the name requests use."""
    # SAFETY: the broker works for milliseconds at a time; it must not wait behind guests that compute, which run at 0.
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with Broker(settings, drivers).serving():
            await stop.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class Broker:
    """One broker over its directories. `serving` is its whole life."""

    def __init__(self, settings: Settings, drivers: Mapping[str, Driver]) -> None:
        self._settings = settings
        self._drivers = dict(drivers)
        self._connections = 0
        self.figures = Figures()
        self._choice = Choice(settings, self._drivers)
        self._turns = asyncio.Semaphore(REQUESTS_MAX)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Machines]:
        """Recover, listen, and yield; on leaving, let requests under way end."""
        settings = self._settings
        account = node_account(settings)
        settings.broker_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _raise_file_limit()
        lock = exclusive(settings.broker_dir / "lock", wait_s=LOCK_S, busy="Another broker serves this data directory.")
        async with lock, asyncio.TaskGroup() as tasks:
            needs = frozenset[Need]().union(*(driver.capabilities.needs for driver in self._drivers.values()))
            journal = Journal(settings.broker_dir / "machines")
            journal.open()
            machines = Machines(settings, self._drivers, Host(settings, account, needs), journal, tasks)
            connections: set[asyncio.Task[None]] = set()
            working: set[asyncio.Task[None]] = set()
            watching: list[asyncio.Task[None]] = []
            try:
                self._count(await recovery.recover(machines))
                watching = [tasks.create_task(self._sweep_again_and_again(machines))]
                watching.append(tasks.create_task(stalls.watch(machines)))
                server = await self._listen(account, machines, tasks, connections, working)
                log.info("broker-serves", instance=settings.instance, machines=len(machines.entries))
                async with server:
                    yield machines
            finally:
                for task in [*connections, *watching]:
                    task.cancel()
                machines.unwatch_all()
                if working:
                    await asyncio.wait(working, timeout=DRAIN_S)
                for task in working:
                    task.cancel()
                settings.broker_socket.unlink(missing_ok=True)

    async def _listen(
        self,
        account: Account,
        machines: Machines,
        tasks: asyncio.TaskGroup,
        connections: set[asyncio.Task[None]],
        working: set[asyncio.Task[None]],
    ) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._connections >= CONNECTIONS_MAX or not _may_speak(writer, account):
                writer.close()
                return
            connection = _Connection(self, machines, reader, writer, working)
            task = tasks.create_task(connection.run(tasks))
            self._connections += 1
            connections.add(task)
            task.add_done_callback(self._disconnected)
            task.add_done_callback(connections.discard)

        listening = _bind(self._settings, account)
        return await asyncio.start_unix_server(connected, sock=listening, limit=LINE_BYTES_MAX)

    def _disconnected(self, _task: asyncio.Task[None]) -> None:
        self._connections -= 1

    async def take_turn(self) -> None:
        await self._turns.acquire()

    def end_turn(self) -> None:
        self._turns.release()

    async def answer(self, machines: Machines, line: bytes, send: Send) -> dict[str, Any]:
        """Carry out one line and return the answer to it. Never raises but for cancellation. `send` takes what is to be
        told before the answer.
        """
        number: int | None = None
        spans: list[Span] = []
        try:
            request = requests.parse(line)
            number = request.id
            with self.figures.carrying_out(request) as spans:
                answer: dict[str, Any] = {"id": number, "ok": await self._carry_out(machines, request, send)}
        except SpaceError as error:
            number = requests.number_of(line) if number is None else number
            answer = {"id": number, "error": error_wire.render(error)}
        except Exception:
            log.exception("request-failed", request=number)
            failure = SpaceError("The broker could not do that; its log says why.")
            answer = {"id": number, "error": error_wire.render(failure)}
        return {**answer, "spans": spans} if spans else answer

    async def _carry_out(self, machines: Machines, request: Request, send: Send) -> Any:
        match request:
            case OfHost(verb="figures"):
                async with asyncio.timeout(FIGURES_S):
                    return await self.figures.tell(machines)
            case OfHost(verb="drivers"):
                async with asyncio.timeout(DRIVERS_S):
                    return await self._choice.told()
            case _:
                return await verbs.carry_out(machines, request, lambda: send({"id": request.id, "note": GOES_ON}))

    async def _sweep_again_and_again(self, machines: Machines) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            tracing.begin()
            try:
                self._count(await sweep(machines))
            except Exception:
                log.exception("sweep-failed")

    def _count(self, strays: list[Stray]) -> None:
        for stray in strays:
            self.figures.stray_found(stray.kind)


class _Connection:
    """One peer: reads lines, starts their work, writes answers in the order they come."""

    def __init__(
        self,
        broker: Broker,
        machines: Machines,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        working: set[asyncio.Task[None]],
    ) -> None:
        self._broker = broker
        self._machines = machines
        self._reader = reader
        self._writer = writer
        self._working = working
        self._sending = asyncio.Lock()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Read until the peer goes or breaks the rules. Work under way goes on in `tasks`."""
        try:
            while True:
                await self._broker.take_turn()
                line = b""
                try:
                    line = await self._next_line()
                finally:
                    if not line:
                        self._broker.end_turn()
                if not line:
                    return
                task = tasks.create_task(self._work(line))
                self._working.add(task)
                task.add_done_callback(self._working.discard)
        finally:
            self._writer.close()

    async def _next_line(self) -> bytes:
        """Return the next whole line; empty at the end, and when the peer sends one that is too long."""
        with suppress(ValueError, ConnectionError):  # ValueError: over the stream's limit
            line = await self._reader.readline()
            return line if line.endswith(b"\n") else b""
        return b""

    async def _work(self, line: bytes) -> None:
        try:
            await self._send(await self._broker.answer(self._machines, line, self._send))
        finally:
            self._broker.end_turn()

    async def _send(self, message: dict[str, Any]) -> None:
        if self._writer.is_closing():
            return
        try:
            async with asyncio.timeout(SEND_S), self._sending:
                self._writer.write(json.dumps(message).encode() + b"\n")
                await self._writer.drain()
        except (OSError, TimeoutError):
            self._writer.close()  # gone, or it does not read: it will come back and ask again


def _bind(settings: Settings, account: Account) -> socket.socket:
    path = settings.broker_socket
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(old)
    # SAFETY: the directory is root's, and nobody can connect before listen. From here on the node's group may; the
    # peer's credentials are checked on every connection besides.
    os.chown(path, -1, account.gid)
    path.chmod(0o660)
    listening.listen(CONNECTIONS_MAX)
    listening.settimeout(0)
    return listening


def _may_speak(writer: asyncio.StreamWriter, account: Account) -> bool:
    """Whether the peer is the node's user or root, as the kernel says."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid = _PEER.unpack(peer)[1]
    if uid not in {0, account.uid}:
        log.warning("connection-refused", uid=uid)
        return False
    return True


def _raise_file_limit() -> None:
    """A machine's sentry inherits the limit and holds a descriptor for every file that the guest has open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
