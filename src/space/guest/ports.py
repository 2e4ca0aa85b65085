"""Connections to servers in the sandbox, each a stream of the channel: bytes both ways at the pace of who takes them.

Everything is done by the agent's loop; no connection has a thread. What is kept of one is bounded by its window.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import deque

from space.guest.listeners import listening_addresses
from space.guest.loop import READ, WRITE
from space.guest.system import Refused, refused
from space.protocol.channel import failure
from space.protocol.streams import PORT_WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.loop import Loop, Timer
    from space.protocol.guest import GuestChannel

CONNECTIONS_MAX = 2048
_CONNECT_S = 5.0
_READ_BYTES = 128 * 1024
_LOOPBACK = ("127.0.0.1", "::1")
_OTHERS_MAX = 4


class Ports:
    """All connections, by the numbers of their streams."""

    def __init__(self, channel: GuestChannel, loop: Loop) -> None:
        self._channel = channel
        self._loop = loop
        self._connections: dict[int, Connection] = {}

    def connect(self, number: int, fields: dict[str, Any]) -> None:
        """Connect to whoever listens on a port of this sandbox, and answer request ``number`` when that is done."""
        stream = fields["stream"]
        if len(self._connections) >= CONNECTIONS_MAX:
            raise Refused("too-many-connections", f"{CONNECTIONS_MAX} connections to ports are open")
        if self._channel.sends(stream) or self._channel.receives(stream):
            raise Refused("invalid-request", "stream: the number is in use")

        def connected(problem: Refused | None) -> None:
            if problem is None:
                self._channel.reply(number, {})
            else:
                self._connections.pop(stream, None)
                self._channel.close(stream)
                self._channel.refuse(number, problem.failure)

        one = Connection(stream, self._channel, self._loop, lambda: self._connections.pop(stream, None))
        self._connections[stream] = one
        one.connect(fields["port"], connected)

    def get(self, stream: int) -> Connection | None:
        return self._connections.get(stream)

    def close_all(self) -> None:
        """Let every connection break off."""
        for stream, one in list(self._connections.items()):
            self._channel.reset(stream, "cancelled", "The sandbox is being suspended")
            one.cancel()


class Connection:
    """One connection. The loop calls ``on_…`` when something happened to its stream."""

    def __init__(self, number: int, channel: GuestChannel, loop: Loop, on_over: Callable[[], object]) -> None:
        self._number = number
        self._channel = channel
        self._loop = loop
        self._on_over = on_over
        self._socket: socket.socket | None = None
        self._timer: Timer | None = None
        self._waiting: deque[memoryview] = deque()
        self._written = 0
        self._host_ended = False
        self._shut = False
        """Whether the server was told that no more comes."""
        self._server_ended = False
        self._ready = False
        channel.open_send(number)
        channel.open_receive(number)

    # --- connecting

    def connect(self, port: int, done: Callable[[Refused | None], None]) -> None:
        """Try the addresses that a server may listen on, one by one, and call ``done`` with how that went."""
        self._port = port
        self._done = done
        self._addresses: deque[str] = deque(_LOOPBACK)
        self._looked = False
        self._problem = Refused("port-closed", f"Nobody listens on port {port}", errno.ECONNREFUSED)
        self._timer = self._loop.call_at(time.monotonic() + _CONNECT_S, self._too_late)
        self._try_next()

    def _try_next(self) -> None:
        while True:
            if not self._addresses:
                if self._looked:
                    self._give_up(self._problem)
                    return
                # Nobody is at the usual places: some servers listen on the sandbox's own address alone.
                self._looked = True
                self._addresses.extend(listening_addresses(self._port)[:_OTHERS_MAX])
                continue
            address = self._addresses.popleft()
            try:
                if self._begin(address):
                    return
            except OSError as error:
                self._note(error)
            self._close_socket()

    def _begin(self, address: str) -> bool:
        """Begin to connect; False when that has failed already."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = one = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        number = one.connect_ex((address, self._port))
        if number == 0:
            return self._connected(one)
        if number != errno.EINPROGRESS:
            self._note(OSError(number, ""))
            return False
        self._loop.watch(one.fileno(), WRITE, self._on_connected)
        return True

    def _on_connected(self, _events: int) -> None:
        one = self._socket
        if one is None:
            return
        number = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number == 0 and self._connected(one):
                return
            self._note(OSError(number, ""))
        except OSError as error:
            self._note(error)
        self._close_socket()
        self._try_next()

    def _connected(self, one: socket.socket) -> bool:
        if one.getsockname() == one.getpeername():
            return False  # With nobody there, a connection may meet itself.
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._timer is not None:
            self._timer.cancel()
        self._ready = True
        self._done(None)
        self._loop.watch(one.fileno(), 0, self._on_events)
        self._write()
        return True

    def _note(self, error: OSError) -> None:
        if error.errno not in (0, errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            self._problem = refused(error, f"port {self._port}")

    def _too_late(self) -> None:
        if not self._ready and self._socket is not None:
            self._close_socket()
            self._give_up(Refused("port-closed", f"Port {self._port} does not answer", errno.ETIMEDOUT))

    def _give_up(self, problem: Refused) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._done(problem)

    # --- what the channel reports

    def on_received(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._write()

    def on_ended(self) -> None:
        self._host_ended = True
        self._write()

    def on_writable(self) -> None:
        self._watch()

    def cancel(self) -> None:
        """The stream is over: so is the connection. One that is not connected yet is as if it never was."""
        if self._timer is not None:
            self._timer.cancel()
        self._close_socket()
        self._on_over()

    # --- bytes

    def _on_events(self, events: int) -> None:
        if events & ~READ:
            self._write()
        if self._socket is not None and (events & ~WRITE) and self._room() > 0 and not self._server_ended:
            self._read()
        self._watch()

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(min(self._room(), _READ_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            self._break_off(error)
            return
        if data:
            self._channel.send(self._number, data)
            return
        self._server_ended = True
        self._channel.end(self._number)
        self._finish()

    def _write(self) -> None:
        if not self._ready or self._socket is None:
            return
        try:
            while self._waiting:
                count = self._socket.send(self._waiting[0])
                self._written += count
                if count == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][count:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._break_off(error)
            return
        self._channel.ack(self._number, self._written)
        if self._host_ended and not self._waiting and not self._shut:
            self._shut = True
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # The server is gone; reading says so.
        self._finish()
        self._watch()

    def _room(self) -> int:
        if not self._channel.sends(self._number):
            return 0
        acked, produced, ended = self._channel.place(self._number)
        return 0 if ended else min(self._channel.room(self._number), PORT_WINDOW_BYTES - (produced - acked))

    def _watch(self) -> None:
        if self._socket is not None and self._ready:
            interest = WRITE if self._waiting else 0
            if not self._server_ended and self._room() > 0:
                interest |= READ
            self._loop.watch(self._socket.fileno(), interest, self._on_events)

    def _finish(self) -> None:
        """Close once both sides have sent all they had."""
        if self._server_ended and self._shut and not self._waiting:
            self._close_socket()
            self._on_over()

    def _break_off(self, error: OSError) -> None:
        why = failure("connection-reset", refused(error).failure["message"], error.errno)
        self._channel.reset(self._number, why["code"], why["message"])
        self._close_socket()
        self._on_over()

    def _close_socket(self) -> None:
        one, self._socket = self._socket, None
        self._waiting.clear()
        if one is not None:
            self._loop.forget(one.fileno())
            one.close()
