"""Commands: programs run for the host, from ``start`` to the exit record, and everything they leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import time

from space.guest.defaults import Defaults
from space.guest.groups import MARK, Inner, send_signal
from space.guest.loop import Loop, Timer
from space.guest.memory import Guard
from space.guest.outputs import Input, Output, make_pipe, make_terminal
from space.guest.spawning import Program, environment, spawn
from space.guest.system import Refused, refused
from space.guest.users import find_identity
from space.protocol.messages import COMMANDS_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from space.guest.cgroups import Groups
    from space.guest.groups import Group
    from space.protocol.guest import GuestChannel
    from space.protocol.messages import CommandRecord, ExitRecord, StreamPlace

    class Hold(Protocol):
        def __call__(self, *, held: bool) -> None: ...


_KILL = 9
_ENDING = (_KILL, 15)
_REAP_MAX = 100
_KILL_AGAIN_S = 0.005
_KILL_FOR_S = 5.0
"""How long a tree is killed over and over before its end is reported in spite of what will not die."""
_SWEEP_S = 1.0


class Command:
    """One command. ``exit`` is set once it has ended: main process gone, its output relayed, a killed tree dead."""

    def __init__(self, command_id: str, group: Group) -> None:
        self.id = command_id
        self.group = group
        self.pid = 0
        self.exit: ExitRecord | None = None
        self.outputs: dict[str, Output] = {}
        self.input: Input | None = None
        self.status: int | None = None
        """As ``waitpid`` gave it, once the main process is gone."""
        self.timed_out = False
        self.killing = False
        self.killed = False
        """Whether the host asked for a SIGKILL, so that one is not taken for the kernel's."""
        self.wait_output = False
        """Whether it has ended only when all its output is closed, also by what it left running."""
        self.starved = False
        """Whether it is killed because memory ran out."""
        self.timer: Timer | None = None
        self.oom_kills = group.oom_kills()
        """As they were counted before it began."""
        self.disowned = False
        """Whether it is nobody's: it lives on, and what it says and how it ends are not for anybody."""

    def record(self, channel: GuestChannel) -> CommandRecord:
        """Return it as WELCOME and ``list`` tell it."""
        streams: dict[str, StreamPlace] = {}
        for name, output in self.outputs.items():
            if channel.sends(output.number):
                acked, produced, ended = channel.place(output.number)
                streams[name] = {"number": output.number, "acked": acked, "produced": produced, "ended": ended}
        if self.input is not None and channel.receives(self.input.number):
            acked, produced, ended = channel.taken(self.input.number)
            streams["stdin"] = {"number": self.input.number, "acked": acked, "produced": produced, "ended": ended}
        state = "running" if self.exit is None else "ended"
        return {"id": self.id, "pid": self.pid, "state": state, "exit": self.exit, "streams": streams}

    def exit_event(self) -> tuple[dict[str, Any], list[int]]:
        """Return the event that reports the end, and the streams whose ends it must follow."""
        produced = {name: output.produced for name, output in self.outputs.items()}
        fields = {"event": "exit", "id": self.id, **(self.exit or {}), "produced": produced}
        return fields, [output.number for output in self.outputs.values()]


class Processes:
    """All commands of this guest, and the reaping of every process that has lost its parent."""

    def __init__(self, channel: GuestChannel, loop: Loop, groups: Groups) -> None:
        self.defaults = Defaults()
        self.commands: dict[str, Command] = {}
        self.on_end: dict[int, Callable[[int], None]] = {}
        """For children that are no command: what is to be called with the status of ``waitpid``."""
        self.on_hold: Hold | None = None
        """Called with whether everything is held from now on."""
        self._by_pid: dict[int, Command] = {}
        self._outputs: dict[int, Output] = {}
        self._inputs: dict[int, Input] = {}
        self._lingering: list[Group] = []
        self._sweep: Timer | None = None
        self._sharing: Timer | None = None
        self._channel = channel
        self._loop = loop
        self.groups = groups
        self.guard = Guard(
            loop, groups=self._alive, terminals=self._on_terminals, freeze=groups.freeze, on_kill=self._starve
        )

    # --- operations

    def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Start a command and return its pid. One that is to be detached is forgotten at once and lives on."""
        streams: dict[str, int] = {name: n for name, n in fields["streams"].items() if n is not None}
        self._check_start(fields["id"], streams, tty=fields["tty"] is not None)
        identity = find_identity(fields["user"] or self.defaults.user)
        base = {"TERM": "xterm-256color"} if fields["tty"] else {}
        env = environment(identity, self.defaults.trust, base, self.defaults.env_for(identity), fields["env"])
        cwd = fields["cwd"] or self.defaults.directory_for(identity)
        try:
            group = self.groups.new(fields["id"])
        except OSError as error:
            raise refused(error, "process group") from error
        self._share_out_later()
        if group.mark is not None:
            env[MARK] = group.mark
        command = Command(fields["id"], group)
        command.wait_output = fields["wait_output"] and fields["tty"] is None
        program = Program(fields["argv"], env, cwd, identity)
        try:
            if fields["tty"] is not None:
                self._start_on_terminal(command, program, streams["tty"], fields["tty"])
            else:
                self._start_on_pipes(command, program, streams)
        except BaseException as error:
            self._abandon(command)
            if isinstance(error, OSError):
                raise refused(error, "command") from error
            raise
        self.commands[command.id] = self._by_pid[command.pid] = command
        self.guard.begin()
        if fields["timeout_s"] is not None:
            command.timer = self._loop.call_at(time.monotonic() + fields["timeout_s"], lambda: self._time_out(command))
        if fields["detached"]:
            self._disown(command)
        return {"pid": command.pid}

    def signal(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Send a signal to all of a command's processes, or to its main process alone."""
        command = self._find(fields["id"])
        command.killed = command.killed or fields["signal"] == _KILL
        self._wait_no_more(command, fields["signal"])
        if not fields["tree"]:
            if command.status is not None:
                raise Refused("ended", "The command's main process has ended")
            send_signal(command.pid, fields["signal"])
        elif fields["signal"] == _KILL:
            self._kill_tree(command)
        else:
            for pid in command.group.pids():
                send_signal(pid, fields["signal"])
        return {}

    def resize(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Set the size of a command's terminal."""
        output = self._find(fields["id"]).outputs.get("tty")
        if output is None:
            raise Refused("not-a-terminal", "The command has no terminal")
        output.resize(fields["rows"], fields["cols"])
        return {}

    def forget(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Drop the record of a command that has ended. What it left running goes on. Unknown: no effect."""
        command = self.commands.get(fields["id"])
        if command is None:
            return {}
        if command.exit is None:
            raise Refused("still-running", "The command has not ended")
        del self.commands[command.id]
        if command.input is not None:
            self._inputs.pop(command.input.number, None)
        alone = not command.group.pids()
        for output in command.outputs.values():
            self._channel.close(output.number)
            self._outputs.pop(output.number, None)
            if alone:
                output.close()
        self.linger(command.group)
        return {}

    def rename(self, names: dict[str, str]) -> None:
        """Know commands by other ids, as a copy of this guest does. Those that are not named are forgotten; their
        processes live on, what they write is thrown away, and their input has ended. Again: no effect.
        """
        known = set(names.values())
        for command in list(self.commands.values()):
            name = names.get(command.id)
            if name is not None:
                del self.commands[command.id]
                command.id = name
                self.commands[name] = command
            elif command.id not in known:
                self._disown(command)

    # --- what the channel reports

    def on_writable(self, number: int) -> None:
        output = self._outputs.get(number)
        if output is not None:
            output.resume()

    def on_received(self, number: int, data: bytes) -> None:
        source = self._inputs.get(number)
        if source is not None:
            source.receive(data)

    def on_ended(self, number: int) -> None:
        source = self._inputs.get(number)
        if source is not None:
            source.finish()

    def on_reset(self, number: int) -> None:
        """The host wants no more of an output, or breaks an input off."""
        output = self._outputs.get(number)
        if output is not None:
            output.end()
        source = self._inputs.get(number)
        if source is not None:
            source.close("reset", "")

    def report_exits(self) -> None:
        """After a greeting: report again the end of each command that is not forgotten."""
        for command in self.commands.values():
            if command.exit is not None:
                fields, streams = command.exit_event()
                self._channel.event(fields, after=streams)

    def stand_still(self) -> None:
        """Read no more from any command, and let no time limit run out."""
        if self.on_hold is not None:
            self.on_hold(held=True)
        for command in self.commands.values():
            for output in command.outputs.values():
                output.hold(held=True)
            if command.timer is not None:
                command.timer.pause()

    def go_on(self, stood_s: float) -> None:
        """Read again; time limits are later by as long as everything stood still."""
        self.guard.begin()
        if self.on_hold is not None:
            self.on_hold(held=False)
        for command in self.commands.values():
            for output in command.outputs.values():
                output.hold(held=False)
            action = command.timer.take_action() if command.timer is not None else None
            if command.timer is not None and action is not None:
                command.timer = self._loop.call_at(command.timer.due + stood_s, action)

    # --- processes that end

    def reap(self) -> None:
        """Wait for children that have ended, the orphans that became the agent's included.

        At most so many at a time: something that forks without end must not keep the agent from ending it.
        """
        for _ in range(_REAP_MAX):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            except InterruptedError:
                continue
            if pid == 0:
                return
            command = self._by_pid.pop(pid, None)
            if command is not None:
                self._main_ended(command, status)
            elif (ended := self.on_end.pop(pid, None)) is not None:
                ended(status)
        self._loop.call_soon(self.reap)

    def _main_ended(self, command: Command, status: int) -> None:
        command.status = status
        if command.timer is not None and not command.killing and not command.wait_output:
            command.timer.cancel()
        if command.input is not None:
            command.input.close("ended", "The command has ended")
            if "tty" not in command.outputs:
                self._inputs.pop(command.input.number, None)
        if not command.wait_output:
            self._drain(command)
        self._finish(command)

    def _drain(self, command: Command) -> None:
        for output in command.outputs.values():
            output.drain()

    def _wait_no_more(self, command: Command, number: int) -> None:
        """Whoever is told to end is not waited for by way of what it has started."""
        if command.wait_output and number in _ENDING:
            command.wait_output = False
            if command.status is not None:
                self._drain(command)

    def _finish(self, command: Command) -> None:
        """Report the end, if nothing of it is outstanding."""
        if command.exit is not None or command.status is None or command.killing:
            return
        if not all(output.ended for output in command.outputs.values()):
            return
        if command.disowned:
            self.linger(command.group)
            return
        command.exit = _exit_record(command)
        fields, streams = command.exit_event()
        self._channel.event(fields, after=streams)

    def _time_out(self, command: Command) -> None:
        if command.status is None or command.wait_output:
            command.timed_out = True
            self._kill_tree(command)

    def _alive(self) -> list[Group]:
        """Return the groups in which something may run; those of commands that nobody waits for any more, too."""
        owned = [command.group for command in self.commands.values()]
        disowned = [Inner(command.group) for command in self._by_pid.values() if command.disowned]
        return [*owned, *disowned, *self._lingering]

    def _on_terminals(self) -> list[Group]:
        return [command.group for command in self.commands.values() if "tty" in command.outputs]

    def _starve(self, group: Group) -> None:
        """Memory runs out and this group is killed for it: say so, if it is a command's that has not ended."""
        for command in self.commands.values():
            if command.group is group and not command.killing:
                command.starved = command.status is None
                self._kill_tree(command)

    def _kill_tree(self, command: Command) -> None:
        """Kill all there is of a command, again and again until nothing is left of it."""
        if not command.killing:
            command.killing = True
            self._kill_on(command, time.monotonic() + _KILL_FOR_S)

    def _kill_on(self, command: Command, until: float) -> None:
        self.reap()
        if command.status is None:
            send_signal(command.pid, _KILL)
        gone = command.group.kill() and command.status is not None
        if gone or time.monotonic() >= until:
            command.killing = False
            self._finish(command)
        else:
            self._loop.call_at(time.monotonic() + _KILL_AGAIN_S, lambda: self._kill_on(command, until))

    # --- starting

    def _check_start(self, command_id: str, streams: dict[str, int], *, tty: bool) -> None:
        if command_id in self.commands:
            raise Refused("already-exists", "There is a command of that id")
        if len(self.commands) >= COMMANDS_MAX:
            raise Refused("too-many-commands", f"There are {COMMANDS_MAX} commands that are not forgotten")
        wanted = {"tty"} if tty else {"stdout", "stderr"}
        if streams.keys() - {"stdin"} != wanted or (tty and "stdin" in streams):
            raise Refused("invalid-request", f"streams: {' and '.join(sorted(wanted))} are needed")
        numbers = streams.values()
        taken = any(self._channel.sends(number) or self._channel.receives(number) for number in numbers)
        if taken or len(set(numbers)) < len(streams):
            raise Refused("invalid-request", "streams: a number is in use")

    def _start_on_pipes(self, command: Command, program: Program, streams: dict[str, int]) -> None:
        theirs: list[int] = []
        ours: list[int] = []
        try:
            if "stdin" in streams:
                reader, writer = make_pipe()
                theirs.append(reader)
                ours.append(writer)
            else:
                theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            for _ in ("stdout", "stderr"):
                reader, writer = make_pipe()
                theirs.append(writer)
                ours.append(reader)
            program.files = (theirs[0], theirs[1], theirs[2])
            command.pid = spawn(program, command.group)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        if "stdin" in streams:
            self._add_input(command, streams["stdin"], ours.pop(0), is_tty=False)
        for name, fd in zip(("stdout", "stderr"), ours, strict=True):
            self._add_output(command, name, streams[name], fd)

    def _start_on_terminal(self, command: Command, program: Program, number: int, size: dict[str, int]) -> None:
        master, program.terminal = make_terminal(program.identity.uid, size["rows"], size["cols"])
        try:
            command.pid = spawn(program, command.group)
            writer = fcntl.fcntl(master, fcntl.F_DUPFD_CLOEXEC, 3)
        except BaseException:
            os.close(master)
            raise
        self._add_output(command, "tty", number, master)
        command.outputs["tty"].is_tty = True
        self._add_input(command, number, writer, is_tty=True)

    def _add_output(self, command: Command, name: str, number: int, fd: int) -> None:
        self._channel.open_send(number, durable=True)
        output = Output(fd, number, self._channel, self._loop, lambda: self._finish(command))
        command.outputs[name] = self._outputs[number] = output

    def _add_input(self, command: Command, number: int, fd: int, *, is_tty: bool) -> None:
        self._channel.open_receive(number, durable=True)
        command.input = self._inputs[number] = Input(fd, number, self._channel, self._loop, is_tty=is_tty)

    def _disown(self, command: Command) -> None:
        if command.exit is not None:
            self.forget({"id": command.id})
            return
        command.disowned = True
        del self.commands[command.id]
        if command.input is not None:
            self._channel.close(command.input.number)
            self._inputs.pop(command.input.number, None)
            command.input.close("forgotten", "")
        for output in command.outputs.values():
            self._channel.close(output.number)
            self._outputs.pop(output.number, None)
            output.hold(held=False)
            output.end()

    def _abandon(self, command: Command) -> None:
        """Starting failed: nothing may be left of it."""
        if command.pid:
            self._by_pid[command.pid] = command
            self._kill_tree(command)
        self.linger(command.group)

    def _find(self, command_id: str) -> Command:
        command = self.commands.get(command_id)
        if command is None:
            raise Refused("no-such-command", "There is no command of that id", errno.ESRCH)
        return command

    def _share_out_later(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
        after_s = self.groups.again_s
        self._sharing = None if after_s is None else self._loop.call_at(time.monotonic() + after_s, self._share_out)

    def _share_out(self) -> None:
        self.groups.share_out()
        self._share_out_later()

    def linger(self, group: Group) -> None:
        """Remove a group as soon as nothing is in it."""
        if group.remove():
            return
        self._lingering.append(group)
        if self._sweep is None:
            self._sweep = self._loop.call_at(time.monotonic() + _SWEEP_S, self._sweep_groups)

    def _sweep_groups(self) -> None:
        self._sweep = None
        self._lingering = [group for group in self._lingering if not group.remove()]
        if self._lingering:
            self._sweep = self._loop.call_at(time.monotonic() + _SWEEP_S, self._sweep_groups)


def _exit_record(command: Command) -> ExitRecord:
    status = command.status or 0
    if os.WIFEXITED(status):
        return {"kind": "exited", "code": os.WEXITSTATUS(status), "signal": None}
    number = os.WTERMSIG(status)
    if command.timed_out and number == _KILL:
        return {"kind": "timed-out", "code": None, "signal": number}
    by_kernel = not command.killed and command.group.oom_kills() > command.oom_kills
    if number == _KILL and (command.starved or by_kernel):
        return {"kind": "oom-killed", "code": None, "signal": number}
    return {"kind": "signaled", "code": None, "signal": number}
