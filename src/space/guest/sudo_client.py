"""``sudo`` as programs in a sandbox call it, where the kernel ignores set-uid bits: asks the agent, and waits.

Runs without any right of its own, and starts from this one file: it imports nothing but what the interpreter has built
in, because every module costs milliseconds of each call. What the two say to each other is at the top; the agent's
side, which decides and starts the program, is ``sudo``.
"""

import os
import select
import sys
from _signal import SIG_DFL, SIG_IGN, getsignal, signal  # pyright: ignore[reportMissingImports]  what the module signal wraps
from _socket import AF_UNIX, CMSG_SPACE, SCM_RIGHTS, SOCK_CLOEXEC, SOCK_STREAM, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SOCKET = "/dev/space/sudo"
REQUEST_BYTES_MAX = 512 * 1024
HELLO, STARTED, ENDED, REFUSED = b"H", b"S", b"X", b"R"
"""What the agent says: one of these, a length of four bytes, and as much payload. ``STARTED`` may bring a terminal's
master; ``ENDED`` has the status of ``waitpid`` in four bytes; ``REFUSED`` a text.

The client answers ``HELLO`` with a length of four bytes and as much of ``encode``, whose first byte brings its
standard input, output, error and working directory. After that each byte is the number of a signal for the program.
"""
FORWARDED = (1, 2, 3, 10, 12, 14, 15, 18)
"""HUP INT QUIT USR1 USR2 ALRM TERM CONT"""

_SIGWINCH = 28
_QUIET_MS = 30
_IO_BYTES = 64 * 1024
_USAGE = b"""usage: sudo [-EHkns] [-u user] [VAR=value] command [argument ...]
       sudo [-EHkn] -i|-s [-u user] [VAR=value] [command [argument ...]]
       sudo -l | -v | -k | -K | -h | -V
"""
_LONG = {
    "login": "i",
    "shell": "s",
    "set-home": "H",
    "preserve-env": "E",
    "non-interactive": "n",
    "stdin": "S",
    "validate": "v",
    "list": "l",
    "reset-timestamp": "k",
    "remove-timestamp": "K",
    "help": "h",
    "version": "V",
    "user": "u",
    "prompt": "p",
}


class UsageError(Exception):
    """The command line is not one of sudo's, or asks for what there is not."""


class Call:
    """A command line, understood: ``flags`` of E, H, i and s change the environment and what is run."""

    def __init__(self) -> None:
        self.user = ""
        self.flags: set[str] = set()
        self.assignments: list[str] = []
        self.argv: list[str] = []

    def parse(self, words: "Sequence[str]") -> "Call":
        """Take the words after ``sudo``; raises ``UsageError``."""
        rest = list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            word = rest.pop(0)
            if word == "--":
                break
            if word.startswith("--"):
                self._take_long(word[2:], rest)
            else:
                self._take_short(word[1:], rest)
        while rest and "=" in rest[0] and not rest[0].startswith(("=", "/")):
            self.assignments.append(rest.pop(0))
        self.argv = rest
        if not self.argv and not self.flags & set("islvkKhV"):
            raise UsageError("a command is needed")
        return self

    def _take_long(self, word: str, rest: list[str]) -> None:
        name, equals, value = word.partition("=")
        letter = _LONG.get(name)
        if letter is None or (equals and letter not in "Eup"):
            raise UsageError(f"unknown option --{name}")
        if letter == "E" and equals:
            self.assignments += [f"{one}={os.environ[one]}" for one in value.split(",") if one in os.environ]
        elif letter in "up":
            self._take_value(letter, value if equals else self._next(rest, f"--{name}"))
        else:
            self.flags.add(letter)

    def _take_short(self, letters: str, rest: list[str]) -> None:
        for place, letter in enumerate(letters, 1):
            if letter in "up":
                self._take_value(letter, letters[place:] or self._next(rest, f"-{letter}"))
                return
            if letter not in "ABEHKPSVhiklnsv":
                raise UsageError(f"unknown option -{letter}")
            self.flags.add(letter)

    def _take_value(self, letter: str, value: str) -> None:
        if letter == "u":
            self.user = value

    @staticmethod
    def _next(rest: list[str], option: str) -> str:
        if not rest:
            raise UsageError(f"option {option} needs a value")
        return rest.pop(0)


def encode(call: Call, environ: "Sequence[bytes]", terminal: tuple[int, int] | None, replaced: str) -> bytes:
    """Return the request. ``terminal`` is the size (rows, columns) of the one that is to take the place of the
    standard streams named in ``replaced`` ("0", "1", "2").
    """
    flags = "".join(sorted(call.flags & set("EHis"))) + (replaced if terminal else "")
    rows, cols = terminal or (0, 0)
    words = [call.user, flags, str(rows), str(cols), str(len(call.assignments)), str(len(call.argv))]
    words += call.assignments
    words += call.argv
    return b"\0".join([*map(os.fsencode, words), *environ])


def main(path: str = SOCKET) -> int:
    """Run ``sudo`` with this process's arguments; return its exit status, or die by the program's signal."""
    try:
        call = Call().parse(sys.argv[1:])
    except UsageError as error:
        _complain(str(error))
        os.write(2, _USAGE)
        return 1
    if call.flags & set("hV"):
        os.write(1, _USAGE if "h" in call.flags else b"sudo of the sandbox\n")
        return 0
    try:
        if call.argv or call.flags & set("is"):
            return _run(call, path)
        if not os.access(path, os.W_OK):
            raise PermissionError
        if "l" in call.flags:
            os.write(1, b"    (ALL : ALL) NOPASSWD: ALL\n")
    except PermissionError:
        _complain(f"user {os.getuid()} may not use sudo: not in the group sudo")
    except OSError as error:
        _complain(str(error.strerror or error))
    else:
        return 0
    return 1


def _complain(text: str) -> None:
    os.write(2, os.fsencode(f"sudo: {text}\n"))


def _run(call: Call, path: str) -> int:
    size, replaced = _terminal()
    body = encode(call, [b"%b=%b" % item for item in os.environb.items()], size, replaced)
    if len(body) > REQUEST_BYTES_MAX:
        _complain("arguments and environment are too long")
        return 1
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    connection.connect(path)
    kind, payload, _ = receive(connection)
    if kind == HELLO:
        signals = _Signals(connection)
        _send(connection, len(body).to_bytes(4, "big") + body)
        kind, payload, master = receive(connection)
        if kind == STARTED:
            signals.let_go()
            kind, payload = _relay(connection, master) if master >= 0 else receive(connection)[:2]
    if kind == ENDED:
        return _end_as(int.from_bytes(payload, "big"))
    _complain(payload.decode("utf-8", "replace") if kind == REFUSED else "the sandbox's agent is gone")
    return 1


def _send(connection: socket, message: bytes) -> None:
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    files = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2, here))
    try:
        sent = connection.sendmsg([message], [(SOL_SOCKET, SCM_RIGHTS, files)])
        connection.sendall(message[sent:])
    except OSError:
        pass  # Refused before it was all read; the reason is there to be received.


def receive(connection: socket) -> tuple[bytes, bytes, int]:
    """Wait for one message of the agent's; return its kind (empty: it hung up), its payload, and a descriptor or -1."""
    head, ancillary, _, _ = connection.recvmsg(5, CMSG_SPACE(4))
    fd = int.from_bytes(ancillary[0][2][:4], sys.byteorder) if ancillary else -1
    while 0 < len(head) < 5 and (more := connection.recv(5 - len(head))):
        head += more
    length, payload = int.from_bytes(head[1:5], "big"), b""
    while len(payload) < length and (more := connection.recv(length - len(payload))):
        payload += more
    return head[:1], payload, fd


class _Signals:
    """From now on signals are the program's. Those that come before it is started are kept for it."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._started = False
        self._waiting: list[int] = []
        for number in FORWARDED:
            if getsignal(number) != SIG_IGN:  # As under nohup.
                signal(number, self._on_signal)

    def let_go(self) -> None:
        self._started = True
        try:
            while self._waiting:
                self._connection.send(bytes([self._waiting.pop(0)]))
        except OSError:
            pass  # The program's end is on its way.

    def _on_signal(self, number: int, _frame: object) -> None:
        self._waiting.append(number)
        if self._started:
            self.let_go()


def _terminal() -> tuple[tuple[int, int] | None, str]:
    """Return the size of the terminal, if someone sits at it and this is in its foreground, and who is on it."""
    on_terminal = "".join(str(fd) for fd in (0, 1, 2) if os.isatty(fd))
    if "01" not in on_terminal:
        return None, ""
    try:
        if os.tcgetpgrp(0) != os.getpgrp():
            return None, ""
        size = os.get_terminal_size(0)
    except OSError:
        return None, ""
    return (size.lines, size.columns), on_terminal


def _relay(connection: socket, master: int) -> tuple[bytes, bytes]:
    """Carry bytes between the caller's terminal and the program's own; return the agent's last word."""
    import fcntl
    import termios
    import tty

    def resize() -> None:
        fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

    before = termios.tcgetattr(0)
    os.set_blocking(master, False)
    signal(_SIGWINCH, lambda _number, _frame: resize())
    try:
        tty.setraw(0, termios.TCSADRAIN)
        return _Carrier(connection, master).carry()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


class _Carrier:
    """Between standard input and output and a terminal's master, until the agent has told the program's end."""

    def __init__(self, connection: socket, master: int) -> None:
        self._connection = connection
        self._master = master
        self._word: tuple[bytes, bytes] | None = None
        self._typed: bytes | None = b""
        """What the program has not taken yet; None once nothing more can be typed."""

    def carry(self) -> tuple[bytes, bytes]:
        while True:
            ready = dict(self._poll())
            at_master = ready.get(self._master, 0)
            if self._typed and at_master & select.POLLOUT:
                self._typed = self._typed[_write(self._master, self._typed) :]
            if at_master & ~select.POLLOUT and not _show(self._master):
                self._master = -1
            if self._word is not None and (self._master < 0 or not at_master):
                return self._word  # All it wrote is shown; others may still hold its terminal.
            if 0 in ready:
                self._typed = _read(0) or None
            if self._connection.fileno() in ready:
                self._word = receive(self._connection)[:2]

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        if self._word is None:
            poll.register(self._connection.fileno(), select.POLLIN)
            if self._typed == b"":
                poll.register(0, select.POLLIN)
        if self._master >= 0:
            poll.register(self._master, select.POLLIN | (select.POLLOUT if self._typed else 0))
        return poll.poll(None if self._word is None else _QUIET_MS)


def _show(master: int) -> bool:
    data = _read(master)
    while data:
        data = data[os.write(1, data) :]
    return data is not None


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, _IO_BYTES) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None  # A terminal whose other end is closed.


def _write(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)  # A terminal whose other end is closed.


def _end_as(status: int) -> int:
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    if number not in (9, 19):
        signal(number, SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    os._exit(main())
