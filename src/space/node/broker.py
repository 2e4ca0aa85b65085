"""Client of the broker: JSON lines over its Unix socket. Knows the wire, not what the verbs are good for."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

from space import error_wire, tracing
from space.errors import HostError, InvalidRequest, OutcomeUnknown, Unavailable
from space.node.tasks import Tasks

REQUEST_BYTES_MAX = 64 * 1024
"""The longest line that the broker takes."""
LINE_BYTES_MAX = 8 * 1024 * 1024
"""Longest answer taken from the broker (a list of all machines or templates)."""
CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 0.1


class BrokerClient:
    """One connection, made when first needed and made again when lost. Close it with ``close``."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._tasks = Tasks()
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._noted: dict[int, asyncio.Event] = {}
        self._numbers = 0

    async def call(self, verb: str, *, timeout_s: float, noted: asyncio.Event | None = None, **fields: Any) -> Any:
        """Carry out one verb and return its result, or raise the broker's error.

        Every verb is idempotent, so a connection lost in between (the broker was restarted) is made again and the verb
        sent again until ``timeout_s`` has passed; then ``Unavailable`` (never sent) or ``OutcomeUnknown`` is raised.
        ``noted`` is set when the broker tells something before its answer; what is lost after that is not sent again.
        """
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        writer = await self._connected()
                        sent = True
                        with tracing.Span(f"broker {verb}", "client"):
                            return await self._ask(writer, verb, {**fields, **self._origin()}, noted)
                    except (ConnectionError, FileNotFoundError) as error:
                        if noted is not None and noted.is_set():
                            raise OutcomeUnknown(f"The broker went while it did {verb}.", verb=verb) from error
                        await asyncio.sleep(RECONNECT_PAUSE_S)
        except TimeoutError as error:
            if sent:
                raise OutcomeUnknown(f"The broker did not answer {verb} within {timeout_s:g} s.", verb=verb) from error
            raise Unavailable("The broker is not running.", code="broker-unavailable", verb=verb) from error
        except OSError as error:
            raise Unavailable(f"The broker cannot be reached: {error.strerror}", code="broker-unavailable") from error

    async def close(self) -> None:
        await self._tasks.close()
        self._drop(ConnectionError("closed"))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is not None and not self._writer.is_closing():
                return self._writer
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
            self._writer = writer
            self._tasks.spawn(self._read(reader, writer), "broker answers")
            return writer

    async def _ask(
        self, writer: asyncio.StreamWriter, verb: str, fields: dict[str, Any], noted: asyncio.Event | None
    ) -> Any:
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        if noted is not None:
            self._noted[number] = noted
        try:
            line = json.dumps({"id": number, "verb": verb, **fields}).encode() + b"\n"
            if len(line) > REQUEST_BYTES_MAX:
                raise InvalidRequest(f"That is too much for one request to the broker: {len(line)} bytes.", field=verb)
            writer.write(line)
            await writer.drain()
            message = await answer
        finally:
            self._waiting.pop(number, None)
            self._noted.pop(number, None)
        _emit(message.get("spans"), str(fields.get("machine", "")))
        if "ok" in message:
            return message["ok"]
        raise error_wire.parse(message.get("error"), HostError)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason: Exception = ConnectionError("The broker closed the connection")
        try:
            while line := await reader.readline():
                self._answer(json.loads(line))
        except (OSError, ValueError) as error:
            reason = ConnectionError(f"The broker's answer cannot be read: {error}")
        finally:
            if self._writer is writer:
                self._drop(reason)
            else:
                writer.close()

    def _answer(self, message: dict[str, Any]) -> None:
        number = message.get("id", -1)
        if "note" in message:
            if noted := self._noted.get(number):
                noted.set()
            return
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        waiting.set_result(message)

    @staticmethod
    def _origin() -> dict[str, str]:
        """Whose work it is. The trace goes along only when the broker's spans are wanted back."""
        origin = tracing.carried()
        if not tracing.is_sampled():
            origin.pop("trace", None)
        return origin

    def _drop(self, reason: Exception) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(reason)


def _emit(spans: Any, machine: str) -> None:
    """Export the spans that the broker has told of; it has no way to do so itself."""
    if not isinstance(spans, list):
        return
    good = [
        (span[0], span[1], span[2])
        for span in cast("list[Any]", spans)
        if isinstance(span, list)
        and len(span) == 3
        and isinstance(span[0], str)
        and {type(n) for n in span[1:]} == {int}
    ]
    tracing.emit("space-broker", good, {"space.sandbox": machine} if machine else {})
