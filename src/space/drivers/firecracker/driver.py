"""Machines as Firecracker virtual machines, on processors that run guests.

What is known of one machine lies in its bundle, ``<state_dir>/firecracker/<id>``, which is root's alone and which a
reboot of the host clears; its jail in ``<images_dir>/jails/<id>``. The guest's end of the channel is a vsock, whose
host end is a socket in the jail; a small program carries it to the broker's channel (`relay`).

A restored guest's kernel is told by Firecracker that it is a copy (VMGenID) and takes fresh randomness by itself, where
it has a driver for that; the agent gives it randomness besides, and the time, before anything of the guest goes on.
"""

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import structlog

from space.drivers import processes, room
from space.drivers.base import Capabilities, Channel, HostLimits, Machine, MachineState, Need, Observation
from space.drivers.firecracker import api, config
from space.drivers.firecracker import image as images
from space.drivers.firecracker.config import Hardware, Request
from space.drivers.firecracker.jail import START_S, Jail
from space.drivers.firecracker.versions import Programs
from space.drivers.processes import Process
from space.drivers.vm import users
from space.drivers.vm.bundles import Bundles
from space.drivers.vm.kernel import DISKS, INITRD, VMLINUX, WRITABLE, Kernel
from space.drivers.vm.overhead import Overhead, file_bytes_max
from space.drivers.vm.runtimes import Runtimes
from space.errors import HostError, HostFull, MachineLost
from space.model.sandbox import Resources

IMAGE_S = 600.0
END_S = 30.0
POLL_S = 0.005
LINES_MAX, LINE_CHARS_MAX = 40, 200
"""Of what a guest that never answered has said, at the beginning and at the end."""
# Threads for devices and the API, beside those that run the guest; Firecracker itself, tables for the guest's memory,
# its program in the jail, and the relay with what it keeps.
OVERHEAD = Overhead(cpus=0.5, memory_mib=48, tasks=32)
_STATE_MIB = 16
"""More than devices and processors take in an image, beside the memory."""

log = structlog.get_logger()


class FirecrackerDriver:
    """`state_dir` is root's alone, on a filesystem that a reboot clears; `images_dir` is root's alone and stays, on one
    that allows devices. Images of memory are copied from there at no cost if they lie on the same btrfs.

    `cpu_template`: one of Firecracker's, that hides differences between processors from guests; empty: none.
    """

    name = "firecracker"
    capabilities = Capabilities(
        boundary="a virtual machine with its own Linux kernel (Firecracker, on KVM)",
        needs=frozenset({Need.BLOCKS, Need.LINK, Need.CGROUP}),
        checkpoint=True,
        stands_after_checkpoint=True,
    )

    def __init__(
        self,
        installed: Programs,
        kernel: Path,
        guest_dir: Path,
        images_dir: Path,
        state_dir: Path,
        *,
        cpu_template: str = "",
    ) -> None:
        self._installed = installed
        self._kernel = Kernel(kernel)
        self._runtimes = Runtimes(guest_dir, images_dir)
        self._jails = images_dir / "jails"
        self._bundles = Bundles(state_dir / "firecracker")
        self._cpu_template = cpu_template

    def limits(self, resources: Resources) -> HostLimits:
        return OVERHEAD.on(resources)

    async def prepare(self, machine: Machine) -> None:
        """Make the machine's jail and cable, too. Raise `HostError` when what is installed cannot be used."""
        if machine.blocks is None or machine.netns is None:
            raise HostError("A Firecracker machine needs disks and a link.")
        await self._installed.version()
        self._kernel.resolved()
        jail = self._jail(machine.id)
        jail.make(machine.netns)
        try:
            # SAFETY: the machine's own layer, a file that the broker has made in a directory of root's alone.
            os.chown(machine.blocks.layer, jail.user, jail.user, follow_symlinks=False)
        except OSError as error:
            raise HostError("The machine's disk is gone.", code="disk-lost") from error
        await jail.lay_cable(machine.netns)
        await self._runtimes.current()

    async def start(self, machine: Machine, channel: Channel) -> Process:
        resources = machine.resources
        hardware = Hardware.of(resources.cpus, resources.memory_mib, self._cpu_template)
        kernel = self._kernel.resolved().directory
        guest = await self._runtimes.current()
        files = _disks(machine, guest) | {VMLINUX: kernel / VMLINUX, INITRD: kernel / INITRD}
        started = {
            "version": await self._installed.version(),
            "processor": images.processor(),
            "guest": guest.name,
            "hardware": asdict(hardware),
        }
        self._jail(machine.id).bundle.note_started(started)
        return await self._launch(machine, channel, files, config.render_start(hardware))

    async def restore(self, machine: Machine, channel: Channel, image: Path) -> Process:
        started = images.read(image)
        files = _disks(machine, self._runtimes.named(started["guest"])) | {name: image / name for name in config.IMAGE}
        self._jail(machine.id).bundle.note_started(started)
        return await self._launch(machine, channel, files, (config.render_restore(),))

    async def pause(self, machine_id: str) -> None:
        await self._set_state(machine_id, "Paused")

    async def resume(self, machine_id: str) -> None:
        bundle = self._bundles.of(machine_id)
        # Firecracker hears nothing else while it writes an image, also when nobody waits for that any more.
        await self._set_state(machine_id, "Resumed", IMAGE_S if bundle.standing else api.ANSWER_S)
        if bundle.standing:
            # A guest's connections do not outlast the writing of its memory.
            self._jail(machine_id).call_again()
            self._jail(machine_id).drop_image()
            bundle.note_standing(still=False)

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        jail = self._jail(machine_id)
        self._expect(machine_id)
        started = jail.bundle.started()
        jail.drop_image()
        jail.bundle.note_standing(still=True)
        try:
            await self.pause(machine_id)
            path, body = config.render_checkpoint()
            await api.ask(jail.api, "PUT", path, body, timeout_s=IMAGE_S)
            bytes_max = (started["hardware"]["memory_mib"] + _STATE_MIB) << 20
            await asyncio.to_thread(jail.take_image, image, bytes_max)
            images.write(image, started)
        except BaseException as error:
            await self.resume(machine_id)
            if isinstance(error, HostError | OSError):
                _explain(error, jail.out, image)
            raise

    async def check_image(self, image: Path) -> None:
        images.check(image, await self._installed.version())

    async def destroy(self, machine_id: str, process: Process | None) -> None:
        jail = self._jail(machine_id)
        await _keep_last_words(jail)
        # The machine first: where it is gone, its relay goes by itself.
        found = [process, jail.bundle.process(), *await asyncio.to_thread(jail.running)]
        for one in dict.fromkeys(one for one in found if one):
            if not await processes.kill(one, END_S):
                raise HostError("A process of the machine does not end.", code="machine-stuck")
        await jail.take_cable()
        await asyncio.to_thread(jail.remove)

    async def inspect(self, machine_id: str) -> Observation:
        jail = self._jail(machine_id)
        process = jail.bundle.process()
        if process is None or jail.relay() is None:
            return Observation(MachineState.ABSENT)  # without its channel it is of no use to anybody
        try:
            word = await api.state(jail.api)
        except MachineLost:
            return Observation(MachineState.ABSENT)
        found = {"Running": MachineState.RUNNING, "Paused": MachineState.PAUSED}.get(word, MachineState.ABSENT)
        return Observation(found, process if found is not MachineState.ABSENT else None)

    async def known(self) -> frozenset[str]:
        return frozenset(bundle.machine_id for bundle in self._bundles.all())

    async def end_strays(self) -> None:
        """Nothing works for a broker alone: a start that was cut off is found, and ended, by the machine's id. Jails
        are left by a reboot.
        """
        users.forget_lost()
        kept = await self.known()
        for place in self._jails.iterdir() if self._jails.is_dir() else ():
            if place.name not in kept:
                # SAFETY: nothing runs there, and `rmtree` follows no link that a machine's user has made.
                await asyncio.to_thread(shutil.rmtree, place)

    def console(self, machine_id: str) -> str:
        """Return what the machine has said on its serial line, and Firecracker of itself, since this was last asked.

        A guest's words: for logs and people alone.
        """
        return self._jail(machine_id).read_console()

    # --- starting

    async def _launch(
        self, machine: Machine, channel: Channel, files: dict[str, Path], requests: tuple[Request, ...]
    ) -> Process:
        jail = self._jail(machine.id)
        try:
            memory_mib = jail.bundle.started()["hardware"]["memory_mib"]
            bytes_max = file_bytes_max(files[WRITABLE], memory_mib)
            process = await jail.launch(self._installed, machine, files, bytes_max)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(jail.carry(machine, channel, process))
                    both.create_task(_ask_all(jail, process, requests))
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
        except (MachineLost, TimeoutError) as error:
            raise HostError(
                "The machine did not start: Firecracker ended or does not answer.", code="start-failed"
            ) from error
        except HostError as error:
            raise HostError(f"The machine did not start: {error}", code="start-failed") from error
        return process

    # --- finding

    async def _set_state(self, machine_id: str, word: str, timeout_s: float = api.ANSWER_S) -> None:
        self._expect(machine_id)
        await api.ask(self._jail(machine_id).api, "PATCH", "/vm", {"state": word}, timeout_s=timeout_s)

    def _expect(self, machine_id: str) -> None:
        if self._bundles.of(machine_id).process() is None:
            raise MachineLost

    def _jail(self, machine_id: str) -> Jail:
        return Jail(self._bundles.of(machine_id), self._jails / machine_id)


async def _keep_last_words(jail: Jail) -> None:
    """Log what came on the serial line of a machine whose guest never answered: where to look for why."""
    with suppress(OSError):
        if jail.has_answered() or not (said := await jail.last_words()):
            return
        # A guest's words: bounded, and nothing of them but what can be shown.
        lines = ["".join(one if one.isprintable() else "?" for one in line) for line in said.splitlines()]
        log.warning("guest-never-answered", machine=jail.bundle.machine_id, console=_ends(lines))


def _ends(lines: list[str]) -> list[str]:
    """Return the first and the last of many lines, none of them long."""
    cut = [line[:LINE_CHARS_MAX] for line in lines if line]
    return cut if len(cut) <= 2 * LINES_MAX else [*cut[:LINES_MAX], "…", *cut[-LINES_MAX:]]


async def _ask_all(jail: Jail, process: Process, requests: tuple[Request, ...]) -> None:
    """Wait until Firecracker answers, and ask it for all that."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(MachineLost):
                await api.state(jail.api)
                break
            if not processes.is_alive(process):
                raise MachineLost
            await asyncio.sleep(POLL_S)
    for path, body in requests:
        await api.ask(jail.api, "PUT", path, body, timeout_s=START_S)


def _disks(machine: Machine, guest: Path) -> dict[str, Path]:
    if machine.blocks is None:
        raise HostError("A Firecracker machine needs disks.")
    return dict(zip(DISKS, (machine.blocks.template, machine.blocks.layer, guest), strict=True))


def _explain(error: Exception, *places: Path) -> NoReturn:
    """Say why an image was not written."""
    if room.is_full(*places):
        raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full") from error
    raise HostError("The machine's memory image could not be written.", code="checkpoint-failed") from error
