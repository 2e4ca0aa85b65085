"""What tests of SPACE, and of things built on it, use instead of a real machine. Verified by the same contract tests.

`FakeDriver` keeps every promise of `space.drivers.base.Driver` but one: nothing separates its guests from the host. A
machine is the guest agent as an ordinary process on the channel's FIFOs, without root, runsc, links or cgroups. It
outlives its starter, stands still when paused, and comes back from a checkpoint with its memory: not because that is
in a file, but because the process of a machine that has ended waits, stopped and cut off, for as long as an image of
it exists. As a process cannot be in two places, an image gives back that process as it was at its end to the first who
asks; whoever asks while it is in use gets a machine of the same image all of whose processes are gone.

    drivers = {"fake": FakeDriver(tmp_path / "fake")}
    async with Broker(settings, drivers).serving(): ...
"""

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from space.drivers import processes, programs
from space.drivers.base import Capabilities, Channel, HostLimits, Machine, MachineState, Observation
from space.drivers.processes import Process
from space.errors import HostError, HostFull, MachineLost
from space.model.sandbox import Resources

AGENT_ARGV = (sys.executable, "-I", "-m", "space.guest")
MEMORY_BYTES = 1 << 20
"""How large the fake's images are, so that they can fail to fit."""
_CALL_S = 10.0
_MESSAGE_BYTES_MAX = 8192
_IDLE_S = 0.1
_BLOCK = 1 << 16
_PR_SET_PDEATHSIG = 1


class FakeDriver:
    """Machines as ordinary processes. `state_dir` holds a file per machine; `argv` is what runs as the guest."""

    name = "fake"
    capabilities = Capabilities(boundary="none: an ordinary process", needs=frozenset(), checkpoint=True)

    def __init__(self, state_dir: Path, argv: Sequence[str] = AGENT_ARGV) -> None:
        self._state_dir = state_dir
        self._argv = list(argv)

    def limits(self, resources: Resources) -> HostLimits:
        return HostLimits(resources.cpus, resources.memory_mib, resources.pids)

    async def prepare(self, machine: Machine) -> None:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        (self._state_dir / machine.id).touch()

    async def start(self, machine: Machine, channel: Channel) -> Process:
        argv = [sys.executable, "-I", "-m", "space.testing", self._address(machine.id), *self._argv]
        finished = await programs.run(argv, timeout_s=_CALL_S, stdin=channel.stdin, stdout=channel.stdout)
        seen = await self.inspect(machine.id)
        if finished.status or seen.process is None:
            raise HostError("The machine did not start.", code="start-failed")
        return seen.process

    async def restore(self, machine: Machine, channel: Channel, image: Path) -> Process:
        await self.check_image(image)
        parked = json.loads((image / "image.json").read_text())["parked"]
        descriptors = [channel.stdin, channel.stdout]
        answer = await asyncio.to_thread(_ask, parked, {"do": "adopt", "as": self._address(machine.id)}, descriptors)
        if answer is None:
            return await self.start(machine, channel)
        if (process := processes.identify(answer["pid"])) is None:
            raise HostError("The machine did not come back.", code="start-failed")
        return process

    async def pause(self, machine_id: str) -> None:
        await self._tell(machine_id, "pause")

    async def resume(self, machine_id: str) -> None:
        await self._tell(machine_id, "resume")

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        if (await self.inspect(machine_id)).state is not MachineState.RUNNING:
            raise MachineLost
        parked = f"{self._address(machine_id)}-{os.urandom(8).hex()}"
        try:
            (image / "memory").write_bytes(bytes(MEMORY_BYTES))
            (image / "image.json").write_text(json.dumps({"parked": parked}))
        except OSError as error:
            raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full") from error
        await self._tell(machine_id, "keep", image=str(image / "memory"), parked=parked)

    async def check_image(self, image: Path) -> None:
        try:
            parked = json.loads((image / "image.json").read_text())["parked"]
            whole = isinstance(parked, str) and (image / "memory").stat().st_size == MEMORY_BYTES
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostError("The memory image cannot be read.", code="image-damaged") from error
        if not whole:
            raise HostError("The memory image is not complete.", code="image-damaged")

    async def destroy(self, machine_id: str, process: Process | None) -> None:
        found = (await self.inspect(machine_id)).process or process
        parked = await asyncio.to_thread(_ask, self._address(machine_id), {"do": "end"})
        if parked is None and found:
            await processes.kill(found, _CALL_S)
        (self._state_dir / machine_id).unlink(missing_ok=True)

    async def inspect(self, machine_id: str) -> Observation:
        answer = await asyncio.to_thread(_ask, self._address(machine_id), {"do": "tell"})
        process = processes.identify(answer["pid"]) if answer else None
        if answer is None or process is None:
            return Observation(MachineState.ABSENT)
        return Observation(MachineState(answer["state"]), process)

    async def known(self) -> frozenset[str]:
        return frozenset(path.name for path in self._state_dir.iterdir()) if self._state_dir.is_dir() else frozenset()

    async def end_strays(self) -> None:
        """No request of the fake outlives the one who asks."""

    async def _tell(self, machine_id: str, do: str, **fields: str) -> None:
        if await asyncio.to_thread(_ask, self._address(machine_id), {"do": do, **fields}) is None:
            raise MachineLost

    def _address(self, machine_id: str) -> str:
        """Name the machine's socket in the abstract namespace, where nothing needs removing."""
        return "space-fake-" + hashlib.sha256(f"{self._state_dir} {machine_id}".encode()).hexdigest()[:24]


def _ask(address: str, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any] | None:
    """Ask a machine's keeper; None when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_CALL_S)
        try:
            connection.connect(f"\0{address}")
            socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))
            answer = connection.recv(_MESSAGE_BYTES_MAX)
        except OSError:
            return None
    return json.loads(answer) if answer else None


class _Pump:
    """Moves bytes one way, at most one block at a time, so that a slow reader blocks the writer."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self._held = b""

    def waits_for(self) -> tuple[int, int]:
        return (self.sink, selectors.EVENT_WRITE) if self._held else (self.source, selectors.EVENT_READ)

    def move(self) -> bool:
        """Move some bytes; False when the source has ended."""
        with contextlib.suppress(BlockingIOError):
            self._held = self._held or os.read(self.source, _BLOCK)
            if not self._held:
                return False
            self._held = self._held[os.write(self.sink, self._held) :]
        return True


class _Keeper:
    """The process that stands for the machine: between the FIFOs and the agent, answering the driver."""

    def __init__(self, address: str, argv: Sequence[str]) -> None:
        self._listening = [_listen(address)]
        self._argv = list(argv)
        self._paused = False
        self._images: dict[str, int] = {}
        """Where the machine is to be had once it has ended, and of which file: as long as that has a name."""
        self._parked = False

    def run(self) -> None:
        """Leave the starter's process behind, start the agent, and serve until it ends."""
        if os.fork():
            os._exit(0)
        os.setsid()
        into, out_of = os.pipe(), os.pipe()
        self._agent = subprocess.Popen(
            self._argv,
            stdin=into[0],
            stdout=out_of[1],
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
        os.close(into[0])
        os.close(out_of[1])
        self._in, self._out = _Pump(0, into[1]), _Pump(out_of[0], 1)
        for descriptor in (0, into[1], out_of[0], 1):
            os.set_blocking(descriptor, False)
        while self._agent.poll() is None:
            self._forget_images()
            if self._parked and not self._images:
                break
            self._turn()
        self._end()

    def _turn(self) -> None:
        pumps = [] if self._paused else [self._in, self._out]
        with selectors.DefaultSelector() as selector:
            for listening in self._listening:
                selector.register(listening, selectors.EVENT_READ)
            for pump in pumps:
                descriptor, event = pump.waits_for()
                selector.register(descriptor, event)
            ready = {key.fd for key, _ in selector.select(_IDLE_S)}
        asked = [listening for listening in self._listening if listening.fileno() in ready]
        for listening in asked:
            self._answer(listening)
        if asked:
            return
        for pump in pumps:
            if pump.waits_for()[0] in ready and not pump.move():
                self._end()

    def _answer(self, listening: socket.socket) -> None:
        if listening.fileno() < 0:  # closed by the answer to another
            return
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(_CALL_S)
            peer = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] != os.geteuid():
                return
            with contextlib.suppress(OSError, ValueError):
                data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 2)
                message = json.loads(data)
                getattr(self, f"_do_{message['do']}")(message, descriptors)
                connection.send(
                    json.dumps({"pid": os.getpid(), "state": "paused" if self._paused else "running"}).encode()
                )

    def _do_tell(self, message: dict[str, Any], descriptors: list[int]) -> None: ...

    def _do_pause(self, _message: dict[str, Any], _descriptors: list[int]) -> None:
        self._paused = True
        _signal_tree(self._agent.pid, signal.SIGSTOP)

    def _do_resume(self, _message: dict[str, Any], _descriptors: list[int]) -> None:
        self._paused = False
        _signal_tree(self._agent.pid, signal.SIGCONT)

    def _do_keep(self, message: dict[str, Any], _descriptors: list[int]) -> None:
        self._images[message["parked"]] = os.open(message["image"], os.O_RDONLY)

    def _do_end(self, _message: dict[str, Any], _descriptors: list[int]) -> None:
        """End, or, as long as there is an image of the machine, wait for one to be restored or all to be removed."""
        self._forget_images()
        if not self._images:
            self._end()
        self._listen_at(*self._images)
        self._parked = True
        self._do_pause({}, [])
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)

    def _do_adopt(self, message: dict[str, Any], descriptors: list[int]) -> None:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.set_blocking(number, False)
            os.close(descriptor)
        self._listen_at(message["as"])
        self._parked = False
        self._do_resume(message, [])

    def _listen_at(self, *addresses: str) -> None:
        before, self._listening = self._listening, [_listen(address) for address in addresses]
        for listening in before:
            listening.close()

    def _forget_images(self) -> None:
        for parked, image in list(self._images.items()):
            if not os.fstat(image).st_nlink:
                os.close(self._images.pop(parked))

    def _end(self) -> None:
        _signal_tree(self._agent.pid, signal.SIGSTOP)
        _signal_tree(self._agent.pid, signal.SIGKILL)
        self._agent.wait()
        os._exit(0)


def _listen(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{address}")
    listening.listen()
    return listening


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_tree(pid: int, number: signal.Signals) -> None:
    """Signal a process and all its descendants; parents first, so that a stopped one makes no more."""
    for one in _tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


if __name__ == "__main__":
    _Keeper(sys.argv[1], sys.argv[2:]).run()
