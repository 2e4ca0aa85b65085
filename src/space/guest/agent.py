"""The agent: the guest's end of the channel on two descriptors, and the table of what the host may ask for.

It never ends by itself: whatever arrives is answered or skipped, an exception in one operation becomes the answer
``internal``, and when the channel's other end goes away it waits for it to come back.
"""

from __future__ import annotations

import os
import time

from space.guest.groups import Groups
from space.guest.loop import READ, WRITE, Loop
from space.guest.processes import Processes
from space.guest.system import Refused, refused
from space.guest.users import find_identity
from space.protocol.channel import failure
from space.protocol.events import Ended, Greeted, Received, Requested, WasReset, Writable
from space.protocol.guest import GuestChannel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.standstill import Standstill
    from space.guest.transfers import Inlet, Outlet, Task, Workers
    from space.guest.watches import Watch
    from space.protocol.events import Event

    Direct = Callable[[dict[str, Any]], dict[str, Any]]

_READ_BYTES = 1024 * 1024
_READS_MAX = 4
_REOPEN_S_MIN, _REOPEN_S_MAX = 0.05, 1.0
_OUTGOING = {"file-read", "list-dir", "archive-read"}
_INCOMING = {"file-write", "archive-write"}
_DURING_STANDSTILL = {"awaken", "quiesce", "list", "metrics", "activity", "forget"}


class Agent:
    """Everything of one guest. ``run`` serves the channel on two descriptors until ``stop``."""

    def __init__(self, source_fd: int, sink_fd: int, groups: Groups) -> None:
        self._source = source_fd
        self._sink = sink_fd
        self._channel = GuestChannel()
        self._loop = Loop(self._on_error)
        self._processes = Processes(self._channel, self._loop, groups)
        self._boot_id = _boot_id()
        self._workers: Workers | None = None
        self._outlets: dict[int, Outlet] = {}
        self._inlets: dict[int, Inlet] = {}
        self._watches: dict[int, Watch] = {}
        self._standstill: Standstill | None = None
        self._sink_watched = False
        self._reopen_s = _REOPEN_S_MIN
        self.last_error = ""
        self._direct: dict[str, Direct] = {
            "configure": self._configure,
            "start": self._processes.start,
            "signal": self._processes.signal,
            "resize": self._processes.resize,
            "forget": self._processes.forget,
            "list": self._list,
            "metrics": self._metrics,
            "activity": self._activity,
            "awaken": self._awaken,
        }
        for fd in (source_fd, sink_fd):
            os.set_blocking(fd, False)

    @property
    def wake_fd(self) -> int:
        """Where the signal handler writes, so that ended children are noticed."""
        return self._loop.wake_fd

    def run(self) -> None:
        """Serve. Returns only after ``stop``."""
        self._loop.on_wake = self._processes.reap
        self._loop.before_wait = self._flush
        self._loop.watch(self._source, READ, self._on_readable)
        self._loop.run()

    def stop(self) -> None:
        self._loop.running = False

    # --- the channel

    def _on_readable(self, _events: int) -> None:
        for _ in range(_READS_MAX):
            if self._channel.congested:
                self._loop.watch(self._source, 0, self._on_readable)
                return
            try:
                data = os.read(self._source, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._wait_for_host()
                return
            self._reopen_s = _REOPEN_S_MIN
            self._channel.feed(data)
            while (event := self._channel.next_event()) is not None:
                self._handle(event)
            if len(data) < _READ_BYTES // 16:
                return

    def _wait_for_host(self) -> None:
        """Nobody has the other end open: look again later, and later still, but never give up."""
        self._loop.watch(self._source, 0, self._on_readable)
        self._loop.call_at(
            time.monotonic() + self._reopen_s, lambda: self._loop.watch(self._source, READ, self._on_readable)
        )
        self._reopen_s = min(2 * self._reopen_s, _REOPEN_S_MAX)

    def _flush(self) -> None:
        channel = self._channel
        was_congested = channel.congested
        blocked = False
        try:
            while buffers := channel.outgoing():
                channel.written(os.writev(self._sink, buffers))
        except BlockingIOError:
            blocked = True
        except OSError:
            blocked = False
            self._loop.call_at(time.monotonic() + _REOPEN_S_MAX, lambda: None)  # Nobody reads: try again later.
        if blocked != self._sink_watched:
            self._sink_watched = blocked
            self._loop.watch(self._sink, WRITE if blocked else 0, lambda _events: None)
        if was_congested and not channel.congested:
            self._loop.watch(self._source, READ, self._on_readable)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Received):
            self._on_received(event.number, event.data)
        elif isinstance(event, Writable):
            self._on_writable(event.number, event.acked)
        elif isinstance(event, Requested):
            self._on_request(event.number, event.op, event.fields)
        elif isinstance(event, Ended):
            inlet = self._inlets.get(event.number)
            if inlet is not None:
                inlet.on_ended()
            self._processes.on_ended(event.number)
        elif isinstance(event, WasReset):
            self._on_reset(event.number)
        elif isinstance(event, Greeted):
            records = [command.record(self._channel) for command in self._processes.commands.values()]
            self._channel.welcome(self._boot_id, os.getpid(), records)
            self._processes.report_exits()

    def _on_received(self, number: int, data: bytes) -> None:
        inlet = self._inlets.get(number)
        if inlet is not None:
            inlet.on_received(data)
        else:
            self._processes.on_received(number, data)

    def _on_writable(self, number: int, acked: int) -> None:
        if (outlet := self._outlets.get(number)) is not None:
            outlet.on_writable(acked)
        elif (watch := self._watches.get(number)) is not None:
            watch.pump()
        else:
            self._processes.on_writable(number)

    def _on_reset(self, number: int) -> None:
        half = self._outlets.pop(number, None) or self._inlets.pop(number, None)
        if half is not None:
            half.cancel()
        self._end_watch(number)
        self._processes.on_reset(number)

    # --- requests

    def _on_request(self, number: int, op: str, fields: dict[str, Any]) -> None:
        try:
            if self._standing and op not in _DURING_STANDSTILL:
                raise Refused("quiesced", "The sandbox stands still for a checkpoint")
            direct = self._direct.get(op)
            if direct is not None:
                self._channel.reply(number, direct(fields))
            elif op == "quiesce":
                self._quiesce(number)
            else:
                self._begin_task(number, op, fields)
        except Refused as error:
            self._channel.refuse(number, error.failure)
        except OSError as error:
            self._channel.refuse(number, refused(error).failure)
        except Exception as error:  # noqa: BLE001  the agent outlives every mistake
            self._on_error(error)
            self._channel.refuse(number, failure("internal", f"{type(error).__name__}: {error}"))

    def _begin_task(self, number: int, op: str, fields: dict[str, Any]) -> None:
        from space.guest import operations
        from space.guest.transfers import Inlet, Outlet, Task, Workers

        if self._workers is None:
            self._workers = Workers(self._loop)
        identity = find_identity(fields["user"] or self._processes.defaults.user)
        base = self._processes.defaults.workdir or identity.home
        task = Task(number, fields, identity, base)
        task.reply = lambda ok: self._loop.hand_over(lambda: self._channel.reply(number, ok))
        stream: int | None = fields.get("stream")
        if stream is not None and (self._channel.sends(stream) or self._channel.receives(stream)):
            raise Refused("invalid-request", "stream: the number is in use")
        if op == "watch":
            task.reply = lambda _ok: self._loop.hand_over(lambda: self._attach_watch(task))
        elif stream is not None and op in _OUTGOING:
            task.outlet = self._outlets[stream] = Outlet(stream, self._channel, self._loop)
        elif stream is not None and op in _INCOMING:
            task.inlet = self._inlets[stream] = Inlet(stream, self._channel, self._loop)
        task.finished = lambda: self._loop.hand_over(lambda: self._forget_stream(stream))
        try:
            self._workers.run(task, operations.find(op), lambda error: self._fail_task(task, error))
        except Refused:
            self._forget_stream(stream)
            if stream is not None:
                self._channel.close(stream)
            raise

    def _fail_task(self, task: Task, error: Refused) -> None:
        """It failed before it replied: the stream, if there is one, is over as well."""
        stream: int | None = task.fields.get("stream")
        if stream is not None:
            self._channel.reset(stream, error.failure["code"], error.failure["message"])
        self._channel.refuse(task.number, error.failure)

    def _forget_stream(self, stream: int | None) -> None:
        if stream is not None:
            self._outlets.pop(stream, None)
            self._inlets.pop(stream, None)

    def _attach_watch(self, task: Task) -> None:
        watch, stream = task.watch, task.fields["stream"]
        if watch is None:
            return
        self._channel.reply(task.number, {})
        self._watches[stream] = watch
        watch.attach(stream, self._channel, self._loop, lambda: self._end_watch(stream))

    def _end_watch(self, stream: int) -> None:
        watch = self._watches.pop(stream, None)
        if watch is not None:
            watch.close()

    def _configure(self, fields: dict[str, Any]) -> dict[str, Any]:
        from space.guest import standstill

        defaults, limits = self._processes.defaults, fields["limits"]
        if fields["env"] is not None:
            defaults.env = fields["env"]
        defaults.workdir = fields["workdir"] or defaults.workdir
        defaults.user = fields["user"] or defaults.user
        if limits["pids"] is not None:
            self._processes.groups.limit_pids(limits["pids"])
        if limits["open_files"] is not None:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            soft = limits["open_files"] if hard == resource.RLIM_INFINITY else min(limits["open_files"], hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return standstill.adjust(fields)

    def _list(self, _fields: dict[str, Any]) -> dict[str, Any]:
        return {"commands": [command.record(self._channel) for command in self._processes.commands.values()]}

    def _metrics(self, _fields: dict[str, Any]) -> dict[str, Any]:
        from space.guest.metrics import metrics

        return metrics(self._running)

    def _activity(self, _fields: dict[str, Any]) -> dict[str, Any]:
        from space.guest.metrics import connections

        return {"commands": self._running, "connections": connections()}

    @property
    def _running(self) -> int:
        return sum(command.exit is None for command in self._processes.commands.values())

    @property
    def _standing(self) -> bool:
        return self._standstill is not None and self._standstill.since is not None

    def _quiesce(self, number: int) -> None:
        """Everything stops, what is on disk is made safe, and the reply is the last word before the next greeting."""
        from space.guest.standstill import Standstill

        if self._standstill is None:
            self._standstill = Standstill()
        self._standstill.begin()
        self._processes.hold(held=True)
        os.sync()
        self._channel.fall_silent(number)

    def _awaken(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Adapt to the world as it is now, then let everything go on. When that fails, everything stays stopped."""
        from space.guest import standstill

        result = standstill.adjust(fields)
        if self._standstill is not None and self._standing:
            self._processes.shift_deadlines(self._standstill.end())
            self._processes.hold(held=False)
        return result

    def _on_error(self, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return os.urandom(16).hex()
