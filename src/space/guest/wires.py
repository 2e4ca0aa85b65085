"""What carries the channel's bytes: two descriptors that stay, or a connection that the host makes, again and again."""

from __future__ import annotations

import os
import struct
from collections import deque

from space.guest.loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from space.guest.loop import Loop

KEPT_BYTES = 1 << 20
"""More than can be under way on a connection: what was sent last is sent again on the next one, as far as is needed."""
_HOST = 2
"""Its number among those that speak vsock (VMADDR_CID_HOST)."""
_HELLO, _ANSWER = struct.Struct(">16sQ"), struct.Struct(">Q")


def open_wire(address: str | None, source_fd: int, sink_fd: int) -> Pipes | Listener:
    """Return the wire at ``vsock:PORT`` or ``unix:PATH``; None: that of the two descriptors."""
    if address is None:
        return Pipes(source_fd, sink_fd)
    import socket  # takes a while, and most agents need none

    kind, _, place = address.partition(":")
    listening = socket.socket(socket.AF_VSOCK if kind == "vsock" else socket.AF_UNIX)
    # Below 1024 only the guest's root can listen, so nobody else of the guest can take the agent's place.
    listening.bind((socket.VMADDR_CID_ANY, int(place)) if kind == "vsock" else place)
    listening.listen(4)
    os.set_blocking(listening.fileno(), False)
    return Listener(listening)


class Pipes:
    """Two descriptors. ``read`` returns nothing when nobody has the other end open."""

    def __init__(self, source_fd: int, sink_fd: int) -> None:
        self._source = source_fd
        self._sink = sink_fd
        for fd in (source_fd, sink_fd):
            os.set_blocking(fd, False)

    def begin(self, loop: Loop, ready: Callable[[int], None]) -> None:
        """Call ``ready`` while there is something to read, and let the loop wake when more can be written."""
        self._loop = loop
        self._ready = ready
        self.heed(reading=True)

    def heed(self, *, reading: bool) -> None:
        self._loop.watch(self._source, READ if reading else 0, self._ready)

    def wait_to_write(self, *, waiting: bool) -> None:
        self._loop.watch(self._sink, WRITE if waiting else 0, lambda _events: None)

    def read(self, size: int) -> bytes:
        """Raise ``BlockingIOError`` when there is nothing yet."""
        return os.read(self._source, size)

    def write(self, buffers: list[bytes | memoryview]) -> int:
        """Return how many bytes were taken; raise ``BlockingIOError`` when none can be now. To be called once more when
        there is nothing to be written any more: the wire may have something of its own.
        """
        return os.writev(self._sink, buffers) if buffers else 0


class Listener:
    """Connections that the host makes, of which the last counts. None of the bytes is lost when one breaks.

    A connection begins with who the host's relay is and how much that has received, and the agent's answer, how much
    that has; then both send again what the other lacks. A relay that is another than the last one (this is a copy of
    the machine, or the machine was restored) begins at zero, and so does the agent: the host greets it then. See
    ``drivers/firecracker/relay.py`` for the other end.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._source = self._sink = -1
        self._reading = True
        self._waiting = False
        self._hello = b""
        self._open = False
        self._relay = b""
        self._received = 0
        self._sent = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._again = memoryview(b"")
        """What is to be sent again, before anything else."""

    def begin(self, loop: Loop, ready: Callable[[int], None]) -> None:
        self._loop = loop
        self._ready = ready
        loop.watch(self._listening.fileno(), READ, self._accept)

    def heed(self, *, reading: bool) -> None:
        self._reading = reading
        self._watch()

    def wait_to_write(self, *, waiting: bool) -> None:
        self._waiting = waiting
        self._watch()

    def read(self, size: int) -> bytes:
        """Raise ``BlockingIOError`` when there is nothing yet, or no connection."""
        while not self._open:
            self._hear_hello()
        if not (data := self._receive(size)):
            self._part()
            raise BlockingIOError
        self._received += len(data)
        return data

    def write(self, buffers: list[bytes | memoryview]) -> int:
        if not self._open:
            if buffers:
                raise BlockingIOError
            return 0
        try:
            while self._again:
                self._again = self._again[os.write(self._sink, self._again) :]
            count = os.writev(self._sink, buffers) if buffers else 0
        except BlockingIOError:
            raise
        except OSError:
            self._part()
            raise BlockingIOError from None
        if count:
            self._keep(buffers, count)
        return count

    # --- the connection

    def _accept(self, _events: int) -> None:
        accepted, address = self._listening.accept()
        if isinstance(address, tuple) and address[0] != _HOST:
            accepted.close()
            return
        self._part()
        os.set_blocking(accepted.fileno(), False)
        # Twice, as the loop waits for one thing per descriptor.
        self._sink = os.dup(accepted.fileno())
        self._source = accepted.detach()
        self._watch()

    def _part(self) -> None:
        for fd in (self._source, self._sink):
            if fd >= 0:
                self._loop.forget(fd)
                os.close(fd)
        self._source = self._sink = -1
        self._open, self._hello, self._again = False, b"", memoryview(b"")

    def _watch(self) -> None:
        if self._source >= 0:
            # Until it is open there is a hello to be read, whatever else has to wait.
            self._loop.watch(self._source, READ if self._reading or not self._open else 0, self._on_readable)
            self._loop.watch(self._sink, WRITE if self._waiting and self._open else 0, lambda _events: None)

    def _on_readable(self, events: int) -> None:
        if not self._open:
            try:
                self._hear_hello()
            except BlockingIOError:
                return
        if self._reading:
            self._ready(events)

    def _hear_hello(self) -> None:
        piece = self._receive(_HELLO.size - len(self._hello))
        if not piece:
            self._part()
            raise BlockingIOError
        self._hello += piece
        if len(self._hello) < _HELLO.size:
            return
        relay, has = _HELLO.unpack(self._hello)
        if relay != self._relay:
            self._relay = relay
            self._received = self._sent = self._kept_bytes = 0
            self._kept.clear()
        try:
            os.write(self._sink, _ANSWER.pack(self._received))  # the first that is written: there is room
        except OSError:
            self._part()
            raise BlockingIOError from None
        missing = self._sent - has
        kept = b"".join(self._kept) if missing > 0 else b""
        self._again = memoryview(kept)[max(0, len(kept) - missing) :]
        self._open = True
        self._watch()

    def _receive(self, size: int) -> bytes:
        """Return what there is; nothing when the connection has ended."""
        if self._source < 0:
            raise BlockingIOError
        try:
            return os.read(self._source, size)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def _keep(self, buffers: list[bytes | memoryview], count: int) -> None:
        self._sent += count
        for buffer in buffers:
            piece = bytes(buffer[:count])
            count -= len(piece)
            self._kept.append(piece)
            self._kept_bytes += len(piece)
            if not count:
                break
        while self._kept_bytes - len(self._kept[0]) >= KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
