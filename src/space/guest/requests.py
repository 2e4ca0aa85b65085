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

    from space.guest.checkpoints import Checkpoints
    from space.guest.loop import Loop
    from space.guest.ports import Connection, Ports
    from space.guest.transfers import Inlet, Outlet, Task, Workers
    from space.guest.watches import Watch
    from space.protocol.guest import GuestChannel

    Direct = Callable[[dict[str, Any]], dict[str, Any]]

_OUTGOING = {"file-read", "list-dir", "archive-read"}
_INCOMING = {"file-write", "archive-write"}


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
        self._ports: Ports | None = None
        self._checkpoints: Checkpoints | None = None
        self._hostname = ""
        self._trusted: str | None = ""
        """The certificate that is trusted; "": what a former agent has left on the disk is not known yet."""
        self.hooks_directory: str | None = None
        """Where the sandbox's hooks are; None: at the usual place, if this is a sandbox at all."""
        self._direct: dict[str, Direct] = {
            "configure": self._configure,
            "trust": self._trust,
            "start": processes.start,
            "signal": processes.signal,
            "resize": processes.resize,
            "forget": processes.forget,
            "list": self._list,
            "metrics": self._metrics,
            "activity": self._activity,
            "watch-mark": self._mark_watches,
        }

    def greeted(self) -> None:
        """The host (re)connected."""
        if self._checkpoints is not None:
            self._checkpoints.greeted()

    @property
    def standing(self) -> bool:
        """Whether everything stands still for a checkpoint."""
        return self._checkpoints is not None and self._checkpoints.standing

    # --- what the channel reports; False when the stream is not one of these

    def on_received(self, number: int, data: bytes) -> bool:
        inlet = self._inlets.get(number) or self._connection(number)
        if inlet is not None:
            inlet.on_received(data)
        return inlet is not None

    def on_ended(self, number: int) -> bool:
        inlet = self._inlets.get(number) or self._connection(number)
        if inlet is not None:
            inlet.on_ended()
        return inlet is not None

    def on_writable(self, number: int, acked: int) -> bool:
        outlet, watch, connection = self._outlets.get(number), self._watches.get(number), self._connection(number)
        if outlet is not None:
            outlet.on_writable(acked)
        elif watch is not None:
            watch.pump()
        elif connection is not None:
            connection.on_writable()
        return outlet is not None or watch is not None or connection is not None

    def on_reset(self, number: int) -> bool:
        half = self._outlets.pop(number, None) or self._inlets.pop(number, None) or self._connection(number)
        if half is not None:
            half.cancel()
        return self._end_watch(number) or half is not None

    # --- operations

    def carry_out(self, number: int, op: str, fields: dict[str, Any]) -> None:
        """Answer a request, now or from a thread; never raises."""
        try:
            if self._checkpoints is not None and self._checkpoints.must_wait(number, op, fields):
                return
            if op == "start" and self._processes.guard.holding:
                self._processes.guard.postpone(lambda: self.carry_out(number, op, fields))
                return
            direct = self._direct.get(op)
            if direct is not None:
                self._channel.reply(number, direct(fields))
            else:
                self._begin(number, op, fields)
        except Refused as error:
            self._channel.refuse(number, error.failure)
        except OSError as error:
            self._channel.refuse(number, refused(error).failure)
        except Exception as error:  # noqa: BLE001  the agent outlives every mistake
            self._on_error(error)
            self._channel.refuse(number, failure("internal", f"{type(error).__name__}: {error}"))

    def _begin(self, number: int, op: str, fields: dict[str, Any]) -> None:
        """Begin what is answered later."""
        if op == "quiesce":
            if self._ports is not None and fields["event"] != "snapshot":
                self._ports.close_all()
            self._around_checkpoints().quiesce(number, fields)
        elif op == "awaken":
            self._around_checkpoints().awaken(number, fields)
        elif op == "connect":
            self._all_ports().connect(number, fields)
        else:
            self._begin_task(number, op, fields)

    def _begin_task(self, number: int, op: str, fields: dict[str, Any]) -> None:
        from space.guest import operations
        from space.guest.transfers import Inlet, Outlet, Task, Workers

        if self._workers is None:
            self._workers = Workers(self._loop)
        identity = find_identity(fields["user"] or self._processes.defaults.user)
        owner = find_identity(fields["owner"]) if fields.get("owner") else None
        base = owner.home if owner is not None else self._processes.defaults.workdir or identity.home
        task = Task(number, fields, identity, base, owner)
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

    def _connection(self, stream: int) -> Connection | None:
        return self._ports.get(stream) if self._ports is not None else None

    def _all_ports(self) -> Ports:
        if self._ports is None:
            from space.guest.ports import Ports

            self._ports = Ports(self._channel, self._loop)
        return self._ports

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

    def _mark_watches(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Have each watch that wants it tell all that has happened by now, and then the mark."""
        for watch in list(self._watches.values()):
            if watch.marks:
                watch.mark(fields["mark"])
        return {}

    def _configure(self, fields: dict[str, Any]) -> dict[str, Any]:
        from space.guest.identity import adjust, size_shared_memory

        result = adjust(fields)
        defaults = self._processes.defaults
        if fields["env"] is not None:
            defaults.set_env(fields["env"])
        defaults.workdir = fields["workdir"] or defaults.workdir
        defaults.user = fields["user"] or defaults.user
        self._hostname = fields["hostname"] or self._hostname
        self._limit(fields["limits"])
        if fields["limits"]["memory_mib"] is not None:
            size_shared_memory(fields["limits"]["memory_mib"])
        return result

    def _trust(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Trust an authority, or none any more. What is so already takes no time: memory may be an image's, and with it
        the disk.
        """
        certificate, subject_hash = fields["certificate"], fields["subject_hash"]
        if certificate == self._trusted or os.getpid() != 1:
            return {}
        from space.guest.trust import Stores

        if certificate is None:
            Stores().remove()
            self._processes.defaults.trust = {}
        else:
            self._processes.defaults.trust = Stores().add(certificate, subject_hash or "")
        self._trusted = certificate
        return {}

    def _limit(self, limits: dict[str, Any]) -> None:
        if limits["pids"] is not None:
            self._processes.groups.limit_pids(limits["pids"])
        if limits["open_files"] is not None:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            soft = limits["open_files"] if hard == resource.RLIM_INFINITY else min(limits["open_files"], hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if limits["cpus"] is not None:
            from space.guest.identity import set_cpus

            set_cpus(limits["cpus"], everybody=self._checkpoints is not None)

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

    def _around_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            from space.guest.checkpoints import Checkpoints
            from space.guest.hooks import DIRECTORY, Hooks

            directory = self.hooks_directory or (DIRECTORY if os.getpid() == 1 else None)
            hooks = Hooks(directory, self._loop, self._processes)
            self._checkpoints = Checkpoints(
                self._channel, self._processes, hooks, limit=self._limit, carry_out=self.carry_out
            )
        self._checkpoints.hostname = self._checkpoints.hostname or self._hostname
        return self._checkpoints
