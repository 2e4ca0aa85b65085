"""The agent: the guest's end of the channel, and the start of it all.

It never ends by itself: whatever arrives is answered or skipped, an exception in one operation becomes the answer
``internal``, and when the channel's other end goes away it waits for it to come back.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

from space.guest.cgroups import Groups
from space.guest.loop import Loop
from space.guest.processes import Processes
from space.guest.requests import Requests
from space.guest.spawning import spare_from_memory_killer
from space.guest.system import call, keep_freed_memory
from space.guest.wires import open_wire
from space.protocol.events import Ended, Greeted, Received, Requested, WasReset, Writable
from space.protocol.guest import GuestChannel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from space.guest.wires import Listener, Pipes
    from space.protocol.events import Event

_READ_BYTES = 1024 * 1024
_READS_MAX = 4
_REOPEN_S_MIN, _REOPEN_S_MAX = 0.05, 1.0
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_CHANNEL_FD_MIN = 10


def main() -> None:
    """Take the channel away from descriptors 0 to 2, so that nothing else can read or write it, and serve. With
    ``--channel`` it is elsewhere (see ``open_wire``), and the descriptors are nothing.
    """
    source = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FD_MIN)
    sink = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FD_MIN)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2) if os.getpid() == 1 else (0, 1):
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")
    os.umask(0o022)
    _protect()
    keep_freed_memory()
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    agent = Agent(open_wire(options.get("--channel"), source, sink), Groups(options.get("--cgroups")))
    agent.sudo_path = options.get("--sudo")
    agent.hooks_from(options.get("--hooks"))
    agent.memory_from(options.get("--meminfo"))
    signal.set_wakeup_fd(agent.wake_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if os.getpid() == 1:
            signal.signal(number, signal.SIG_IGN)
    agent.run()


def _protect() -> None:
    """Orphans come to the agent, others do not see into it, and the kernel's memory killer spares it."""
    if os.getpid() == 1:
        call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except OSError:
        pass  # As the first process of a sandbox it has them anyway.
    spare_from_memory_killer()


class Agent:
    """Everything of one guest. ``run`` serves the channel on a wire until ``stop``."""

    def __init__(self, wire: Pipes | Listener, groups: Groups) -> None:
        self._wire = wire
        self._channel = GuestChannel()
        self._loop = Loop(self._on_error)
        self._processes = Processes(self._channel, self._loop, groups)
        self._boot_id = _boot_id()
        self._requests = Requests(self._channel, self._loop, self._processes, self._on_error)
        self._sink_watched = False
        self._source_paused = False
        self._retrying = False
        self._reopen_s = _REOPEN_S_MIN
        self.sudo_path: str | None = None
        """Where to listen for callers of ``sudo``; None: at the usual place, if the kernel has to be helped out."""
        self._sudo_begun = False
        self.last_error = ""

    @property
    def wake_fd(self) -> int:
        """Where the signal handler writes, so that ended children are noticed."""
        return self._loop.wake_fd

    def memory_from(self, path: str | None) -> None:
        """Read elsewhere than in ``/proc/meminfo`` how much memory is left, for tests."""
        if path is not None:
            self._processes.guard.meminfo = path

    def hooks_from(self, directory: str | None) -> None:
        """Run the sandbox's hooks from that directory; None: from the usual place, if this is a sandbox at all."""
        self._requests.hooks_directory = directory

    def run(self) -> None:
        """Serve. Returns only after ``stop``."""
        self._loop.on_wake = self._processes.reap
        self._loop.before_wait = self._flush
        self._wire.begin(self._loop, self._on_readable)
        self._loop.run()

    def stop(self) -> None:
        self._loop.running = False

    # --- the channel

    def _on_readable(self, _events: int) -> None:
        for _ in range(_READS_MAX):
            if self._channel.congested:
                self._source_paused = True
                self._wire.heed(reading=False)
                return
            try:
                data = self._wire.read(_READ_BYTES)
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
        self._wire.heed(reading=False)
        self._loop.call_at(time.monotonic() + self._reopen_s, lambda: self._wire.heed(reading=True))
        self._reopen_s = min(2 * self._reopen_s, _REOPEN_S_MAX)

    def _flush(self) -> None:
        channel = self._channel
        blocked = False
        try:
            while buffers := channel.outgoing():
                channel.written(self._wire.write(buffers))
            self._wire.write([])
        except BlockingIOError:
            blocked = True
        except OSError:
            self._retry_later()  # Nobody has the other end open.
        if blocked != self._sink_watched:
            self._sink_watched = blocked
            self._wire.wait_to_write(waiting=blocked)
        if self._source_paused and not channel.congested:
            self._source_paused = False
            self._wire.heed(reading=True)

    def _retry_later(self) -> None:
        def flush_again() -> None:
            self._retrying = False  # Being called is enough: the loop flushes before it waits.

        if not self._retrying:
            self._retrying = True
            self._loop.call_at(time.monotonic() + _REOPEN_S_MAX, flush_again)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Requested):
            self._requests.carry_out(event.number, event.op, event.fields)
        elif isinstance(event, Greeted):
            records = [command.record(self._channel) for command in self._processes.commands.values()]
            self._channel.welcome(self._boot_id, os.getpid(), records, standing=self._requests.standing)
            self._processes.report_exits()
            self._requests.greeted()
            if not self._sudo_begun:
                self._sudo_begun = True
                # In the round after this one: the welcome is on its way then, and nothing can have been started yet.
                self._loop.call_soon(lambda: self._loop.call_soon(self._open_sudo))
        else:
            self._on_stream(event)

    def _open_sudo(self) -> None:
        if self.sudo_path is not None or os.getpid() == 1:
            from space.guest import sudo

            if self.sudo_path is not None or sudo.needed():
                path = self.sudo_path or sudo.SOCKET
                self._processes.on_hold = sudo.Sudo(path, self._loop, self._processes).hold

    def _on_stream(self, event: Event) -> None:
        """Something happened to a stream, which is one of a file or else of a command."""
        requests, processes = self._requests, self._processes
        if isinstance(event, Received):
            if not requests.on_received(event.number, event.data):
                processes.on_received(event.number, event.data)
        elif isinstance(event, Writable):
            if not requests.on_writable(event.number, event.acked):
                processes.on_writable(event.number)
        elif isinstance(event, Ended):
            if not requests.on_ended(event.number):
                processes.on_ended(event.number)
        elif isinstance(event, WasReset) and not requests.on_reset(event.number):
            processes.on_reset(event.number)

    def _on_error(self, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return os.urandom(16).hex()
