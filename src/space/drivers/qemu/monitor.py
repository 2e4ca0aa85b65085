"""What the driver asks a QEMU, through its monitor (QMP, docs/interop/qmp-spec.txt of QEMU).

QEMU is on the guest's side of the boundary: a guest may have taken it over. So every answer is bounded, in size and in
time, and nothing is believed but a few words.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from space.errors import HostError, MachineLost

ANSWER_S = 10.0
LINE_BYTES_MAX = 64 * 1024
REASON_CHARS_MAX = 200
EVENTS_MAX = 1000
"""As many may come before an answer."""
POLL_S = 0.002
POLL_S_MAX = 0.008
_MIGRATING = frozenset({"setup", "active", "device", "pre-switchover", "cancelling", "wait-unplug"})

log = structlog.get_logger()


class Monitor:
    """One connection to a QEMU. Use `connected`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    async def ask(self, command: str, arguments: Mapping[str, Any] | None = None, files: Sequence[int] = ()) -> Any:
        """Return the answer. Raise `MachineLost` when QEMU is gone, and `HostError` when it refuses, does not answer or
        makes no sense.
        """
        message = json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n"
        async with _in_time():
            # SAFETY: fixed commands; files are those that the driver means to hand over.
            if files:
                if socket.send_fds(self._connection, [message], list(files)) != len(message):
                    raise HostError("The virtual machine's program does not listen.", code="machine-silent")
            else:
                await asyncio.get_running_loop().sock_sendall(self._connection, message)
            return await self._answer(command)

    async def status(self) -> str:
        """Return QEMU's word for the state of the machine ("running", "paused", "inmigrate", …)."""
        return _word(await self.ask("query-status"), "status")

    async def wait_written(self, timeout_s: float) -> str:
        """Wait until no migration is under way; return how the last one ended ("completed", "failed", …)."""
        async with self._patience(timeout_s) as waits:
            while (found := _word(await self.ask("query-migrate"), "status")) in _MIGRATING:
                await waits()
            return found

    async def greeted(self) -> None:
        """Finish the introduction, after which requests are answered."""
        async with _in_time():
            await self._line()
        await self.ask("qmp_capabilities")

    @asynccontextmanager
    async def _patience(self, timeout_s: float) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
        """Yield what waits before one asks again, longer each time."""
        pause_s = POLL_S

        async def waits() -> None:
            nonlocal pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

        try:
            async with asyncio.timeout(timeout_s):
                yield waits
        except TimeoutError as error:
            raise HostError("The virtual machine's program takes too long.", code="machine-silent") from error

    async def _answer(self, command: str) -> Any:
        for _ in range(EVENTS_MAX):
            match await self._line():
                case {"return": found}:
                    return found
                case {"error": {"desc": str(reason)}}:
                    log.warning("monitor-refused", command=command, reason=reason[:REASON_CHARS_MAX])
                    raise HostError(f"The virtual machine's program refused {command}.", code="monitor-refused")
                case {"event": _}:
                    continue
                case _:
                    break
        raise HostError("The virtual machine's program answers nonsense.", code="machine-silent")

    async def _line(self) -> Any:
        while b"\n" not in self._received:
            if len(self._received) > LINE_BYTES_MAX:
                raise HostError("The virtual machine's program answers without end.", code="machine-silent")
            piece = await asyncio.get_running_loop().sock_recv(self._connection, LINE_BYTES_MAX)
            if not piece:
                raise ConnectionResetError
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        with suppress(ValueError, RecursionError):
            return json.loads(line)
        return None


@asynccontextmanager
async def connected(address: Path) -> AsyncGenerator[Monitor]:
    """Connect to the QEMU that listens there. Raise `MachineLost` when none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with connection:
        async with _in_time():
            # By way of the descriptor, as the path may be longer than such addresses can be. SAFETY: the directory is
            # root's, and so is the socket, whatever has become of the QEMU that listens.
            found = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                await _connect(connection, f"/proc/self/fd/{found}")
            finally:
                os.close(found)
        monitor = Monitor(connection)
        await monitor.greeted()
        yield monitor


async def _connect(connection: socket.socket, address: str) -> None:
    """Connect; while QEMU has not yet noticed that its last caller has gone, its queue may be full."""
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:
            await asyncio.sleep(POLL_S)
        else:
            return


@asynccontextmanager
async def _in_time() -> AsyncGenerator[None]:
    """Allow `ANSWER_S`, and turn what becomes of a connection into errors of ours."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError as error:
        raise HostError("The virtual machine's program does not answer.", code="machine-silent") from error
    except OSError as error:
        raise MachineLost from error


def _word(answer: object, name: str) -> str:
    match answer:
        case dict() if isinstance(word := answer.get(name), str):
            return word
        case _:
            return ""
