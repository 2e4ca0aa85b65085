"""Machines as QEMU virtual machines (`microvm`), with emulated processors.

Everything of one machine here lies in its bundle, ``<state_dir>/qemu/<id>``, which is root's alone and which a reboot
of the host clears. The QEMU has a user of its own, that nobody else has, and the namespace of its link.
"""

import asyncio
import marshal
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import structlog

from space.drivers import processes, programs, room
from space.drivers.base import Blocks, Capabilities, Channel, HostLimits, Machine, MachineState, Need, Observation
from space.drivers.processes import Process
from space.drivers.qemu import clock, command, launch, monitor
from space.drivers.qemu import image as images
from space.drivers.qemu.command import Hardware
from space.drivers.qemu.monitor import Monitor
from space.drivers.vm import network, overhead, users
from space.drivers.vm.bundles import Bundle, Bundles
from space.drivers.vm.kernel import Kernel
from space.drivers.vm.overhead import Overhead
from space.drivers.vm.runtimes import Runtimes
from space.errors import HostError, HostFull, MachineLost
from space.model.sandbox import Resources

START_S = 60.0
CONTROL_S = 30.0
IMAGE_S = 600.0
END_S = 30.0
# Threads for disks and the channel, beside those that compute for the guest; QEMU itself and its libraries, tables for
# the guest's memory, and the code that it translates.
OVERHEAD = Overhead(cpus=1.0, memory_mib=160, tasks=128)
SPEED_MAX = 1 << 40
"""Bytes a second, of writing memory: as fast as it goes."""

_SPEC = "spec"
"""What is to be launched, see `launch`."""
_STILL = frozenset({"paused", "prelaunch", "postmigrate", "finish-migrate", "inmigrate", "restore-vm", "save-vm"})

log = structlog.get_logger()


class QemuDriver:
    """The QEMU driver. `state_dir` is root's alone and on a filesystem that a reboot clears; `images_dir` is root's
    alone and stays: what is made there of `guest_dir` is there for as long as an image of memory may need it.
    """

    name = "qemu"
    capabilities = Capabilities(
        boundary="a virtual machine with its own Linux kernel (QEMU, emulated processors: slow)",
        needs=frozenset({Need.BLOCKS, Need.LINK, Need.CGROUP}),
        checkpoint=True,
        stands_after_checkpoint=True,
    )

    def __init__(self, kernel: Path, guest_dir: Path, images_dir: Path, state_dir: Path) -> None:
        self._kernel = Kernel(kernel)
        self._runtimes = Runtimes(guest_dir, images_dir)
        self._bundles = Bundles(state_dir / "qemu")
        self._counter_khz = 0
        self._version = programs.Version(Path(command.PROGRAM))

    def limits(self, resources: Resources) -> HostLimits:
        return OVERHEAD.on(resources)

    async def prepare(self, machine: Machine) -> None:
        if machine.blocks is None or machine.netns is None:
            raise HostError("A QEMU machine needs disks and a link.")
        if not command.is_installed():
            raise HostError("QEMU is not installed on this host: run scripts/packages vm.", code="no-qemu")
        bundle = self._bundles.of(machine.id)
        bundle.make()
        (bundle.path / "jail").mkdir()
        await self._runtimes.current()

    async def start(self, machine: Machine, channel: Channel) -> Process:
        resources = machine.resources
        hardware = Hardware.of(resources.cpus, resources.memory_mib, await self._counter())
        guest = await self._runtimes.current()
        return await self._launch(machine, channel, hardware, self._kernel.resolved(), guest)

    async def restore(self, machine: Machine, channel: Channel, image: Path) -> Process:
        started = images.read(image)
        guest = self._runtimes.named(started["guest"])
        hardware, kernel = Hardware(**started["hardware"]), Kernel(Path(started["kernel"])).resolved()
        return await self._launch(machine, channel, hardware, kernel, guest, image / images.STATE)

    async def pause(self, machine_id: str) -> None:
        async with self._connected(machine_id) as asked:
            await asked.ask("stop")

    async def resume(self, machine_id: str) -> None:
        bundle = self._bundles.of(machine_id)
        async with self._connected(machine_id) as asked:
            if bundle.standing:
                await _stop_writing(asked)
            await asked.ask("cont")
        bundle.note_standing(still=False)

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        written = False
        async with self._connected(machine_id) as asked:
            self._bundles.of(machine_id).note_standing(still=True)
            try:
                written = await self._write_image(machine_id, asked, image)
            finally:
                if not written:
                    await _stop_writing(asked)
                    await asked.ask("cont")
                    self._bundles.of(machine_id).note_standing(still=False)
        if not written:
            self._explain(machine_id, image)

    async def check_image(self, image: Path) -> None:
        images.check(image, await self._version.get(), await self._counter())

    async def destroy(self, machine_id: str, process: Process | None) -> None:
        bundle = self._bundles.of(machine_id)
        found = {one for one in (process, bundle.process()) if one}
        found |= set(await asyncio.to_thread(self._processes_of, machine_id))
        for one in found:
            if not await processes.kill(one, END_S):
                raise HostError("A process of the machine does not end.", code="machine-stuck")
        await asyncio.to_thread(bundle.remove)

    async def inspect(self, machine_id: str) -> Observation:
        process = self._bundles.of(machine_id).process()
        if process is None:
            return Observation(MachineState.ABSENT)
        try:
            async with monitor.connected(self._bundles.of(machine_id).path / "monitor") as asked:
                status = await asked.status()
        except MachineLost:
            return Observation(MachineState.ABSENT)
        if status == "running":
            return Observation(MachineState.RUNNING, process)
        if status == "io-error":
            return Observation(MachineState.STALLED, process)
        # What else there is (a guest that its processor gave up) does not go on.
        return Observation(MachineState.PAUSED, process) if status in _STILL else Observation(MachineState.ABSENT)

    async def known(self) -> frozenset[str]:
        return frozenset(bundle.machine_id for bundle in self._bundles.all())

    async def end_strays(self) -> None:
        users.forget_lost()
        for bundle in self._bundles.all():
            # The program that starts machines: what it has started is found, and ended, by the machine's id.
            for one, _ in list(processes.processes_with_argument(str(bundle.path / _SPEC))):
                await processes.kill(one, END_S)

    # --- starting

    async def _launch(
        self,
        machine: Machine,
        channel: Channel,
        hardware: Hardware,
        kernel: Kernel,
        guest: Path,
        state: Path | None = None,
    ) -> Process:
        bundle = self._bundles.of(machine.id)
        started = {
            "version": await self._version.get(),
            "kernel": str(kernel.directory),
            "guest": guest.name,
            "hardware": asdict(hardware),
        }
        bundle.note_started(started)
        argv = command.render(str(bundle.path), hardware, restores=state is not None)
        spec = self._spec(bundle, _blocks(machine), guest, state)
        patience_s = IMAGE_S if state else START_S
        spec |= {"argv": argv, "kernel": str(kernel.directory), "patience_s": patience_s}
        spec["file_bytes_max"] = overhead.file_bytes_max(_blocks(machine).layer, hardware.memory_mib)
        (bundle.path / _SPEC).write_bytes(marshal.dumps(spec))
        within = programs.Confinement(netns=machine.netns, cgroups=machine.cgroups)
        # SAFETY: fixed words, this interpreter and files of root's own. The guest's bytes reach the machine through the
        # channel's descriptors only; its standard error ends nowhere, so it cannot fill the host.
        program = [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(bundle.path / _SPEC)]
        finished = await programs.run(
            program, timeout_s=START_S + patience_s, stdin=channel.stdin, stdout=channel.stdout, within=within
        )
        process = self._launched(bundle)
        if finished.status or process is None:
            raise HostError(f"The machine did not start: {_reason(bundle.path)}", code="start-failed")
        return process

    def _spec(self, bundle: Bundle, blocks: Blocks, guest: Path, state: Path | None) -> dict[str, Any]:
        files: list[tuple[str, bool]] = [(str(blocks.template), False), (str(blocks.layer), True), (str(guest), False)]
        if state:
            files.append((str(state), False))
        return {
            "files": files,
            "listen": str(bundle.path / "monitor"),
            "network": {
                "tap": network.TAP,
                "knobs": network.KNOBS,
                "device": network.DEVICE,
                "rules": network.RULES,
            },
            "jail": str(bundle.path / "jail"),
            "user": bundle.user,
            "pid_file": str(bundle.path / "pid"),
            "reason_file": str(bundle.path / "reason"),
        }

    @staticmethod
    def _launched(bundle: Bundle) -> Process | None:
        try:
            process = processes.identify(int((bundle.path / "pid").read_text()))
        except (OSError, ValueError):
            return None
        if process:
            bundle.note_process(process)
        return process

    # --- images

    async def _write_image(self, machine_id: str, asked: Monitor, image: Path) -> bool:
        """Let the machine stand still and write its memory; return whether that worked."""
        try:
            file = os.open(image / images.STATE, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            await asked.ask("stop")
            await asked.ask("migrate-set-parameters", {"max-bandwidth": SPEED_MAX})
            # SAFETY: QEMU gets one fresh file in a directory of root's alone, and nothing of it is read but by a QEMU.
            await asked.ask("getfd", {"fdname": "image"}, (file,))
            await asked.ask("migrate", {"uri": "fd:image"})
            if await asked.wait_written(IMAGE_S) != "completed":
                return False
            size = os.fstat(file).st_size
        finally:
            os.close(file)
        try:
            images.write(image, self._bundles.of(machine_id).started(), size)
        except OSError:
            return False
        return True

    def _explain(self, machine_id: str, image: Path) -> NoReturn:
        if room.is_full(image):
            raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full")
        log.warning("checkpoint-failed", machine=machine_id)
        raise HostError("The machine's memory image could not be written.", code="checkpoint-failed")

    # --- finding

    @asynccontextmanager
    async def _connected(self, machine_id: str) -> AsyncGenerator[Monitor]:
        if self._bundles.of(machine_id).process() is None:
            raise MachineLost
        async with monitor.connected(self._bundles.of(machine_id).path / "monitor") as asked:
            yield asked

    def _processes_of(self, machine_id: str) -> list[Process]:
        """Return what a start that was cut off may have left, too."""
        bundle = self._bundles.of(machine_id).path
        words = (str(bundle), str(bundle / _SPEC))
        return [one for word in words for one, _ in processes.processes_with_argument(word)]

    async def _counter(self) -> int:
        if not self._counter_khz:
            self._counter_khz = await asyncio.to_thread(clock.counter_khz)
        return self._counter_khz


async def _stop_writing(asked: Monitor) -> None:
    """Bring the writing of memory to its end, whatever has become of it."""
    await asked.ask("migrate_cancel")
    await asked.wait_written(CONTROL_S)


def _blocks(machine: Machine) -> Blocks:
    if machine.blocks is None:
        raise HostError("A QEMU machine needs disks.")
    return machine.blocks


def _reason(bundle: Path) -> str:
    """Return what QEMU complained of, without host paths and not longer than is of use."""
    try:
        said = (bundle / "reason").read_text(errors="replace")
    except OSError:
        said = ""
    words = (word if "/" not in word else "…" for word in said.split())
    return " ".join(words)[:500] or "QEMU gave no reason"
