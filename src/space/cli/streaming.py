"""A command's output to ours, our input and signals to it, its exit status to ours."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Command, Gap, Output

CHUNK_BYTES = 64 * 1024
INTERRUPTS_MAX = 3
"""So many Ctrl-C end this program although the command goes on."""
STATUS_BROKEN_PIPE = 141


def stdin_is_for_programs() -> bool:
    """Whether standard input is a pipe or a file; a terminal's input stays with the terminal."""
    try:
        return not os.isatty(0)
    except OSError:
        return False


def run_through(command: "Command", *, stdin: bool) -> int:
    """Pass everything through until the command ends; return the status to exit with."""
    with _Signals(command):
        if stdin:
            threading.Thread(target=_feed, args=(command,), name="space-stdin", daemon=True).start()
        try:
            write_events(command)
        except BrokenPipeError:
            with suppress(SpaceError):
                command.signal("PIPE")
            _silence_stdout()
            return STATUS_BROKEN_PIPE
        return command.wait().status


def write_events(events: "Iterable[Output | Gap]") -> None:
    """Write output where it belongs, as it comes, and tell of gaps on standard error."""
    out, err = sys.stdout.buffer, sys.stderr.buffer
    for event in events:
        if event.data:
            target = err if event.stream == "stderr" else out
            target.write(event.data)
            target.flush()
        else:
            err.write(b"\n[space: some of %s is no longer kept]\n" % event.stream.encode())
            err.flush()


def _feed(command: "Command") -> None:
    # The command may end, or be given up, while its input still comes: then nobody needs it.
    with suppress(SpaceError, OSError):
        while data := os.read(0, CHUNK_BYTES):
            command.stdin.write(data)
        command.stdin.close()


def _silence_stdout() -> None:
    """Let the interpreter's last flush of standard output succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Signals:
    """While in force, SIGINT, SIGTERM and SIGHUP go to the command instead of ending this program.

    A handler may interrupt anything, so it only notes the signal; a thread of its own sends it.
    """

    def __init__(self, command: "Command") -> None:
        self._command = command
        self._came: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._interrupts = 0
        self._thread = threading.Thread(target=self._send, name="space-signals", daemon=True)

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._note) for number in _PASSED_ON}
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(None)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= INTERRUPTS_MAX:
                raise KeyboardInterrupt
        self._came.put(_PASSED_ON[signal.Signals(number)])

    def _send(self) -> None:
        while (name := self._came.get()) is not None:
            with suppress(SpaceError):
                self._command.signal(name)


_PASSED_ON = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP"}
