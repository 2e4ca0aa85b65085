"""Sockets of another network namespace, in this process: made by a thread that has entered it for that moment."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def socket_in(
    netns: str, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
) -> socket.socket:
    """Return a socket that is and stays in a named namespace, whoever uses it."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            descriptor = os.open(Path("/run/netns", netns), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _LIBC.setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(descriptor)
            made.append(socket.socket(family, kind, protocol))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # it ends, so nothing else is ever done in there
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
