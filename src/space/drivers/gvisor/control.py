"""What the broker asks a sentry directly, through its control socket: to write its memory image.

runsc itself only passes this on, and starting it takes as long as the image does. The language is runsc's own and
promised to nobody, so it is spoken only with the versions named here; with others the driver runs ``runsc``. See
docs/decisions/0009.
"""

import asyncio
import json
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

PROVEN = frozenset({"runsc version 0.0~20240729.0"})
"""Versions (the first line of ``runsc --version``) for which the contract suite has passed through the socket."""
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
"""In the order in which the sentry takes them."""
ANSWER_BYTES_MAX = 32 * 1024


async def checkpoint(address: Path, image: Path, timeout_s: float) -> str:
    """Have the sentry write its image into the empty directory; it stands still meanwhile and then goes on.

    Return why it failed, or "". Raise `OSError` (`TimeoutError` among them) when the sentry is not there or does not
    answer: what it does then is not known.
    """
    argument = {
        "metadata": {"compression": "none"},
        "MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": False},
        "have_pages_file": True,
        "Resume": True,
    }
    message = json.dumps({"method": "containerManager.Checkpoint", "arg": argument}).encode()
    with ExitStack() as opened:
        connection = _connect(address)
        opened.callback(connection.close)
        files = [
            os.open(image / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600) for name in IMAGE_FILES
        ]
        for file in files:
            opened.callback(os.close, file)
        # SAFETY: fixed text. The sentry gets three fresh files in a directory of root's alone, as from runsc.
        if socket.send_fds(connection, [message], files) != len(message):
            raise ConnectionError("the sentry took only a part of the request")
        async with asyncio.timeout(timeout_s):
            return _outcome(await _answer(connection))


def _connect(address: Path) -> socket.socket:
    # By way of the descriptor, as the path may be longer than such addresses can be. SAFETY: the directory is root's,
    # and no link is followed at the end.
    found = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{found}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(found)
    return connection


async def _answer(connection: socket.socket) -> object:
    """Read one JSON value. The sentry is on the guest's side of the boundary: no more of it than a whole value fits."""
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) <= ANSWER_BYTES_MAX:
        chunk = await loop.sock_recv(connection, ANSWER_BYTES_MAX)
        if not chunk:
            raise ConnectionResetError("the sentry has gone")
        received += chunk
        if received.endswith(b"}"):
            with suppress(ValueError, RecursionError):
                return json.loads(received)
    raise ConnectionError("the sentry's answer does not end")


def _outcome(answer: object) -> str:
    match answer:
        case {"success": True}:
            return ""
        case {"err": str(reason)} if reason:
            return reason
        case _:
            return "the sentry gave no reason"
