"""Connections to ports of a sandbox through its guest's channel.

What a guest sends is kept until it is taken, and what it is sent until it takes it: a window for each connection, and
for all of them together no more than ``HELD_BYTES_MAX`` each way beyond a little for each.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from space.errors import GuestError, InvalidRequest, LimitExceeded, SandboxError, SpaceError
from space.node.guests import Guest
from space.protocol.streams import PORT_WINDOW_BYTES, join_small

CONNECTIONS_MAX = 1024
"""To all ports of one sandbox."""
HELD_BYTES_MAX = 128 * 1024 * 1024
HELD_EACH_BYTES = 32 * 1024
CONNECT_S = 10.0
AGAIN_S = (0.05, 0.1, 0.2, 0.4)
"""Pauses before a port that nobody listens on is tried again: a server may just be starting."""


class Tunnels:
    """All connections into this node's sandboxes, and what they hold."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()
        """How many there are, by sandbox."""
        self.held_bytes = 0
        self.sent_bytes = 0
        """Sent, and not taken by the guests yet."""

    async def dial(self, guest: Guest, port: int) -> GuestTunnel:
        """Connect to a port of the guest's sandbox.

        Raises ``SandboxError`` (``port-closed``) where nobody listens after a few tries, ``LimitExceeded`` when there
        are too many connections, and what says that the guest is gone.
        """
        for pause_s in (*AGAIN_S, None):
            try:
                return await self._dial_once(guest, port)
            except SandboxError as error:
                if error.code != "port-closed":
                    raise
                if pause_s is None:
                    raise SandboxError(
                        f"Nobody listens on port {port} in the sandbox.", code="port-closed", port=port
                    ) from error
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _dial_once(self, guest: Guest, port: int) -> GuestTunnel:
        if self.open[guest.machine] >= CONNECTIONS_MAX:
            raise LimitExceeded(
                "Too many connections to ports of this sandbox are open; close some first.",
                code="too-many-connections",
                limit=CONNECTIONS_MAX,
            )
        tunnel = GuestTunnel(self, guest)
        try:
            await guest.request("connect", {"port": port, "stream": tunnel.number}, timeout_s=CONNECT_S)
        except BaseException as error:
            tunnel.let_go()
            if isinstance(error, InvalidRequest):
                raise GuestError(
                    "This sandbox was started by an earlier version and cannot be connected to; stop and start it.",
                    code="agent-too-old",
                ) from error
            raise
        return tunnel


class GuestTunnel:
    """One connection: a stream of the channel, in both directions. See ``Tunnel`` for what it promises."""

    def __init__(self, tunnels: Tunnels, guest: Guest) -> None:
        self.number = guest.new_number()
        self._tunnels = tunnels
        self._guest = guest
        self._sandbox = guest.machine
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._taken = 0
        self._under_way = 0
        self._came = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._error: SpaceError | None = None
        self._closed = False
        guest.receive(self.number, self)
        guest.transmit(self.number, self)
        tunnels.open[self._sandbox] += 1

    async def read(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended or self._closed:
                return b""
            self._came.clear()
            await self._came.wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._let_go(self._held)
        self._taken += len(data)
        if not self._closed:
            self._guest.ack(self.number, self._taken)
            self._guest.flush()
        return data

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._error is not None or self._closed:
                raise self._error or SandboxError("The connection was closed.", code="connection-reset")
            room = self._sendable()
            if room > 0:
                self._guest.send(self.number, bytes(view[:room]))
                self._note_under_way()
                view = view[room:]
                continue
            self._room.clear()
            await self._room.wait()

    async def end(self) -> None:
        if self._error is None and not self._closed:
            self._guest.end(self.number)

    async def close(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """As ``close``."""
        if self._closed:
            return
        self._closed = True
        self._let_go(self._held)
        self._chunks.clear()
        self._came.set()
        self._room.set()
        self._tunnels.open[self._sandbox] -= 1
        if not self._tunnels.open[self._sandbox]:
            del self._tunnels.open[self._sandbox]
        self._note_under_way()
        acked, sent, said_all = self._guest.place(self.number)
        if self._ended and said_all and acked == sent:
            self._guest.drop(self.number)
        else:
            self._guest.reset(self.number, "cancelled", "Nobody uses the connection any more")

    def _sendable(self) -> int:
        most = PORT_WINDOW_BYTES if self._tunnels.sent_bytes < HELD_BYTES_MAX else HELD_EACH_BYTES
        return min(self._guest.room(self.number), most - self._note_under_way())

    def _note_under_way(self) -> int:
        acked, sent, _ = self._guest.place(self.number)
        under_way = 0 if self._closed else sent - acked
        self._tunnels.sent_bytes += under_way - self._under_way
        self._under_way = under_way
        return under_way

    def _let_go(self, count: int) -> None:
        self._held -= count
        self._tunnels.held_bytes -= count

    # --- StreamUser

    def on_data(self, number: int, offset: int, data: bytes) -> None:  # noqa: ARG002
        if self._closed or self._error is not None:
            return
        self._held += len(data)
        self._tunnels.held_bytes += len(data)
        full = self._tunnels.held_bytes > HELD_BYTES_MAX and self._held > HELD_EACH_BYTES
        if self._held > PORT_WINDOW_BYTES or full:
            self._chunks.clear()
            self._let_go(self._held)
            self._guest.reset(number, "too-much", "More was sent than there is room for")
            self._fail(LimitExceeded("Connections into sandboxes hold too much at once.", code="too-much-held"))
            return
        join_small(self._chunks, data)
        self._came.set()

    def on_end(self, number: int, length: int) -> None:  # noqa: ARG002
        self._ended = True
        self._came.set()

    def on_reset(self, number: int, error: SpaceError) -> None:  # noqa: ARG002
        self._fail(error)

    def on_room(self, number: int, acked: int) -> None:  # noqa: ARG002
        self._note_under_way()
        self._room.set()

    def _fail(self, error: SpaceError) -> None:
        self._error = error
        self._came.set()
        self._room.set()
