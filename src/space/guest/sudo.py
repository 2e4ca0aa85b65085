"""``sudo`` where the kernel ignores set-uid bits (gVisor) or there is no real one: root starts the program for a caller
who may have it started.

The socket belongs to root and the group ``sudo``, so the kernel itself turns everybody else away. What arrives is from
someone who may become root of this sandbox, and is still bounded: so many callers, so many bytes, so much time.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time

from space.guest.loop import READ
from space.guest.outputs import make_terminal
from space.guest.spawning import Program, spawn
from space.guest.sudo_client import ENDED, FORWARDED, HELLO, REFUSED, REQUEST_BYTES_MAX, SOCKET, STARTED
from space.guest.sudo_request import Request, program_of
from space.guest.system import IS_ROOT, Refused, call
from space.guest.users import find_group, find_identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from space.guest.loop import Loop, Timer
    from space.guest.processes import Processes

__all__ = ["SOCKET", "Sudo", "needed"]

_GROUP = "sudo"
_CALLERS_MAX = 64
_REQUEST_S = 10.0
_ACCEPT_AGAIN_S = 0.2
_KILL_AFTER_S = 2.0
_FILES = 4
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _FILES)
_RECEIVE_BYTES = 64 * 1024
_PR_GET_NO_NEW_PRIVS = 39
_CLIENT = "/.space/bin/sudo"
"""It starts `sudo.real`, beside the link to it, where nobody listens here."""


def needed() -> bool:
    """Whether there is no real ``sudo`` that can work: the kernel gives no program rights by its set-uid bit, or the
    template has the link to our client and nothing else.
    """
    if not IS_ROOT:
        return False
    return call("prctl", _PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 or is_ours_alone()


def is_ours_alone(programs: str = "/usr/bin") -> bool:
    """Whether ``sudo`` in that directory is the link to our client, without a real one beside it."""
    try:
        ours = os.readlink(os.path.join(programs, "sudo")) == _CLIENT
    except OSError:
        return False
    return ours and not os.path.lexists(os.path.join(programs, "sudo.real"))


class Sudo:
    """The listening socket at ``path``, and who has called."""

    def __init__(self, path: str, loop: Loop, processes: Processes) -> None:
        self.loop = loop
        self.processes = processes
        self._held = False
        self._callers: set[_Caller] = set()
        self._listener = _listen(path)
        loop.watch(self._listener.fileno(), READ, self._on_call)

    def hold(self, *, held: bool) -> None:
        """Start nothing and hear nobody, for a checkpoint; or go on."""
        self._held = held
        self._hear()
        for caller in self._callers:
            caller.hold(held=held)

    def leave(self, caller: _Caller) -> None:
        self._callers.discard(caller)

    def _hear(self) -> None:
        self.loop.watch(self._listener.fileno(), 0 if self._held else READ, self._on_call)

    def _on_call(self, _events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # Out of descriptors, for example: not again at once.
            self.loop.watch(self._listener.fileno(), 0, self._on_call)
            self.loop.call_at(time.monotonic() + _ACCEPT_AGAIN_S, self._hear)
            return
        connection.setblocking(False)  # noqa: FBT003
        caller = _Caller(self, connection)
        if len(self._callers) >= _CALLERS_MAX:
            caller.refuse(f"{_CALLERS_MAX} programs run through sudo already")
        else:
            self._callers.add(caller)
            caller.greet()


class _Caller:
    """One connection, and the program that was started for it."""

    def __init__(self, sudo: Sudo, connection: socket.socket) -> None:
        self._sudo = sudo
        self._connection: socket.socket | None = connection
        self._received = bytearray()
        self._files: list[int] = []
        self._from: tuple[int, int] | None = None
        """Process and user that the kernel says the request comes from."""
        self._pid = 0
        self._timer: Timer | None = None

    def greet(self) -> None:
        """Have the kernel say who sends, from now on, and only then let the caller send."""
        if self._connection is not None:
            # Not SO_PEERCRED: gVisor answers with the credentials of whoever asks.
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sudo.loop.watch(self._connection.fileno(), READ, self._on_readable)
            self._limit_time()
            self._say(HELLO)

    def refuse(self, text: str) -> None:
        self._say(REFUSED, text.encode("utf-8", "replace"))
        self._hang_up()

    def hold(self, *, held: bool) -> None:
        if self._connection is not None:
            self._sudo.loop.watch(self._connection.fileno(), 0 if held else READ, self._on_readable)
        if not self._pid and self._timer is not None:
            self._timer.cancel()
            if not held:
                self._limit_time()

    def _limit_time(self) -> None:
        self._timer = self._sudo.loop.call_at(
            time.monotonic() + _REQUEST_S, lambda: self.refuse("the request took too long")
        )

    # --- what the caller sends

    def _on_readable(self, _events: int) -> None:
        try:
            if self._pid:
                self._on_signals()
            elif (body := self._receive()) is not None:
                self._begin(body)
        except Refused as error:
            self.refuse(error.failure["message"])
        except BlockingIOError:
            pass
        except OSError as error:
            self.refuse(os.strerror(error.errno or 0))
        except ValueError:
            self.refuse("the request makes no sense")

    def _receive(self) -> bytes | None:
        """Return the request once it is whole."""
        if self._connection is None:
            return None
        data, ancillary, flags, _ = self._connection.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        sender = None
        for _, kind, value in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._files += struct.unpack(f"{len(value) // 4}i", value[: len(value) // 4 * 4])
            elif kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                sender = (pid, uid)
        if not data:
            self._hang_up()
            return None
        self._from = self._from or sender
        if sender is None or sender != self._from or flags & socket.MSG_CTRUNC or len(self._files) != _FILES:
            raise Refused("invalid-request", "the request is not from one process with its descriptors")
        self._received += data
        length = int.from_bytes(self._received[:4], "big")
        if length > REQUEST_BYTES_MAX:
            raise Refused("invalid-request", "the request is too long")
        if len(self._received) > 4 + length:
            raise Refused("invalid-request", "there is more than the request")
        return bytes(self._received[4:]) if len(self._received) == 4 + length else None

    def _on_signals(self) -> None:
        numbers = self._connection.recv(64) if self._connection is not None else b""
        if not numbers:
            self._hang_up()
        for number in numbers:
            if number in FORWARDED:
                self._signal(number)

    # --- the program

    def _begin(self, body: bytes) -> None:
        pid, uid = self._from or (0, -1)
        caller = find_identity(str(uid))
        if uid != 0 and find_group(_GROUP) not in (caller.gid, *caller.groups):
            raise Refused("permission-denied", f"{caller.name} is not in the group {_GROUP}")
        request = Request.parse(body)
        program = program_of(request, caller)
        if program.cwd == "":
            program.cwd = self._files[3]
        group = self._sudo.processes.groups.of(pid)
        program.files = (self._files[0], self._files[1], self._files[2])
        master = self._make_terminal(request, program) if request.replaced else -1
        try:
            self._pid = spawn(program, group)
            self._sudo.processes.on_end[self._pid] = self._on_end
            self._say(STARTED, master=master)
        finally:
            if master >= 0:
                os.close(master)
        self._received.clear()
        self._close_files()
        if self._timer is not None:
            self._timer.cancel()

    def _make_terminal(self, request: Request, program: Program) -> int:
        master, program.terminal = make_terminal(program.identity.uid, request.rows, request.cols)
        stdin, stdout, stderr = (-1 if str(at) in request.replaced else fd for at, fd in enumerate(self._files[:3]))
        program.files = (stdin, stdout, stderr)
        return master

    def _on_end(self, status: int) -> None:
        self._pid = 0
        self._say(ENDED, status.to_bytes(4, "big"))
        self._hang_up()

    def _signal(self, number: int) -> None:
        if self._pid > 1:
            try:
                # SAFETY: the group of a child that has not been waited for, which leads it: nobody else has its number.
                os.killpg(self._pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    # --- the connection

    def _say(self, kind: bytes, payload: bytes = b"", *, master: int = -1) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", master))] if master >= 0 else []
        if self._connection is not None:
            try:
                self._connection.sendmsg([kind + len(payload).to_bytes(4, "big") + payload], rights)
            except OSError:
                pass  # Gone, which is noticed where its bytes are read; these few always fit.

    def _close_files(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def _hang_up(self) -> None:
        """Nothing more is said. A program that still runs has lost who waited for it, and ends as with a terminal."""
        if self._connection is not None:
            self._sudo.loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None
        self._close_files()
        if self._timer is not None:
            self._timer.cancel()
        if not self._pid:
            self._sudo.leave(self)
            return
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            self._signal(number)
        self._timer = self._sudo.loop.call_at(time.monotonic() + _KILL_AFTER_S, lambda: self._signal(signal.SIGKILL))


def _listen(path: str) -> socket.socket:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)  # noqa: FBT003
    listener.bind(path)
    # SAFETY: until these are done the socket does not listen. In /dev only root can have put something else there.
    os.chmod(path, 0o600)
    try:
        os.chown(path, -1, find_group(_GROUP))
    except (Refused, PermissionError):
        pass  # No such group: root alone.
    else:
        os.chmod(path, 0o660)
    listener.listen(_CALLERS_MAX)
    return listener
