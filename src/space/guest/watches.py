"""Changes below a directory, through inotify, as lines on a stream.

A recursive watch follows directories that appear: what is in a new one already is reported as created, since it came
to be before the watch could see it. When no more directories can be watched a ``limit`` line says from where on, and
when the host reads too slowly events are dropped and an ``overflow`` line says so. Nothing here grows without bound.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
from collections import deque

from space.guest.loop import READ
from space.guest.system import ActingAs, Identity, Refused, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from space.guest.loop import Loop
    from space.protocol.guest import GuestChannel

_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024
_WAITING_MAX = 4096
_READS_MAX = 64
"""After so many a mark is told in spite of what is still to be read: a guest may make events without end."""
_DIRECTORIES_MAX = 65536
_MODIFY, _ATTRIBUTES, _CLOSE_WRITE, _FROM, _TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED, _ONLY_DIRECTORY, _IS_DIRECTORY = 0x2000, 0x4000, 0x8000, 0x01000000, 0x40000000
_MASK = _MODIFY | _ATTRIBUTES | _FROM | _TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
_NAMES = {
    _CREATE: "create",
    _MODIFY: "modify",
    _DELETE: "delete",
    _ATTRIBUTES: "attributes",
    _FROM: "moved-from",
    _TO: "moved-to",
}


class Watch:
    """One watch, living until its stream is reset or what it watches is gone."""

    def __init__(self, path: str, identity: Identity, *, recursive: bool, marks: bool = False) -> None:
        """Begin to watch, in a thread that acts as ``identity``. Raises ``OSError`` or ``Refused``."""
        self.marks = marks
        self._top = path
        self._identity = identity
        self._recursive = recursive and os.path.isdir(path)
        self._paths: dict[int, str] = {}
        self._waiting: deque[bytes] = deque()
        self._lost = False
        self._limited = False
        self._gone = False
        self._fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._add("")
            if self._recursive:
                self._scan("", report=False)
        except BaseException:
            os.close(self._fd)
            raise

    def attach(self, number: int, channel: GuestChannel, loop: Loop, on_gone: Callable[[], object]) -> None:
        """Send what happens on the stream ``number``; call ``on_gone`` when there will be no more."""
        self._number = number
        self._channel = channel
        self._loop = loop
        self._on_gone = on_gone
        channel.open_send(number)
        loop.watch(self._fd, READ, self._on_readable)
        self.pump()

    def pump(self) -> None:
        """Send what waits, as far as there is room."""
        while self._waiting or self._lost:
            if not self._waiting:
                self._lost = False
                self._say("overflow", "")
            line = self._waiting[0]
            if self._channel.room(self._number) < len(line):
                return
            self._channel.send(self._number, line)
            self._waiting.popleft()
        if self._gone:
            self._channel.end(self._number)
            self._on_gone()

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1

    def mark(self, text: str) -> None:
        """Tell what has happened by now, and then ``text``."""
        for _ in range(_READS_MAX):
            if not self._take_some():
                break
        self._say("mark", text)
        self.pump()

    def _on_readable(self, _events: int) -> None:
        if self._take_some():
            self.pump()

    def _take_some(self) -> bool:
        """Take what the kernel has to tell; False when there is nothing."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        position = 0
        # SAFETY: new directories are looked into with the rights of the one who watches.
        with ActingAs(self._identity):
            while position + _EVENT.size <= len(data):
                watch, mask, cookie, size = _EVENT.unpack_from(data, position)
                position += _EVENT.size
                name = os.fsdecode(data[position : position + size].split(b"\0", 1)[0])
                position += size
                self._take(watch, mask, cookie, name)
        return True

    def _take(self, watch: int, mask: int, cookie: int, name: str) -> None:
        if mask & _OVERFLOW:
            self._lost = True
            return
        parent = self._paths.get(watch)
        if parent is None:
            return
        if mask & (_IGNORED | _UNMOUNT | _DELETE_SELF | _MOVE_SELF):
            if mask & _IGNORED:
                self._paths.pop(watch, None)
            if not parent and not self._gone:
                self._gone = True
                self._say("gone", "")
            return
        path = f"{parent}/{name}" if parent and name else parent or name
        is_directory = bool(mask & _IS_DIRECTORY)
        for bit, event in _NAMES.items():
            if mask & bit:
                self._say(event, path, directory=is_directory, cookie=cookie)
        if is_directory and self._recursive and mask & (_CREATE | _TO):
            try:
                self._add(path)
                self._scan(path, report=bool(mask & _CREATE))
            except OSError:
                pass  # Gone again, or not for this user to see.

    def _add(self, path: str) -> None:
        full = os.path.join(self._top, path) if path else self._top
        flags = _MASK | (_ONLY_DIRECTORY if path else 0)
        try:
            if len(self._paths) >= _DIRECTORIES_MAX:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            watch = call("inotify_add_watch", self._fd, ctypes.c_char_p(os.fsencode(full)), flags)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if not path:
                raise Refused("watch-limit", "No more directories can be watched", errno.ENOSPC) from error
            if not self._limited:
                self._limited = True
                self._say("limit", path, directory=True)
            return
        self._paths[watch] = path

    def _scan(self, path: str, *, report: bool) -> None:
        """Watch all directories below ``path``; report what is there already, where it is new."""
        waiting = [path]
        while waiting and not self._limited:
            directory = waiting.pop()
            try:
                entries = os.scandir(os.path.join(self._top, directory))
            except OSError:
                continue
            with entries:
                for entry in entries:
                    inner = f"{directory}/{entry.name}" if directory else entry.name
                    is_directory = entry.is_dir(follow_symlinks=False)
                    if report:
                        self._say("create", inner, directory=is_directory)
                    if is_directory:
                        try:
                            self._add(inner)
                        except OSError:
                            continue
                        waiting.append(inner)

    def _say(self, event: str, path: str, *, directory: bool = False, cookie: int = 0) -> None:
        if len(self._waiting) >= _WAITING_MAX and event not in ("gone", "limit", "mark"):
            self._lost = True
            return
        line = {"event": event, "path": path, "directory": directory, "cookie": cookie}
        text = json.dumps(line).encode() + b"\n"
        if not self._waiting or self._waiting[-1] != text:  # One of many equal ones in a row says it all.
            self._waiting.append(text)
