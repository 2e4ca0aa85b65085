"""What the host may ask for: the table of operations, and what each of them needs besides a command.

Most are answered at once; those on files go to threads, with the streams they read or write.
"""

from __future__ import annotations

import os

from space.guest.processes import Processes
from space.guest.system import Refused, refused
from space.guest.users import find_identity
from space.protocol.channel import failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.loop import Loop
    from space.guest.standstill import Standstill
    from space.guest.transfers import Inlet, Outlet, Task, Workers
    from space.guest.watches import Watch
    from space.protocol.guest import GuestChannel

    Direct = Callable[[dict[str, Any]], dict[str, Any]]

_OUTGOING = {"file-read", "list-dir", "archive-read"}
_INCOMING = {"file-write", "archive-write"}
_DURING_STANDSTILL = {"awaken", "quiesce", "list", "metrics", "activity", "forget"}


class Requests:
    """Carries out requests, and keeps the streams of those on files."""

    def __init__(
        self, channel: GuestChannel, loop: Loop, processes: Processes, on_error: Callable[[BaseException], None]
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._processes = processes
        self._on_error = on_error
        self._workers: Workers | None = None
        self._outlets: dict[int, Outlet] = {}
        self._inlets: dict[int, Inlet] = {}
        self._watches: dict[int, Watch] = {}
        self._standstill: Standstill | None = None
        self._direct: dict[str, Direct] = {
            "configure": self._configure,
            "start": processes.start,
            "signal": processes.signal,
            "resize": processes.resize,
            "forget": processes.forget,
            "list": self._list,
            "metrics": self._metrics,
            "activity": self._activity,
            "awaken": self._awaken,
        }

    # --- what the channel reports; False when the stream is not one of these

    def on_received(self, number: int, data: bytes) -> bool:
        inlet = self._inlets.get(number)
        if inlet is not None:
            inlet.on_received(data)
        return inlet is not None

    def on_ended(self, number: int) -> bool:
        inlet = self._inlets.get(number)
        if inlet is not None:
            inlet.on_ended()
        return inlet is not None

    def on_writable(self, number: int, acked: int) -> bool:
        outlet, watch = self._outlets.get(number), self._watches.get(number)
        if outlet is not None:
            outlet.on_writable(acked)
        elif watch is not None:
            watch.pump()
        return outlet is not None or watch is not None

    def on_reset(self, number: int) -> bool:
        half = self._outlets.pop(number, None) or self._inlets.pop(number, None)
        if half is not None:
            half.cancel()
        return self._end_watch(number) or half is not None

    # --- operations

    def carry_out(self, number: int, op: str, fields: dict[str, Any]) -> None:
        """Answer a request, now or from a thread; never raises."""
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

    def _end_watch(self, stream: int) -> bool:
        watch = self._watches.pop(stream, None)
        if watch is not None:
            watch.close()
        return watch is not None

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
        self._processes.stand_still()
        os.sync()
        self._channel.fall_silent(number)

    def _awaken(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Adapt to the world as it is now, then let everything go on. When that fails, everything stays stopped."""
        from space.guest import standstill

        result = standstill.adjust(fields)
        if self._standstill is not None and self._standing:
            self._processes.go_on(self._standstill.end())
        return result
