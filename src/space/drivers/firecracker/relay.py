"""Carries one machine's channel: between the broker's two FIFOs, which are standard input and output, and the guest's
vsock, whose host end is a socket that Firecracker listens on. Ends when the machine does.

``python -I -S relay.py SPEC`` as root, in the machine's cgroup and network namespace. SPEC is JSON of the driver's own:
``{jail, socket, port, user, pid, start_ticks, pid_file, console, last_words}``. Returns 0 once the relay's number is in
``pid_file``; the relay goes on without rights, as the machine's user, with the jail as its root directory. `ANSWERED`
comes behind the number when the guest answers for the first time. It holds the serial line's pipe ``console``
open, and when the machine has ended puts what nobody has read of it into ``last_words``: a pipe that nobody has open is
empty.

*Connections break*: Firecracker resets those of a guest whose memory is written, and a restored guest has none. So no
byte counts as delivered because it was sent. Each side counts what it has received, and keeps the last `KEPT_BYTES` of
what it has sent, more than can be under way. On a new connection the relay says who it is and how much it has
received (``>16sQ``), the guest how much it has (``>Q``), and both go on from there. A guest that meets a relay which it
does not know (it was restored elsewhere) begins at zero, as that relay does; the host greets it anew. SIGHUP: the
connection is to be made anew. See ``guest/wires.py`` for the other end. Knows the standard library alone.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

PIECE_BYTES = 256 * 1024
KEPT_BYTES = 1 << 20
WORDS_BYTES_MAX = 64 * 1024
"""What a pipe holds."""
RETRY_S = 0.02
# A guest that does not boot, and one that stands still, answer nothing. Firecracker gives a call up after 2 s.
ANSWER_S = 5.0
HELLO, ANSWER = struct.Struct(">16sQ"), struct.Struct(">Q")
ANSWERED = " answered"
_TAKEN = b"OK "
_LINE_BYTES_MAX = 32
_IN, _OUT = 0, 1
_OPEN_FILES = 16
_START_TICKS_FIELD = 19
_OOM_SCORE = -500
"""Where memory is short the machine itself is ended first: it is what takes the memory."""


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        spec: dict[str, Any] = json.load(file)
    machine = _machine(spec["pid"], spec["start_ticks"])
    number = os.open(spec["pid_file"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    console = os.open(spec["console"], os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    words = os.open(spec["last_words"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    _give_up_rights(spec["jail"], spec["user"])
    if pid := os.fork():
        os.write(number, b"%d" % pid)
        os._exit(0)
    relay = Relay(f"/{spec['socket']}", spec["port"], number)
    relay.serve(machine, wakes)
    with contextlib.suppress(BlockingIOError):
        os.write(words, os.read(console, WORDS_BYTES_MAX))


def _machine(pid: int, start_ticks: int) -> int:
    """Return a pidfd of the machine's process; exit if it has ended."""
    try:
        found = os.pidfd_open(pid)
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        sys.exit(1)
    if int(fields[_START_TICKS_FIELD]) != start_ticks:
        sys.exit(1)
    return found


def _give_up_rights(jail: str, user: int) -> None:
    with contextlib.suppress(PermissionError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(str(_OOM_SCORE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WORDS_BYTES_MAX, WORDS_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    # SAFETY: from here on it has the machine's own user, no group, no capability and no way to get any (the driver
    # starts it so that no program gives it any), and sees nothing of the host but the machine's jail.
    os.chroot(jail)
    os.chdir("/")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


class Relay:
    """``serve`` until the machine ends. Whatever the guest does costs it its own channel at most."""

    def __init__(self, address: str, port: int, tell: int) -> None:
        self._address = address
        self._call = b"CONNECT %d\n" % port
        self._id = os.urandom(16)
        self._tell = tell
        """Where it goes that the guest has answered; -1 afterwards."""
        self._connection: socket.socket | None = None
        self._hear = self._hear_taken
        """What to do with what comes on the connection."""
        self._open = False
        """Whether both sides have said how much they have."""
        self._heard = b""
        self._due = 0.0
        """When to call (again), or until when an answer must have come."""
        self._received = 0
        self._sent = 0
        """All that was read for the guest, whether or not it is on its way."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._pending = memoryview(b"")
        self._full = False
        """Whether the host has to read before more of the guest's bytes can be handed on."""
        for descriptor in (_IN, _OUT):
            os.set_blocking(descriptor, False)

    def serve(self, machine: int, wakes: int) -> None:
        while True:
            if self._connection is None and time.monotonic() >= self._due:
                self._connect()
            poll = select.poll()
            poll.register(machine, select.POLLIN)
            poll.register(wakes, select.POLLIN)
            self._register(poll)
            ready = dict(poll.poll(self._patience_ms()))
            if machine in ready:
                return
            if wakes in ready:
                os.read(wakes, 64)
                self._part(0.0)
                continue
            try:
                if self._connection is not None:
                    self._carry(self._connection, ready)
            except BlockingIOError:
                continue
            except OSError:
                self._part(RETRY_S)

    # --- the connection

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # SAFETY: within the jail, whatever a machine's user may have put there.
            connection.connect(self._address)
            connection.send(self._call)
        except OSError:  # the machine is not so far yet
            connection.close()
            self._due = time.monotonic() + RETRY_S
            return
        self._connection, self._hear = connection, self._hear_taken
        self._due = time.monotonic() + ANSWER_S

    def _part(self, pause_s: float) -> None:
        """Give the connection up; what was under way is sent again on the next one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._open = self._full = False
        self._heard = b""
        self._pending = memoryview(b"")
        self._due = time.monotonic() + pause_s

    def _register(self, poll: select.poll) -> None:
        if self._connection is None:
            return
        interest = 0 if self._full else select.POLLIN
        if self._pending:
            interest |= select.POLLOUT
        elif self._open:
            poll.register(_IN, select.POLLIN)
        if self._full:
            poll.register(_OUT, select.POLLOUT)
        if interest:  # or its end would be told over and over
            poll.register(self._connection, interest)

    def _patience_ms(self) -> int | None:
        return None if self._open else max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def _carry(self, connection: socket.socket, ready: dict[int, int]) -> None:
        if not self._open and time.monotonic() > self._due:
            raise TimeoutError
        if _IN in ready:
            self._keep(os.read(_IN, PIECE_BYTES))
        self._send(connection)
        if _OUT in ready:
            self._full = False  # whether there is anything for it shows in the next round
        elif connection.fileno() in ready:
            self._hear(connection)

    def _hear_taken(self, connection: socket.socket) -> None:
        """Hear that there is a guest that listens; say who calls, and how much was received."""
        self._heard += self._receive(connection, _LINE_BYTES_MAX - len(self._heard))
        if self._heard.endswith(b"\n") and self._heard.startswith(_TAKEN):
            connection.send(HELLO.pack(self._id, self._received))
            self._heard, self._hear = b"", self._hear_answer
        elif len(self._heard) == _LINE_BYTES_MAX:
            raise ConnectionError

    def _hear_answer(self, connection: socket.socket) -> None:
        """Hear how much the guest has, and go on from there."""
        self._heard += self._receive(connection, ANSWER.size - len(self._heard))
        if len(self._heard) == ANSWER.size:
            missing = self._sent - ANSWER.unpack(self._heard)[0]
            # A guest that says what cannot be gets something that it has to find its way in.
            kept = b"".join(self._kept) if missing else b""
            self._pending = memoryview(kept)[max(0, len(kept) - max(0, missing)) :]
            self._open, self._heard, self._hear = True, b"", self._hear_bytes
            if self._tell >= 0:
                os.write(self._tell, ANSWERED.encode())
                os.close(self._tell)
                self._tell = -1

    def _hear_bytes(self, connection: socket.socket) -> None:
        """Hand on what the guest says."""
        try:
            # Blocks at neither end: the connection is not to, and the pipe is asked not to.
            count = os.splice(connection.fileno(), _OUT, PIECE_BYTES, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            self._full = True
            return
        if not count:
            raise ConnectionResetError
        self._received += count

    @staticmethod
    def _receive(connection: socket.socket, size: int) -> bytes:
        if piece := connection.recv(size):
            return piece
        raise ConnectionResetError

    # --- what the host says

    def _keep(self, piece: bytes) -> None:
        self._kept.append(piece)
        self._sent += len(piece)
        self._kept_bytes += len(piece)
        while self._kept_bytes - len(self._kept[0]) >= KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        self._pending = memoryview(piece)

    def _send(self, connection: socket.socket) -> None:
        while self._pending:
            try:
                self._pending = self._pending[connection.send(self._pending) :]
            except BlockingIOError:
                return


if __name__ == "__main__":
    main()
