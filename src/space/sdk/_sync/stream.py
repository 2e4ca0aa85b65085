# Generated from ../_async/stream.py by scripts/sync-sdk; change that one.
"""The connection underneath a command's handle: frames in and out, and a new WebSocket when one is lost.

There is no task in the background. Whoever needs something (a reader the next event, a writer room for stdin) receives
frames until it is there; while one does so, others wait for what it finds.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from space.errors import InvalidRequest, SpaceError, Unavailable
from space.sdk._sync.dataplane import DataPlane
from space.sdk.attach import Attachment
from space.sdk.backends import Disconnected
from space.sdk.backends.threads import Condition, Lock, Socket, sleep, wait_on
from space.sdk.requests import Endpoint, Patience
from space.sdk.types import Gap, Output

UNREAD_BYTES_MAX = 64 * 1024 * 1024
"""How much output a writer may come across while nobody reads."""


class CommandStream:
    """One command's output and input across connections."""

    def __init__(
        self, plane: DataPlane, command_id: str, attachment: Attachment, offered: Endpoint | None = None
    ) -> None:
        self._plane = plane
        self._path = f"/v1/commands/{command_id}/attach"
        self._attachment = attachment
        self._offered = offered
        self._socket: Socket | None = None
        self._changed = Condition()
        self._sending = Lock()
        self._receiving = False
        self._unread: deque[Output | Gap] = deque()
        self._unread_bytes = 0
        self._failed: SpaceError | None = None
        self._patience = Patience()

    def next_event(self, timeout_s: float | None = None) -> Output | Gap | None:
        """Return the next output or gap, or None once the command has ended and all of it was returned."""
        attachment = self._attachment
        self._until(lambda: bool(self._unread) or attachment.exit is not None, timeout_s)
        if not self._unread:
            return None
        event = self._unread.popleft()
        if isinstance(event, Output):
            self._unread_bytes -= len(event.data)
        return event

    def next_event_or_room(self) -> Output | Gap | None:
        """Return the next event, or None as soon as stdin takes more or the command has ended."""
        attachment = self._attachment
        self._until(lambda: bool(self._unread) or attachment.stdin_room > 0 or attachment.exit is not None)
        return self.next_event() if self._unread else None

    def connect(self) -> None:
        """Attach. The first attach of a command starts it."""
        attachment = self._attachment
        self._until(lambda: attachment.started or attachment.exit is not None)

    def write(self, data: bytes) -> None:
        """Send stdin bytes; waits while the command is more than the window behind."""
        attachment = self._attachment
        while data:
            self._until(
                lambda: (
                    attachment.stdin_room > 0 or attachment.exit is not None or self._unread_bytes > UNREAD_BYTES_MAX
                )
            )
            if self._unread_bytes > UNREAD_BYTES_MAX:
                raise InvalidRequest(
                    "The command waits for its output to be read: read while writing, or use communicate().",
                    code="output-not-read",
                )
            room = max(1, attachment.stdin_room)
            attachment.feed(data[:room])
            data = data[room:]
            self._flush()

    def close_stdin(self) -> None:
        self._attachment.close_stdin()
        self._flush()

    def send_control(self, frame: str) -> None:
        """Send a text frame on the present connection, or on the next one when that is lost meanwhile."""
        while self._attachment.exit is None:
            self.connect()
            socket = self._socket
            if socket is None:
                continue
            try:
                with self._sending:
                    socket.send(frame)
            except Disconnected:
                self._until(lambda lost=socket: self._socket is not lost or self._attachment.exit is not None)
            else:
                return

    def close(self) -> None:
        """Let go of the connection; the command goes on."""
        if self._socket is not None:
            self._drop(self._socket)

    # Receiving

    def _until(self, ready: Callable[[], bool], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._changed:
                if ready():
                    return
                if self._failed is not None:
                    raise self._failed
                if self._receiving:
                    wait_on(self._changed, left_s)
                    continue
                self._receiving = True
            try:
                self._take_frame(left_s)
            finally:
                with self._changed:
                    self._receiving = False
                    self._changed.notify_all()

    def _take_frame(self, timeout_s: float | None) -> None:
        socket = self._socket
        try:
            if socket is None:
                socket = self._connect()
            frame = socket.receive(timeout_s)
        except Disconnected as error:
            if socket is not None:
                self._drop(socket)
            try:
                self._patience.failed(str(error))
            except Unavailable as given_up:
                self._failed = given_up
                raise
            return
        was_started = self._attachment.started
        try:
            event = self._attachment.receive(frame)
        except SpaceError as error:
            self._failed = error
            self._drop(socket)
            raise
        if event is not None:
            self._unread.append(event)
            self._unread_bytes += len(event.data) if isinstance(event, Output) else 0
        if was_started:  # More than the greeting has come, so this connection works.
            self._patience.worked()
        if self._attachment.exit is not None:
            self._drop(socket)
        elif not was_started:
            self._patience.connected()
            self._send_stdin(socket)

    def _connect(self) -> Socket:
        if self._patience.delay_s:
            sleep(self._patience.delay_s)
        self._socket = self._plane.attach(self._path, self._attachment.query(), self._offered)
        return self._socket

    def _drop(self, socket: Socket) -> None:
        if self._socket is socket:
            self._socket = None
            self._attachment.disconnected()
        socket.close()

    # Sending

    def _flush(self) -> None:
        attachment = self._attachment
        while attachment.stdin_unsent and attachment.exit is None:
            self.connect()
            if self._socket is not None:
                self._send_stdin(self._socket)

    def _send_stdin(self, socket: Socket) -> None:
        # A connection that takes nothing more may still have something to give, the exit record perhaps: only whoever
        # receives lets go of it. What was not made safe is sent again on the next one.
        with suppress(Disconnected):
            with self._sending:
                while (frame := self._attachment.next_frame()) is not None:
                    socket.send(frame)
