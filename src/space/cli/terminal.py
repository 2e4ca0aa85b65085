"""This terminal as the terminal of a command: raw mode, resizes, detaching with Ctrl-]."""

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Self

from space.errors import SpaceError

if TYPE_CHECKING:
    from space import Command, Tty

DETACH = b"\x1d"
"""Ctrl-]"""
POLL_S = 0.2
CHUNK_BYTES = 64 * 1024
_SIZE = struct.Struct("HHHH")


def is_terminal() -> bool:
    """Whether we are at a terminal, in and out."""
    return os.isatty(0) and os.isatty(1)


def size() -> "Tty":
    """Return the size of this terminal."""
    from space import Tty

    rows, cols, _, _ = _SIZE.unpack(fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(_SIZE.size)))
    return Tty(rows or 24, cols or 80)


def hand_over(command: "Command", *, redraw: bool = False) -> bool:
    """Give this terminal to the command until it ends; return False when the user detached instead.

    ``redraw`` makes full-screen programs paint anew, for those who come back to one.
    """
    with _raw_mode(), _Keyboard(command) as keyboard:
        if redraw:
            keyboard.resized()
        while not keyboard.detached:
            try:
                event = command.next_event(timeout_s=POLL_S)
            except TimeoutError:
                continue
            if event is None:
                return True
            sys.stdout.buffer.write(event.data)
            sys.stdout.buffer.flush()
    command.detach()
    return False


@contextmanager
def _raw_mode() -> Generator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # What was typed ahead is kept.
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


class _Keyboard:
    """A thread that sends what is typed, and the terminal's new size whenever it changes."""

    def __init__(self, command: "Command") -> None:
        self.detached = False
        self._command = command
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="space-keyboard", daemon=True)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGWINCH, self._note)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGWINCH, self._before)
        os.write(self._wake_write, b"q")
        self._thread.join(timeout=1)

    def resized(self) -> None:
        """Let the thread tell the command the size; safe in a signal handler."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.resized()

    def _run(self) -> None:
        with suppress(SpaceError, OSError):  # The command has ended; the main thread tells how.
            while self._step():
                pass

    def _step(self) -> bool:
        ready, _, _ = select.select([0, self._wake_read], [], [])
        if self._wake_read in ready:
            if b"q" in os.read(self._wake_read, 64):
                return False
            now = size()
            self._command.resize(now.rows, now.cols)
        if 0 in ready:
            typed = os.read(0, CHUNK_BYTES)
            before, detach, _ = typed.partition(DETACH)
            if before:
                self._command.stdin.write(before)
            self.detached = bool(detach) or not typed
        return not self.detached
