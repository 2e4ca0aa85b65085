"""What a command writes and reads: its pipes or its terminal, relayed to and from the channel within its credit."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import termios
import time
from collections import deque

from space.guest.loop import READ, WRITE
from space.guest.system import IS_ROOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from space.guest.loop import Loop
    from space.protocol.guest import GuestChannel

PIPE_BYTES = 1024 * 1024
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)
_READ_BYTES_MIN = 16 * 1024
_READ_BYTES_MAX = 256 * 1024
_TTY_TAIL_BYTES_MAX = 1024 * 1024
_TTY_QUIET_S = 0.02
_BURST_S = 0.01
_BURST_BYTES = 128 * 1024
_PACE_S = 0.001
"""A stream that brings ``_BURST_BYTES`` within ``_BURST_S`` is read every ``_PACE_S``, or when that much is there."""
_END_OF_FILE_KEY = b"\x04"


def make_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe as large as the kernel allows up to 1 MiB."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(writer, _SET_PIPE_SIZE, PIPE_BYTES)
    except OSError:
        pass  # Over the user's share of pipe memory; it works at its default size as well.
    return reader, writer


def make_terminal(uid: int, rows: int, cols: int) -> tuple[int, str]:
    """Make a terminal for a user to sit at; return its master and the path of its other end."""
    master, slave = os.openpty()
    try:
        set_size(slave, rows, cols)
        if IS_ROOT:
            # SAFETY: a terminal the agent has just made, given to the user who will sit at it.
            os.fchown(slave, uid, -1)
            os.fchmod(slave, 0o620)
        return master, os.ttyname(slave)
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)


class Output:
    """One stream that a command writes, from a pipe or a terminal's master.

    It *ends* when every writer has closed it, or after ``drain`` (the main process exited) when all that was in it at
    that moment is relayed. From then on what background processes still write is read and thrown away: they get neither
    a SIGPIPE nor block. Reading stops while the channel has no room, so a slow host makes the writers wait.
    """

    def __init__(self, fd: int, number: int, channel: GuestChannel, loop: Loop, on_end: Callable[[], None]) -> None:
        self.number = number
        self.produced = 0
        self.ended = False
        self.is_tty = False
        self._fd = fd
        self._channel = channel
        self._loop = loop
        self._on_end = on_end
        self._read_bytes = _READ_BYTES_MIN
        self._target: int | None = None
        self._quiet_at = -1
        self._burst_began = 0.0
        self._burst_bytes = 0
        self._held = False
        os.set_blocking(fd, False)
        loop.watch(fd, READ, self._on_readable)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def resume(self) -> None:
        """There may be room again."""
        if self._fd >= 0 and not self._held:
            self._loop.watch(self._fd, READ, self._on_readable)
            if self.is_tty and self._target is not None and not self.ended:
                self._read_tail()

    def hold(self, *, held: bool) -> None:
        """Stop reading, or go on."""
        self._held = held
        if not held:
            self.resume()
        elif self._fd >= 0:
            self._loop.watch(self._fd, 0, self._on_readable)

    def drain(self) -> None:
        """The main process has exited: end after what is readable now."""
        if self.ended or self._target is not None:
            return
        self._target = self.produced + (_TTY_TAIL_BYTES_MAX if self.is_tty else self._readable_bytes())
        self._settle()
        if self.is_tty and not self.ended:
            self._read_tail()

    def end(self) -> None:
        """End now, and throw away what comes later."""
        if not self.ended:
            self.ended = True
            self._channel.end(self.number)
            if self._fd >= 0 and not self._held:
                self._loop.watch(self._fd, READ, self._on_readable)
            self._on_end()

    def close(self) -> None:
        """Close the descriptor. Writers get SIGPIPE or, on a terminal, SIGHUP."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1

    def resize(self, rows: int, cols: int) -> None:
        """Set the terminal's size; its foreground processes get SIGWINCH."""
        if self._fd >= 0:
            set_size(self._fd, rows, cols)

    def _on_readable(self, _events: int) -> None:
        if self.ended:
            self._throw_away()
            return
        room = self._channel.room(self.number)
        if self._target is not None:
            room = min(room, self._target - self.produced)
        if room <= 0:
            self._loop.watch(self._fd, 0, self._on_readable)
            return
        size = min(room, self._read_bytes)
        data = self._read(size)
        if data is None:
            return
        if not data:
            self.close()
            self.end()
            return
        if len(data) == self._read_bytes:
            self._read_bytes = min(2 * self._read_bytes, _READ_BYTES_MAX)
        self.produced += len(data)
        self._channel.send(self.number, data)
        self._settle()
        self._pace(len(data))

    def _pace(self, count: int) -> None:
        """Let a pipe that is written to in small pieces fill up a little: waking for each costs more than moving it."""
        now = time.monotonic()
        if now - self._burst_began > _BURST_S:
            self._burst_began, self._burst_bytes = now, 0
        self._burst_bytes += count
        if self._burst_bytes > _BURST_BYTES and count < _READ_BYTES_MAX and not self.ended and self._fd >= 0:
            self._loop.watch(self._fd, 0, self._on_readable)
            self._loop.call_at(now + _PACE_S, self.resume)

    def _read_tail(self) -> None:
        """Read a terminal to its end, after the main process has exited. It cannot say how much it holds, and the
        kernel passes written bytes on a little later: empty twice is the end, unless background processes hold it.
        """
        before = -1
        while not self.ended and not self._held and self._fd >= 0 and before != self.produced:
            before = self.produced
            self._on_readable(0)
        if self.ended or self._held or self._channel.room(self.number) <= 0:
            return
        if self._quiet_at == self.produced:
            self.end()
            return
        self._quiet_at = self.produced
        self._loop.call_at(time.monotonic() + _TTY_QUIET_S, self._read_tail)

    def _settle(self) -> None:
        if self._target is not None and self.produced >= self._target:
            self.end()

    def _throw_away(self) -> None:
        data = self._read(_READ_BYTES_MAX)
        if data is not None and not data:
            self.close()

    def _read(self, size: int) -> bytes | None:
        try:
            return os.read(self._fd, size)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:  # A terminal's end of file: no process has it open.
                raise
            return b""

    def _readable_bytes(self) -> int:
        if self._fd < 0:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"))[0])


class Input:
    """What a command reads: bytes of a channel's stream, written to a pipe or a terminal as fast as it takes them."""

    def __init__(self, fd: int, number: int, channel: GuestChannel, loop: Loop, *, is_tty: bool) -> None:
        self.number = number
        self._fd = fd
        self._is_tty = is_tty
        self._channel = channel
        self._loop = loop
        self._waiting: deque[bytes | memoryview] = deque()
        self._written = 0
        self._ended = False
        os.set_blocking(fd, False)

    def receive(self, data: bytes) -> None:
        """Take bytes; they are acknowledged when the command's side has them."""
        self._waiting.append(data)
        if len(self._waiting) == 1:
            self._pump(0)

    def finish(self) -> None:
        """No more bytes come: close when all are written. On a terminal, press the key that means so."""
        if self._ended:
            return
        self._ended = True
        if self._is_tty:
            self._waiting.append(_END_OF_FILE_KEY)
        self._pump(0)

    def close(self, code: str, message: str) -> None:
        """The command reads no more: say so to the host, and drop what waits."""
        self._waiting.clear()
        if self._fd < 0:
            return
        self._loop.forget(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._is_tty:
            self._swallow()
        elif not self._ended:
            self._channel.reset(self.number, code, message)

    def _pump(self, _events: int) -> None:
        try:
            while self._waiting and self._fd >= 0:
                data = self._waiting[0]
                count = os.write(self._fd, data)
                self._written += count
                self._waiting.popleft()
                if count < len(data):
                    self._waiting.appendleft(memoryview(data)[count:])
        except BlockingIOError:
            self._acknowledge()
            self._loop.watch(self._fd, WRITE, self._pump)
            return
        except OSError:
            self.close("stdin-closed", "The command has closed its standard input")
            return
        if self._fd < 0:
            self._swallow()
            return
        self._acknowledge()
        self._loop.forget(self._fd)
        if self._ended and not self._is_tty:
            os.close(self._fd)
            self._fd = -1

    def _acknowledge(self) -> None:
        if self._channel.receives(self.number):
            self._channel.ack(self.number, min(self._written, self._channel.taken(self.number)[1]))

    def _swallow(self) -> None:
        """The terminal is gone: its input is nobody's, but the number is shared with its output, so no reset."""
        self._waiting.clear()
        if self._channel.receives(self.number):
            self._channel.ack(self.number, self._channel.taken(self.number)[1])


def set_size(fd: int, rows: int, cols: int) -> None:
    """Set the size of a terminal."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
