"""Bytes of a file, archive or listing on their way through the node: constant memory, at the slower end's pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from space.errors import OutcomeUnknown, SpaceError
from space.node.guests import Guest
from space.protocol.streams import join_small

OPEN_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 120.0
FINISH_TIMEOUT_S = 300.0
"""A guest may have to sync gigabytes before it says that a file is written."""


class Download:
    """A stream that the guest sends. ``open`` it, iterate over it, and always ``close`` it."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._number = guest.new_number()
        self._chunks: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._taken = 0
        self._ended = False
        self._error: SpaceError | None = None

    async def open(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask for the stream and return the guest's answer; its bytes follow."""
        self._guest.receive(self._number, self)
        try:
            return await self._guest.request(op, {**fields, "stream": self._number}, timeout_s=OPEN_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    async def chunks(self, *, quiet_s: float | None = STALL_TIMEOUT_S) -> AsyncGenerator[bytes]:
        """Yield the bytes. Asking for the next ones says that the ones before are dealt with.

        Raises what ended the stream early, ``OutcomeUnknown`` when the guest says nothing for ``quiet_s``.
        """
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                yield chunk
                self._taken += len(chunk)
                self._guest.ack(self._number, self._taken)
                self._guest.flush()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._changed.wait()
            except TimeoutError as error:
                raise OutcomeUnknown("The guest stopped sending.", code="guest-stalled") from error

    def close(self) -> None:
        """Let go of the stream; a guest that still sends is told to stop."""
        if self._ended:
            self._guest.drop(self._number)
        else:
            self._guest.reset(self._number, "cancelled", "The client is gone")

    # --- StreamUser

    def on_data(self, number: int, offset: int, data: bytes) -> None:  # noqa: ARG002
        # A guest that sends single bytes must not cost an object for each while nobody reads.
        join_small(self._chunks, data)
        self._changed.set()

    def on_end(self, number: int, length: int) -> None:  # noqa: ARG002
        self._ended = True
        self._changed.set()

    def on_reset(self, number: int, error: SpaceError) -> None:  # noqa: ARG002
        self._error = error
        self._changed.set()

    def on_room(self, number: int, acked: int) -> None:
        """Nothing is sent on this stream."""


class Upload:
    """A stream that the guest receives, and its answer once it has all."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._number = guest.new_number()
        self._room = asyncio.Event()
        self._error: SpaceError | None = None

    async def run(self, op: str, fields: dict[str, Any], source: AsyncIterable[bytes]) -> dict[str, Any]:
        """Send all of ``source`` and return the guest's answer, or raise it as soon as it refuses.

        Whatever ``source`` raises ends the stream unfinished, and the guest leaves no half-written file as whole.
        """
        guest, number = self._guest, self._number
        guest.transmit(number, self)
        try:
            answer = guest.ask(op, {**fields, "stream": number})
            answer.add_done_callback(lambda _: self._room.set())
            async for chunk in source:
                await self._send(chunk, answer)
                if answer.done():
                    break
            guest.end(number)
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                result = await answer
        except TimeoutError as error:
            guest.reset(number, "cancelled", "The guest took too long")
            raise OutcomeUnknown("The guest did not finish writing.", code="guest-stalled") from error
        except BaseException:
            guest.reset(number, "cancelled", "The upload was given up")
            raise
        guest.drop(number)
        return result

    async def _send(self, chunk: bytes, answer: asyncio.Future[dict[str, Any]]) -> None:
        view = memoryview(chunk)
        while view and not answer.done():
            room = self._guest.room(self._number)
            if room:
                self._guest.send(self._number, bytes(view[:room]) if room < len(view) else bytes(view))
                view = view[room:]
                continue
            if self._error is not None:
                # Why comes with the answer.
                await asyncio.wait((answer,), timeout=OPEN_TIMEOUT_S)
                raise self._error
            self._room.clear()
            async with asyncio.timeout(STALL_TIMEOUT_S):
                await self._room.wait()

    # --- StreamUser

    def on_data(self, number: int, offset: int, data: bytes) -> None:
        """Nothing is received on this stream."""

    def on_end(self, number: int, length: int) -> None:
        """Nothing is received on this stream."""

    def on_reset(self, number: int, error: SpaceError) -> None:  # noqa: ARG002
        self._error = error
        self._room.set()

    def on_room(self, number: int, acked: int) -> None:  # noqa: ARG002
        self._room.set()
