"""Machines as gVisor sandboxes: runsc with the systrap platform, one container per machine.

Everything of one machine here lies in two places: runsc's own state (files that begin with the id in
``<state_dir>/runsc``) and the bundle (``<state_dir>/bundles/<id>``). Both live on the run directory, so a reboot of
the host clears them.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from space.drivers import processes, programs
from space.drivers.base import Capabilities, Channel, HostLimits, Machine, MachineState, Need, Observation
from space.drivers.gvisor import memory, seating, spec
from space.drivers.processes import Process
from space.errors import HostError, HostFull, MachineLost
from space.model.sandbox import Resources

START_S = 60.0
CONTROL_S = 30.0
CHECKPOINT_S = 600.0
END_S = 10.0
MESSAGE_CHARS_MAX = 500

# Sentry and gofer themselves; measured at 30 to 40 MiB idle, more under many open files. The guest gets its own size on
# top.
OVERHEAD_MEMORY_MIB = 64
# A guest's threads compute in stubs; the sentry that serves their system calls spins on a CPU of its own meanwhile.
# Without this share a guest that calls often would be held up long before it has used what it was given.
OVERHEAD_CPUS = 1.0
# Systrap backs each guest thread by host tasks: one in the stub, one in the sentry; the rest is the sentry's own.
HOST_TASKS_PER_GUEST_TASK = 2
OVERHEAD_TASKS = 256

_IMAGE_MAGIC = b"gVisorSF"
_IMAGE_FILES = ("checkpoint.img", "pages.img", "pages_meta.img")
_MANIFEST = "space.json"
_NO_SPACE = ("no space left on device", "disk quota exceeded")
_FULL_BYTES = 1 << 20
# runsc registers for membarrier(2) when it starts, which takes the kernel 8 to 15 ms (a grace period of RCU), half of
# what a pause takes. Programs that only speak to a sentry have no use for it.
_MEMBARRIER = 324
_QUICK = programs.Confinement(without=(_MEMBARRIER,))

log = structlog.get_logger()


class GVisorDriver:
    """The gVisor driver. `state_dir` is root's alone and on a filesystem that a reboot clears."""

    name = "gvisor"
    capabilities = Capabilities(
        boundary="gVisor's user-space kernel (runsc, systrap)",
        needs=frozenset({Need.DISK, Need.LINK, Need.CGROUP}),
        checkpoint=True,
        isolates=True,
    )

    def __init__(self, runsc: Path, state_dir: Path, guest_dir: Path) -> None:
        self._runsc = runsc
        self._root = state_dir / "runsc"
        self._bundles = state_dir / "bundles"
        self._guest_dir = guest_dir
        self._version = ""

    def limits(self, resources: Resources) -> HostLimits:
        return HostLimits(
            cpus=resources.cpus + OVERHEAD_CPUS,
            memory_mib=resources.memory_mib + OVERHEAD_MEMORY_MIB,
            pids=resources.pids * HOST_TASKS_PER_GUEST_TASK + OVERHEAD_TASKS,
        )

    async def prepare(self, machine: Machine) -> None:
        if machine.root is None or machine.netns is None:
            raise HostError("A gVisor machine needs a disk and a link.")
        bundle = self._bundle(machine.id)
        bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An upgrade lets the name point elsewhere; this machine keeps the runtime that it begins with.
        self._write_spec(machine, self._guest_dir.resolve())
        memory_kib = machine.resources.memory_mib * 1024
        (bundle / "meminfo").write_text(f"MemTotal: {memory_kib} kB\nMemFree: {memory_kib} kB\n")
        for name in ("log", "pid"):
            (bundle / name).unlink(missing_ok=True)

    async def start(self, machine: Machine, channel: Channel) -> Process:
        return await self._launch(machine, channel, "run", "-detach")

    async def restore(self, machine: Machine, channel: Channel, image: Path) -> Process:
        guest = Path(self._manifest(image)["guest"])
        if not guest.is_dir():  # noqa: ASYNC240 a local directory
            raise HostError("The guest runtime that the memory image needs is gone.", code="image-version")
        self._write_spec(machine, guest)
        return await self._launch(machine, channel, "restore", "-detach", f"-image-path={image}")

    async def pause(self, machine_id: str) -> None:
        if await self._control(machine_id, "pause", to=MachineState.PAUSED):
            raise HostError("The machine could not be paused.", code="pause-failed")

    async def resume(self, machine_id: str) -> None:
        if await self._control(machine_id, "resume", to=MachineState.RUNNING):
            raise HostError("The machine could not be resumed.", code="resume-failed")

    async def checkpoint(self, machine_id: str, image: Path) -> None:
        argv = ("checkpoint", "-leave-running", "-compression=none", f"-image-path={image}", machine_id)
        if message := await self._command(machine_id, *argv, timeout_s=CHECKPOINT_S):
            if (await self.inspect(machine_id)).state is MachineState.ABSENT:
                raise MachineLost
            log.warning("checkpoint-failed", machine=machine_id, reason=message)
            if any(text in message.lower() for text in _NO_SPACE) or _is_full(image):
                raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full")
            raise HostError("The machine's memory image could not be written.", code="checkpoint-failed")
        manifest = {
            "version": await self._installed(),
            "guest": (self._bundle(machine_id) / "guest").read_text(),
            "bytes": {name: (image / name).stat().st_size for name in _IMAGE_FILES},
        }
        (image / _MANIFEST).write_text(json.dumps(manifest))

    async def check_image(self, image: Path) -> None:
        try:
            manifest = self._manifest(image)
            with (image / _IMAGE_FILES[0]).open("rb") as file:
                magic = file.read(len(_IMAGE_MAGIC))
            whole = magic == _IMAGE_MAGIC and all(
                (image / name).stat().st_size == manifest["bytes"][name] for name in _IMAGE_FILES
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostError("The memory image cannot be read.", code="image-damaged") from error
        if not whole:
            raise HostError("The memory image is not complete.", code="image-damaged")
        if manifest["version"] != await self._installed():
            raise HostError("The memory image was written by another version of runsc.", code="image-version")

    async def destroy(self, machine_id: str, process: Process | None) -> None:
        # `runsc delete -force` polls for 1.5 s; killing the sentry and removing its state files takes milliseconds
        # and works for machines that were only half made, too.
        owned = [process] if process else [one for one, _ in self._processes_of(machine_id)]
        for one in owned:
            if not await processes.kill(one, END_S):
                raise HostError("A process of the machine does not end.", code="machine-stuck")
        for path in self._state_files(machine_id):
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._bundle(machine_id))

    async def inspect(self, machine_id: str) -> Observation:
        result = await programs.run([*self._base(), "state", machine_id], timeout_s=CONTROL_S, within=_QUICK)
        try:
            state: dict[str, Any] = json.loads(result.output)
            process = processes.identify(int(state["pid"]))
        except (ValueError, KeyError, TypeError):
            return Observation(MachineState.ABSENT)
        found = {"running": MachineState.RUNNING, "paused": MachineState.PAUSED}.get(state.get("status", ""))
        if found is None or process is None:
            return Observation(MachineState.ABSENT)
        return Observation(found, process)

    async def known(self) -> frozenset[str]:
        bundles = {path.name for path in self._listing(self._bundles)}
        states = {path.name.partition("_")[0] for path in self._listing(self._root) if "_sandbox:" in path.name}
        return frozenset(bundles | states)

    async def end_strays(self) -> None:
        for process, words in list(processes.processes_with_argument(f"--root={self._root}")):
            # Sentry and gofer call themselves runsc-sandbox and runsc-gofer; all others are a dead broker's requests.
            if words[0] != str(self._runsc):
                continue
            # Killed between the deed and its record, these would leave a machine that is paused and said to run.
            if not ({"pause", "resume"} & set(words) and await _ended(process)):
                await processes.kill(process, END_S)

    def _write_spec(self, machine: Machine, guest: Path) -> None:
        bundle = self._bundle(machine.id)
        (bundle / "config.json").write_text(json.dumps(spec.render(machine, guest)))
        (bundle / "guest").write_text(str(guest))

    @staticmethod
    def _manifest(image: Path) -> dict[str, Any]:
        return json.loads((image / _MANIFEST).read_text())

    def _bundle(self, machine_id: str) -> Path:
        return self._bundles / machine_id

    @staticmethod
    def _listing(directory: Path) -> list[Path]:
        return list(directory.iterdir()) if directory.is_dir() else []

    def _state_files(self, machine_id: str) -> list[Path]:
        names = (f"{machine_id}_sandbox:", f"runsc-{machine_id}.sock")
        return [path for path in self._listing(self._root) if path.name.startswith(names)]

    def _base(self, log: Path | None = None) -> list[str]:
        words = [str(self._runsc), f"--root={self._root}", "--platform=systrap", "--network=sandbox", "--overlay2=none"]
        if log:
            words += [f"--log={log}", "--log-format=json"]
        return [*words, "--ignore-cgroups"]  # the broker's own cgroup is joined before runsc starts

    async def _launch(self, machine: Machine, channel: Channel, *verb: str) -> Process:
        bundle = self._bundle(machine.id)
        self._root.mkdir(mode=0o711, parents=True, exist_ok=True)
        within = programs.Confinement(
            netns=machine.netns,
            cgroups=machine.cgroups,
            # runsc tells the guest that it has as much memory as /proc/meminfo says, and on newer kernels takes the
            # presence of /proc/sys/net/core/rmem_default for a sign that it runs in the host's network namespace.
            over=((bundle / "meminfo", processes.PROC / "meminfo"),),
            hidden=(processes.PROC / "sys/net/core",),
            # The spec's "ro" is a flag in the guest's kernel alone, which the guest's root can take away by a remount;
            # runsc's own bind mount of the directory is writable unless its source is not.
            read_only=(Path((bundle / "guest").read_text()),),
        )
        argv = [*self._base(bundle / "log"), *verb, f"-bundle={bundle}", f"-pid-file={bundle / 'pid'}", machine.id]
        # SAFETY: argv holds fixed words, the broker's own paths and an id that matched its pattern; the guest's bytes
        # reach the machine through the channel's descriptors only. The machine's standard error is /dev/null, so it
        # cannot fill the host.
        result = await programs.run(argv, timeout_s=START_S, stdin=channel.stdin, stdout=channel.stdout, within=within)
        process = self._started(bundle) if result.status == 0 else None
        if process is None:
            raise HostError(f"The machine did not start: {self._reason(bundle / 'log')}", code="start-failed")
        seating.seat(machine.id, process.pid)
        memory.offer_stubs(process.pid)
        return process

    @staticmethod
    def _started(bundle: Path) -> Process | None:
        try:
            return processes.identify(int((bundle / "pid").read_text()))
        except (OSError, ValueError):
            return None

    async def _control(self, machine_id: str, verb: str, *, to: MachineState) -> str:
        """Run a verb; return why it failed, or "" when the machine is in the state wanted."""
        message = await self._command(machine_id, verb, machine_id, timeout_s=CONTROL_S)
        if message:
            log.warning("runsc-failed", verb=verb, machine=machine_id, reason=message)
            observed = (await self.inspect(machine_id)).state
            if observed is MachineState.ABSENT:
                raise MachineLost
            if observed is to:
                return ""
        return message

    async def _command(self, machine_id: str, *words: str, timeout_s: float) -> str:
        """Run runsc; return its last error, or "" when it succeeded."""
        bundle = self._bundle(machine_id)
        if not bundle.is_dir():
            raise MachineLost
        log = bundle / "log"
        log.unlink(missing_ok=True)
        result = await programs.run([*self._base(log), *words], timeout_s=timeout_s, within=_QUICK)
        return self._reason(log) if result.status else ""

    @staticmethod
    def _reason(log: Path) -> str:
        """Return the last error in runsc's log without any host path."""
        last = "runsc gave no reason"
        with suppress(OSError, ValueError):
            for line in log.read_text(errors="replace").splitlines():
                entry: dict[str, Any] = json.loads(line)
                if entry.get("level") in {"error", "fatal"} or "error" in str(entry.get("msg", "")).lower():
                    last = str(entry.get("msg", ""))
        words = (word if "/" not in word else "…" for word in last.split())
        return " ".join(words)[:MESSAGE_CHARS_MAX]

    def _processes_of(self, machine_id: str) -> list[tuple[Process, list[str]]]:
        found = processes.processes_with_argument(f"--root={self._root}")
        bundle = f"--bundle={self._bundle(machine_id)}"
        return [(one, words) for one, words in found if machine_id in words or bundle in words]

    async def _installed(self) -> str:
        if not self._version:
            output = await programs.check([str(self._runsc), "--version"], timeout_s=CONTROL_S)
            self._version = output.decode(errors="replace").splitlines()[0]
        return self._version


async def _ended(process: Process) -> bool:
    pidfd = processes.open_process(process)
    if pidfd is None:
        return True
    try:
        return await processes.wait_ended(pidfd, END_S)
    finally:
        os.close(pidfd)


def _is_full(image: Path) -> bool:
    """Whether writing there fails for want of room. Cut off early enough, runsc reports anything but that."""
    found = os.statvfs(image)
    return found.f_bavail * found.f_frsize < _FULL_BYTES
