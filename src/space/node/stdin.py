"""Stdin of one running program: what was accepted from clients, what the guest has taken, whether it is closed."""

from __future__ import annotations

import asyncio

from space.errors import Conflict, InvalidRequest
from space.node.guests import Guest


class Stdin:
    """Feeds one input stream of a guest. ``accepted`` and ``safe`` count bytes from the stream's first one."""

    def __init__(self) -> None:
        self.accepted = 0
        self.safe = 0
        self._number = 0
        self._closed = False
        self._feeding = asyncio.Lock()
        self._room = asyncio.Event()

    def open(self, number: int) -> None:
        """The stream has this number on the guest's channel."""
        self._number = number

    def resume(self, number: int, acked: int, received: int) -> None:
        """The guest says how much it has taken and received."""
        self._number = number
        self.safe = max(self.safe, acked)
        self.accepted = max(self.accepted, received)
        self._room.set()

    def on_room(self, acked: int) -> None:
        self.safe = max(self.safe, acked)
        self._room.set()

    def close(self) -> None:
        """The program reads no more, or is gone: what comes is dropped."""
        self._closed = True
        self._room.set()

    async def feed(self, guest: Guest, data: bytes, offset: int | None) -> int:
        """Send bytes as the guest has room for them; return how many were accepted since the stream began.

        Bytes below what was accepted are skipped; a hole raises ``InvalidRequest``, bytes after the end ``Conflict``.
        """
        async with self._feeding:
            if offset is not None:
                if offset > self.accepted:
                    raise InvalidRequest(
                        f"Bytes {self.accepted} to {offset} of stdin are missing.",
                        field="offset",
                        accepted=self.accepted,
                    )
                data = data[self.accepted - offset :]
            if not data:
                return self.accepted
            if not self._closed and guest.place(self._number)[2]:
                raise Conflict("The command's stdin is closed.", code="stdin-closed")
            await self._send(guest, memoryview(data))
            return self.accepted

    async def finish(self, guest: Guest) -> None:
        """Close the stream behind what was accepted."""
        async with self._feeding:
            if not self._closed:
                guest.end(self._number)

    async def _send(self, guest: Guest, view: memoryview) -> None:
        while view and not self._closed:
            self._room.clear()
            room = guest.room(self._number)
            if room == 0:
                await self._room.wait()
                continue
            guest.send(self._number, bytes(view[:room]))
            self.accepted += min(room, len(view))
            view = view[room:]
        if view:
            # The program closed its stdin: count what it will not read, so that its client does not wait for room.
            self.accepted += len(view)
            self.safe = self.accepted
