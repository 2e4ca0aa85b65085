"""The host's side of a real agent, for tests: an agent process on two FIFOs, and someone to talk to it."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space.protocol.events import Ended, Happened, OutOfStep, Received, Replied, WasReset, Welcomed
from space.protocol.host import HostChannel

SOURCE = Path(__file__).parent.parent / "src"
PATIENCE_S = 20.0
FIFO_BYTES = 1024 * 1024


class Refusal(Exception):
    """The agent answered with a failure."""

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(f"{failure['code']}: {failure['message']}")
        self.code = failure["code"]
        self.errno = failure["errno"]


@dataclass
class Running:
    """A command that was started, and what has come of it."""

    id: str
    pid: int
    streams: dict[str, int]


@dataclass
class Result:
    exit: dict[str, Any]
    stdout: bytes
    stderr: bytes


@dataclass
class Peer:
    """Talks to an agent through the two FIFOs of ``directory``; may be thrown away and made anew at any time."""

    directory: Path
    acks: bool = True
    channel: HostChannel = field(default_factory=HostChannel)
    data: dict[int, bytearray] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    resets: dict[int, str] = field(default_factory=dict)
    exits: dict[str, dict[str, Any]] = field(default_factory=dict)
    replies: dict[int, Replied] = field(default_factory=dict)
    welcome: dict[str, Any] | None = None
    adopts: dict[str, dict[str, bytes]] = field(default_factory=dict)
    out_of_step: int = 0
    count: int = 0
    keep: bool = True

    def __post_init__(self) -> None:
        self.to_guest = os.open(self.directory / "in", os.O_RDWR | os.O_NONBLOCK)
        self.from_guest = os.open(self.directory / "out", os.O_RDWR | os.O_NONBLOCK)

    def close(self) -> None:
        """Go away as a process that was killed does: without a word."""
        os.close(self.to_guest)
        os.close(self.from_guest)

    # --- moving bytes

    def until(self, condition: Any, what: str = "", patience_s: float = PATIENCE_S) -> None:
        """Carry bytes both ways until the condition holds, or fail."""
        deadline = time.monotonic() + patience_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {patience_s} s: {what or condition}"
            self.step(min(left, 0.5))

    def step(self, wait_s: float) -> None:
        blocked = not self._write()
        sources, _, _ = select.select([self.from_guest], [self.to_guest] if blocked else [], [], wait_s)
        if sources:
            self.channel.feed(os.read(self.from_guest, 1 << 20))
        while (event := self.channel.next_event()) is not None:
            self.take(event)
        self._write()

    def _write(self) -> bool:
        try:
            while buffers := self.channel.outgoing():
                self.channel.written(os.writev(self.to_guest, buffers))
        except BlockingIOError:
            return False
        return True

    def take(self, event: Any) -> None:
        if isinstance(event, Received):
            if self.keep:
                self.data.setdefault(event.number, bytearray()).extend(event.data)
            self.count += len(event.data)
            if self.acks:
                self.channel.ack(event.number, event.offset + len(event.data))
        elif isinstance(event, Ended):
            self.ends[event.number] = event.length
        elif isinstance(event, WasReset):
            self.resets[event.number] = event.failure["code"]
        elif isinstance(event, Happened):
            self.exits[event.fields["id"]] = event.fields
        elif isinstance(event, Replied):
            self.replies[event.number] = event
        elif isinstance(event, Welcomed):
            self.welcome = dict(event.welcome)
            for command in event.welcome["commands"]:
                self._adopt(command["streams"], self.adopts.get(command["id"]))
        elif isinstance(event, OutOfStep):
            self.out_of_step += 1

    def _adopt(self, places: Any, stored: dict[str, bytes] | None) -> None:
        for name, place in places.items():
            number = place["number"]
            if name == "stdin":
                if stored is not None or self.channel.sends(number):
                    self.channel.resume_send(number, place["acked"], place["produced"], ended=place["ended"])
            elif stored is not None and not self.channel.receives(number):
                self.channel.open_receive(number, durable=True, offset=len(stored[name]))
                self.data[number] = bytearray(stored[name])

    # --- conversation

    def greet(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        self.welcome = None
        self.channel.hello()
        self.until(lambda: self.welcome is not None, "welcome", patience_s)
        assert self.welcome is not None
        return self.welcome

    def ask(self, op: str, **fields: Any) -> int:
        return self.channel.request(op, fields)

    def answer(self, number: int, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        self.until(lambda: number in self.replies, f"reply {number}", patience_s)
        reply = self.replies.pop(number)
        if reply.failure is not None:
            raise Refusal(dict(reply.failure))
        assert reply.ok is not None
        return reply.ok

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.answer(self.ask(op, **fields))

    def start(self, *argv: str, stdin: bool = False, tty: dict[str, int] | None = None, **fields: Any) -> Running:
        names = ["tty"] if tty else ["stdout", "stderr", *(["stdin"] if stdin else [])]
        streams = {name: self.channel.new_number() for name in names}
        # Without control groups an agent knows its own by this, on the whole host: others may be at work there, too.
        command_id = fields.pop("id", f"cmd{os.getpid()}n{next(iter(streams.values()))}")
        for name, number in streams.items():
            if name in ("stdin", "tty"):
                self.channel.open_send(number, durable=True)
            if name != "stdin":
                self.channel.open_receive(number, durable=True)
        reply = self.call("start", id=command_id, argv=list(argv), streams=streams, tty=tty, **fields)
        return Running(command_id, reply["pid"], streams)

    def finish(self, command: Running, patience_s: float = PATIENCE_S, *, forget: bool = True) -> Result:
        self.until(lambda: command.id in self.exits, f"exit of {command}", patience_s)
        exit_event = self.exits[command.id]
        outputs = [
            bytes(self.data.get(command.streams[name], b"")) if name in command.streams else b""
            for name in ("stdout", "stderr")
        ]
        if "tty" in command.streams:
            outputs[0] = bytes(self.data.get(command.streams["tty"], b""))
        for name, number in command.streams.items():
            assert name == "stdin" or self.ends[number] == exit_event["produced"][name]
        if forget:
            self.call("forget", id=command.id)
            for number in command.streams.values():
                self.channel.close(number)
                self.data.pop(number, None)
        return Result(exit_event, outputs[0], outputs[1])

    def run(self, *argv: str, **fields: Any) -> Result:
        return self.finish(self.start(*argv, **fields))

    def sh(self, script: str, **fields: Any) -> Result:
        return self.run("/bin/sh", "-c", script, **fields)

    def feed(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes at the pace the guest allows."""
        position = 0
        while position < len(data):
            self.until(lambda: self.channel.room(number) > 0 or number in self.resets, "room")
            if number in self.resets:
                return
            piece = data[position : position + min(self.channel.room(number), 256 * 1024)]
            self.channel.send(number, piece)
            position += len(piece)
        if end:
            self.channel.end(number)

    # --- files

    def fetch(self, op: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Do an operation that streams to the host, and return its reply and all of the stream."""
        number = self.channel.new_number()
        self.channel.open_receive(number)
        try:
            reply = self.call(op, stream=number, **fields)
            self.until(lambda: number in self.ends or number in self.resets, f"end of {op}")
            assert number not in self.resets, self.resets[number]
            return reply, bytes(self.data.pop(number, b""))
        finally:
            self.channel.close(number)

    def put(self, op: str, data: bytes, **fields: Any) -> dict[str, Any]:
        """Do an operation that streams to the guest."""
        number = self.channel.new_number()
        self.channel.open_send(number)
        try:
            request = self.ask(op, stream=number, **fields)
            self.feed(number, data, end=True)
            return self.answer(request)
        finally:
            self.channel.close(number)

    def lines(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.fetch(op, **fields)[1].splitlines()]


@dataclass
class Agent:
    """An agent as an ordinary process of this machine, on FIFOs in ``directory``."""

    directory: Path
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.holds = hold_fifos(self.directory)
        log = (self.directory / "log").open("wb")
        with log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "space.guest", *self.options],
                stdin=self.holds[0],
                stdout=self.holds[1],
                stderr=log,
                env={"PYTHONPATH": str(SOURCE), "PATH": os.defpath},
            )

    def peer(self, **settings: Any) -> Peer:
        one = Peer(self.directory, **settings)
        one.greet()
        return one

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def memory_kib(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError("the agent is gone")

    def stop(self) -> None:
        """End the agent and everything it started."""
        for pid in sorted(descendants(self.process.pid), reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for fd in self.holds:
            os.close(fd)


def hold_fifos(directory: Path) -> list[int]:
    """Make the two FIFOs of a channel as the broker does, and hold them open so that neither end ever sees an end."""
    fds = []
    for name in ("in", "out"):
        os.mkfifo(directory / name)
        fds.append(os.open(directory / name, os.O_RDWR))
        fcntl.fcntl(fds[-1], fcntl.F_SETPIPE_SZ, FIFO_BYTES)
    return fds


def descendants(top: int) -> set[int]:
    """Every process below ``top``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = {top}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {top}


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
