"""One driver with all that its machines need of a host, for the contract suite of drivers. No broker."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from space.drivers import processes
from space.drivers.base import Blocks, Channel, Driver, Machine, MachineState, Need
from space.drivers.firecracker import FirecrackerDriver
from space.drivers.firecracker.versions import Programs
from space.drivers.gvisor import GVisorDriver
from space.drivers.processes import Process
from space.drivers.qemu import QemuDriver, command
from space.drivers.vm import images, proof
from space.model.ids import new_id
from space.model.sandbox import Resources
from space.testing import FakeDriver
from tests import installation
from tests.agent import Peer

QUIET_S = 0.3
RESOURCES = Resources(cpus=1, memory_mib=512, disk_mib=256, pids=256)
NAMES = ("fake", "gvisor", "qemu", "firecracker")
KERNEL = Path("/opt/space/kernel")
FIRECRACKER = Programs(Path("/var/cache/space/firecracker-1.12.1"))
LOADER = ("/.space/lib/ld-linux-x86-64.so.2", "--library-path", "/.space/lib", "/.space/bin/python3")


class Bench:
    """One driver, and what its machines need of a host; all of it is gone when the bench is."""

    def __init__(self, directory: Path, make: Callable[[], Driver], python: tuple[str, ...]) -> None:
        self.directory = directory
        self.make = make
        self.driver = make()
        self.python = python
        self.started: list[Machine] = []
        self.ends: list[str] = []
        self.dumb: str | None = None
        """Why no guest comes up here; None: they do."""

    def machine(self) -> Machine:
        """A machine with what the driver needs, prepared."""
        machine = Machine(new_id("sbx"), "guest", RESOURCES)
        if Need.DISK in self.driver.capabilities.needs:
            machine = dataclasses.replace(machine, root=self.tree(machine.id))
        if Need.BLOCKS in self.driver.capabilities.needs:
            machine = dataclasses.replace(machine, blocks=self.blocks(machine.id))
        if Need.LINK in self.driver.capabilities.needs:
            subprocess.run(["ip", "netns", "add", f"spct-{machine.id}"], check=True)
            subprocess.run(["ip", "-n", f"spct-{machine.id}", "link", "set", "lo", "up"], check=True)
            machine = dataclasses.replace(machine, netns=Path("/run/netns") / f"spct-{machine.id}")
        self.started.append(machine)
        return machine

    def tree(self, name: str) -> Path:
        """A root file system with no more than every machine needs."""
        root = self.directory / "roots" / name
        for part in (".space", "proc", "sys", "dev", "run", "tmp/.X11-unix", "etc"):
            (root / part).mkdir(parents=True)
        (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        (root / "etc/group").write_text("root:x:0:\n")
        return root

    def blocks(self, name: str) -> Blocks:
        """The same as images of disks."""
        blocks = Blocks(self.directory / "template.erofs", self.directory / f"{name}.ext4")
        if not blocks.template.exists():
            tree = self.tree("template")
            for needed in ("proc", "run"):
                (tree / needed).rmdir()  # what a machine needs and a template lacks
            apart(images.write_tree(tree, blocks.template))
        apart(images.make_layer(blocks.layer, RESOURCES.disk_mib))
        return blocks

    def join(self, machine: Machine, number: int, *formerly: int) -> str:
        """Give the machine a link of its own to the host, with the addresses of other links it has had; return the
        host's address on it.
        """
        assert machine.netns is not None
        self.ends.append(end := f"spct{secrets.token_hex(4)}")
        lines = [
            f"link add {end} type veth peer name eth0 netns {machine.netns.name}",
            f"address add {address(number, 0)}/31 dev {end}",
            f"link set {end} up",
        ]
        inside = [f"address add {address(one, 1)}/31 dev eth0" for one in (number, *formerly)] + ["link set eth0 up"]
        for words, batch in (((), lines), (("-n", machine.netns.name), inside)):
            subprocess.run(["ip", *words, "-batch", "-"], input="\n".join(batch), text=True, check=True)
        return address(number, 0)

    def channel(self, machine: Machine) -> Channel:
        """Fresh FIFOs in ``channels/<id>``, opened for the machine."""
        directory = self.channel_directory(machine)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name in ("in", "out"):
            os.mkfifo(directory / name)
        return Channel(*(os.open(directory / name, os.O_RDWR | os.O_CLOEXEC) for name in ("in", "out")))

    def channel_directory(self, machine: Machine) -> Path:
        return self.directory / "channels" / machine.id

    async def start(self, machine: Machine) -> Process:
        with closing(self.channel(machine)) as channel:
            await self.driver.prepare(machine)
            return await self.driver.start(machine, channel)

    async def restore(self, machine: Machine, image: Path) -> Process:
        with closing(self.channel(machine)) as channel:
            await self.driver.prepare(machine)
            return await self.driver.restore(machine, channel, image)

    async def checkpoint(self, machine: Machine, image: Path) -> None:
        """Write the machine's memory, and let it go on where that is somebody else's to say."""
        await self.driver.checkpoint(machine.id, image)
        stands = self.driver.capabilities.stands_after_checkpoint
        seen = (await self.driver.inspect(machine.id)).state
        assert seen is (MachineState.PAUSED if stands else MachineState.RUNNING)
        if stands:
            await self.driver.resume(machine.id)

    @contextlib.contextmanager
    def peer(self, machine: Machine) -> Iterator[Peer]:
        if self.dumb:
            pytest.skip(self.dumb)
        peer = Peer(self.channel_directory(machine))
        try:
            peer.greet()
            yield peer
        finally:
            peer.close()

    def image(self) -> Path:
        path = self.directory / f"image-{secrets.token_hex(4)}"
        path.mkdir()
        return path

    def end(self) -> None:
        for machine in self.started:
            asyncio.run(self.driver.destroy(machine.id, None))
            if machine.netns:
                subprocess.run(["ip", "netns", "delete", machine.netns.name], check=True)
        for image in self.directory.glob("image-*"):
            shutil.rmtree(image)
        self.part()

    def part(self) -> None:
        """Take away all links, if they have not gone with their namespaces."""
        for end in self.ends:
            subprocess.run(["ip", "link", "delete", end], check=False, stderr=subprocess.DEVNULL)
        self.ends.clear()


def apart(work: Coroutine[None, None, None]) -> None:
    """Finish the work in a loop of its own, whether or not the caller is in one."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result(60)


def address(number: int, end: int) -> str:
    """One of the two addresses of a link; from a range that is nobody's (RFC 5737)."""
    return f"192.0.2.{2 * number + end}"


@contextlib.contextmanager
def closing(channel: Channel) -> Iterator[Channel]:
    try:
        yield channel
    finally:
        os.close(channel.stdin)
        os.close(channel.stdout)


@pytest.fixture(params=NAMES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "fake":
        state = tmp_path / "state"
        one = Bench(tmp_path, lambda: FakeDriver(state), (sys.executable, "-I", "-c"))
    elif request.param == "qemu":
        if reason := installation.unfit() or unfit_for_qemu():
            pytest.skip(f"driver qemu {reason}")
        guest = installation.printed_path("guest-runtime")
        state = tmp_path / "state"
        one = Bench(
            tmp_path, lambda: QemuDriver(KERNEL, guest, tmp_path / "images", state), (*LOADER, "-I", "-S", "-c")
        )
    elif request.param == "firecracker":
        if reason := installation.unfit() or unfit_for_firecracker():
            pytest.skip(f"driver firecracker {reason}")
        guest, state = installation.printed_path("guest-runtime"), tmp_path / "state"
        one = Bench(
            tmp_path,
            lambda: FirecrackerDriver(FIRECRACKER, KERNEL, guest, tmp_path / "images", state),
            (*LOADER, "-I", "-S", "-c"),
        )
        one.dumb = no_guests()
    else:
        runsc = shutil.which("runsc") or "/opt/space/bin/runsc"
        reason = installation.unfit() or (None if Path(runsc).exists() else "needs runsc: run scripts/runsc")
        if reason:
            pytest.skip(f"driver gvisor {reason}")
        guest = installation.printed_path("guest-runtime")
        # The state must be on a short path: runsc keeps a socket there.
        state = Path("/run") / f"spct-{secrets.token_hex(4)}"
        one = Bench(tmp_path, lambda: GVisorDriver(Path(runsc), state, guest), (*LOADER, "-I", "-S", "-c"))
    yield one
    one.end()
    shutil.rmtree(state, ignore_errors=True)


def unfit_for_qemu() -> str | None:
    """Why machines of QEMU are not tried here; None: they are."""
    if not os.environ.get("SPACE_TEST_QEMU"):
        return "takes minutes with emulated processors: make test-qemu runs it"
    return unfit_for_virtual_machines()


def unfit_for_virtual_machines() -> str | None:
    """Why none with emulated processors can be had here; None: they can."""
    if not command.is_installed():
        return "needs QEMU: run scripts/packages vm"
    if not (KERNEL / "vmlinux").exists():
        return "needs a kernel for guests: run scripts/guest-kernel --activate"
    return None


def unfit_for_firecracker() -> str | None:
    """Why machines of Firecracker are not tried here; None: they are, whether or not their guests come up."""
    if not FIRECRACKER.directory.exists():
        return "needs Firecracker: make test-kvm fetches it"
    if not (KERNEL / "vmlinux").exists():
        return "needs a kernel for guests: run scripts/guest-kernel --activate"
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return "needs KVM's device, /dev/kvm"
    return None


@functools.cache
def no_guests() -> str | None:
    """Why guests of KVM do not come up here; None: they do."""
    found: list[proof.Verdict] = []

    async def look() -> None:
        found.append(await proof.prove())

    apart(look())
    return None if found[0].runs else f"needs a guest that comes up: {found[0].detail}"


def hung_up(descriptor: int) -> bool:
    """Whether nobody has the other end of a pipe open."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


COUNTER = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True)\n    time.sleep(0.01)"


def counted(peer: Peer, number: int) -> int:
    """How far the counter on a stream has come."""
    return bytes(peer.data.get(number, b"")).count(b"\n")


def silent(peer: Peer, number: int) -> bool:
    """Whether nothing more arrives on a stream, once what was on its way is here."""
    before = -1
    while before != counted(peer, number):
        before = counted(peer, number)
        peer.step(QUIET_S)
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        peer.step(QUIET_S)
    return counted(peer, number) == before


def largest_file(process: Process) -> int:
    """How many bytes a file may have that the process writes."""
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    return next(int(line.split()[3]) for line in lines if line.startswith("Max file size"))


def is_ended(process: Process) -> bool:
    return not processes.is_alive(process)


def wait(condition: Callable[[], bool], what: str, patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def produced(peer: Peer) -> int:
    peer.greet()
    assert peer.welcome is not None
    return next(command["streams"]["stdout"]["produced"] for command in peer.welcome["commands"])
