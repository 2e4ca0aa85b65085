"""The raw tool of virtual machines: a bare QEMU with a sandbox's disks, kernel and agent, without SPACE."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from space.drivers.qemu import clock, command, launch
from space.drivers.qemu.command import Hardware
from space.drivers.vm import images
from space.drivers.vm.kernel import DISKS, WRITABLE
from space.protocol.events import Happened
from space.protocol.host import HostChannel

PATIENCE_S = 60.0
DISK_MIB = 4096
IMAGE_FD = 9
SPEED_MAX = 1 << 40
CHUNK = 1 << 20


class RawQemu:
    """One machine at a time. `disks` are by the names of `DISKS`; the layer is the machine's own."""

    def __init__(self, disks: dict[str, Path], kernel: Path, work: Path, memory_mib: int) -> None:
        self.disks, self.kernel, self.work = disks, kernel, work
        self.hardware = Hardware(1, memory_mib, clock.counter_khz())
        self.image = work / "image"
        self.monitor = work / "monitor"
        self.process: subprocess.Popen[bytes] | None = None

    def boot(self) -> float:
        """Start it afresh; return the seconds until its agent has answered."""
        return self._start(restores=False)

    def restore(self) -> float:
        """Start it from the image that `save` wrote; return the seconds until its agent has answered."""
        return self._start(restores=True)

    def save(self) -> float:
        """Write its memory, and end it; return the seconds that the writing took."""
        started = time.perf_counter()
        with self._asking() as ask, self.image.open("wb") as file:
            ask("stop")
            ask("migrate-set-parameters", {"max-bandwidth": SPEED_MAX})
            ask("getfd", {"fdname": "image"}, file.fileno())
            ask("migrate", {"uri": "fd:image"})
            while (status := ask("query-migrate").get("status")) != "completed":
                if status == "failed":
                    raise RuntimeError("QEMU could not write the machine's memory")
                time.sleep(0.001)
        took = time.perf_counter() - started
        self.end()
        return took

    def verb(self, verb: str) -> float:
        """Have QEMU ``stop`` or ``cont`` the machine; return the seconds."""
        with self._asking() as ask:
            started = time.perf_counter()
            ask(verb)
            return time.perf_counter() - started

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None
            os.close(self.to_guest)
            os.close(self.from_guest)

    def _start(self, *, restores: bool) -> float:
        self.monitor.unlink(missing_ok=True)
        stdin, self.to_guest = os.pipe()
        self.from_guest, stdout = os.pipe()
        for end in (self.to_guest, self.from_guest):
            os.set_blocking(end, False)
        argv = self._argv(restores=restores)
        if restores:
            argv = ["sh", "-c", f'image=$1; shift; exec "$@" {IMAGE_FD}<"$image"', "sh", str(self.image), *argv]
        started = time.perf_counter()
        self.process = subprocess.Popen(argv, stdin=stdin, stdout=stdout)
        os.close(stdin)
        os.close(stdout)
        with self._asking() as ask:
            while ask("query-status")["status"] == "inmigrate":
                time.sleep(0.001)
            ask("cont")
        self._greet()
        return time.perf_counter() - started

    def _argv(self, *, restores: bool) -> list[str]:
        """What the driver's QEMU is told, with paths for descriptors, and a cable that leads nowhere."""
        argv = command.render("raw", self.hardware, restores=restores)
        changed = {"-netdev": "hubport,id=link,hubid=0", "-incoming": f"fd:{IMAGE_FD}"}
        for flag, value in changed.items():
            if flag in argv:
                argv[argv.index(flag) + 1] = value
        argv[argv.index("-chardev") + 1] = f"socket,id=monitor,path={self.monitor},server=on,wait=off"
        for place, disk in enumerate(DISKS):
            at = argv.index("-add-fd")
            del argv[at : at + 2]
            argv = [word.replace(f"/dev/fdset/{place}", str(self.disks[disk])) for word in argv]
        return [word.replace(f"{launch.KERNEL}/", f"{self.kernel}/") for word in argv]

    def _greet(self) -> None:
        self.channel = HostChannel()
        self.channel.hello()
        self._exchange(lambda: self.channel.welcomed)

    def exec_true(self) -> float:
        """Run ``true`` in it; return the seconds until its end is known."""
        started, events = time.perf_counter(), list[Any]()
        streams = {name: self.channel.new_number() for name in ("stdout", "stderr")}
        for number in streams.values():
            self.channel.open_receive(number, durable=True)
        command_id = f"cmd{streams['stdout']}"
        self.channel.request("start", {"id": command_id, "argv": ["/bin/true"], "streams": streams})

        def ends() -> list[Any]:
            return [one.fields for one in events if isinstance(one, Happened) and one.fields["id"] == command_id]

        self._exchange(lambda: bool(ends()), events)
        took = time.perf_counter() - started
        if ends()[0]["kind"] != "exited" or ends()[0]["code"]:
            raise RuntimeError(f"the raw machine's true: {ends()}")
        self.channel.request("forget", {"id": command_id})
        return took

    def _exchange(self, done: Callable[[], bool], events: list[Any] | None = None) -> None:
        """Carry bytes both ways until it is done."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError("the raw machine's agent does not answer")
            with contextlib.suppress(BlockingIOError):
                while buffers := self.channel.outgoing():
                    self.channel.written(os.writev(self.to_guest, buffers))
            writes = [self.to_guest] if self.channel.outgoing() else []
            select.select([self.from_guest], writes, [], 0.5)
            with contextlib.suppress(BlockingIOError):
                self.channel.feed(os.read(self.from_guest, CHUNK))
            while (event := self.channel.next_event()) is not None:
                if events is not None:
                    events.append(event)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        """QEMU's monitor, without the driver's care: this one's guest is ours."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while connection.connect_ex(str(self.monitor)):
                if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                    raise RuntimeError("the raw QEMU does not start")
                time.sleep(0.001)
            lines = connection.makefile("rb")

            def ask(name: str, arguments: dict[str, Any] | None = None, file: int | None = None) -> Any:
                message = json.dumps({"execute": name, "arguments": arguments or {}}).encode()
                socket.send_fds(connection, [message], [] if file is None else [file])
                while True:
                    answer = json.loads(lines.readline())
                    if "error" in answer:
                        raise RuntimeError(f"{name}: {answer['error']}")
                    if "return" in answer:
                        return answer["return"]

            lines.readline()
            ask("qmp_capabilities")
            yield ask


@contextlib.contextmanager
def raw_qemu(template: Path, runtime: Path, kernel: Path, memory_mib: int) -> Iterator[RawQemu]:
    """A machine on the images that the installation has made; gone afterwards, whatever happens."""
    work = Path(tempfile.mkdtemp(prefix="space-bench-"))
    layer = work / "layer.ext4"
    raw = None
    try:
        asyncio.run(images.make_layer(layer, DISK_MIB))
        rest = iter((template, runtime))
        disks = {disk: layer if disk == WRITABLE else next(rest) for disk in DISKS}
        raw = RawQemu(disks, kernel, work, memory_mib)
        yield raw
    finally:
        if raw:
            raw.end()
        shutil.rmtree(work, ignore_errors=True)
