"""The attach WebSocket (`space.command.v1`): a client's live view of one command, and its hand on it.

Detaching ends nothing. Every attached client has offsets of its own; one that does not read makes the program wait.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from space.errors import Conflict, InvalidRequest, SpaceError
from space.model.command import CommandState
from space.node.call import Call
from space.node.http_commands import start_offsets
from space.node.ndjson import error_message, exit_message
from space.node.parse import parse_object, parse_signal, parse_tty
from space.node.readers import Chunk, Exited, Gap, Item, Reader, StdinSafe
from space.node.sessions import Session

SUBPROTOCOL = "space.command.v1"
HEADER = struct.Struct(">BQ")
NUMBERS = {"stdout": 1, "stderr": 2, "tty": 3}
STDIN_NUMBER = 0
TEXT_CHARS_MAX = 64 * 1024
UNACKED_BYTES_MAX = 4 * 1024 * 1024
"""How far output may be ahead of a client that acknowledges it at all."""
CLOSE_NORMAL = 1000
CLOSE_ERROR = 1011


class _Closed(Exception):
    """The client closed the connection."""


async def attach(call: Call) -> None:
    """Serve one attached client until the command has ended or the client goes."""
    session = call.node.commands.get(call.params["command"])
    if SUBPROTOCOL not in call.scope["subprotocols"]:
        raise InvalidRequest(f"The subprotocol {SUBPROTOCOL} must be offered.", code="subprotocol-needed")
    offsets = start_offsets(call)
    fresh = session.record.state is CommandState.CREATED
    guest = call.node.machines.guest(session.record.sandbox_id) if fresh else None
    reader = session.read_from(offsets)
    try:
        if call.token_fingerprint is not None:
            session.remember_token(call.token_fingerprint)
        await call.receive()
        await call.send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL, "headers": []})
        call.status = 101
        client = _Client(call, session, reader)
        try:
            if guest is not None:
                await call.node.commands.start(session, guest)
            await client.serve()
        except* _Closed:
            pass
        except* SpaceError as group:
            await client.fail(_first(group))
    finally:
        reader.close()


class _Client:
    """One attached client: a task that hands out, and one that takes."""

    def __init__(self, call: Call, session: Session, reader: Reader) -> None:
        self._call = call
        self._session = session
        self._reader = reader
        self._acked: dict[str, int] = {}
        self._ack_came = asyncio.Event()

    async def serve(self) -> None:
        """Hand out everything up to the exit record; then close. Raises ``_Closed`` when the client does first."""
        stdin = {"stdin": self._session.stdin_safe, "stdin_next": self._session.stdin_next}
        pid = self._session.record.pid
        await self._say({"type": "started", "command": self._session.id, "pid": pid, **stdin})
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(self._listen())
            await self._hand_out()
            listener.cancel()
        await self._call.send({"type": "websocket.close", "code": CLOSE_NORMAL})

    async def fail(self, error: SpaceError) -> None:
        await self._say(error_message(error))
        await self._call.send({"type": "websocket.close", "code": CLOSE_ERROR, "reason": error.code})

    async def _hand_out(self) -> None:
        while True:
            item = await self._reader.next()
            if isinstance(item, Chunk):
                await self._wait_for_ack(item)
                frame = HEADER.pack(NUMBERS[item.stream], item.offset) + item.data
                await self._call.send({"type": "websocket.send", "bytes": frame})
            else:
                await self._say(_message(item))
            if isinstance(item, Exited):
                return

    async def _wait_for_ack(self, chunk: Chunk) -> None:
        """A client that acknowledges output is never more than ``UNACKED_BYTES_MAX`` behind."""
        while chunk.offset - self._acked.get(chunk.stream, chunk.offset) > UNACKED_BYTES_MAX:
            self._ack_came.clear()
            await self._ack_came.wait()

    async def _listen(self) -> None:
        while True:
            message = await self._call.receive()
            if message["type"] == "websocket.disconnect":
                raise _Closed
            data, text = message.get("bytes"), message.get("text")
            if data is not None:
                await self._take_bytes(data)
            elif text is not None:
                try:
                    await self._take_message(text)
                except Conflict as error:
                    if error.code != "command-ended":
                        raise

    async def _take_bytes(self, frame: bytes) -> None:
        if len(frame) < HEADER.size or frame[0] != STDIN_NUMBER:
            raise InvalidRequest(
                "A binary frame must be stream 0 (stdin), an offset of 8 bytes, and data.", field="frame"
            )
        _, offset = HEADER.unpack_from(frame)
        if not self._session.ended:
            await self._session.feed(frame[HEADER.size :], offset)

    async def _take_message(self, text: str) -> None:
        if len(text) > TEXT_CHARS_MAX:
            raise InvalidRequest("The message is too long.", field="frame")
        message = parse_object(text.encode("utf-8", "replace"))
        match message.get("type"):
            case "stdin-eof":
                await self._session.end_stdin()
            case "resize":
                tty = parse_tty({"rows": message.get("rows"), "cols": message.get("cols")})
                await self._session.resize(tty.rows, tty.cols)
            case "signal":
                await self._session.signal(parse_signal(message.get("signal")))
            case "ack":
                self._take_ack(message)
            case _:
                raise InvalidRequest("`type` must be stdin-eof, resize, signal or ack.", field="type")

    def _take_ack(self, message: dict[str, Any]) -> None:
        for stream in NUMBERS:
            offset = message.get(stream)
            if type(offset) is int and offset >= 0:
                self._acked[stream] = max(offset, self._acked.get(stream, 0))
        self._ack_came.set()

    async def _say(self, message: dict[str, Any]) -> None:
        await self._call.send({"type": "websocket.send", "text": json.dumps(message)})


def _message(item: Item) -> dict[str, Any]:
    match item:
        case Gap():
            return {"type": "gap", "stream": item.stream, "from": item.start, "to": item.end}
        case StdinSafe():
            return {"type": "ack", "stdin": item.offset}
        case Exited():
            return exit_message(item)
        case Chunk():
            raise AssertionError("output travels in binary frames")


def _first(group: BaseExceptionGroup[SpaceError]) -> SpaceError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
