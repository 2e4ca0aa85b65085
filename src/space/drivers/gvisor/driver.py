"""Machines as gVisor sandboxes: runsc with the systrap platform, one container per machine.

Everything of one machine here lies in two places: runsc's own state (files that begin with the id in
``<state_dir>/runsc``) and the bundle (``<state_dir>/bundles/<id>``). Both live on the run directory, so a reboot of
the host clears them.
"""

import asyncio
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import structlog

from space.drivers import processes, programs, room
from space.drivers.base import Capabilities, Channel, HostLimits, Machine, MachineState, Need, Observation
from space.drivers.gvisor import control, memory, seating, spec
from space.drivers.processes import Process
from space.errors import Conflict, HostError, HostFull, MachineLost
from space.model import ids
from space.model.sandbox import Resources

START_S = 60.0
CONTROL_S = 30.0
CHECKPOINT_S = 600.0
END_S = 30.0
"""How long a killed machine may take to be gone; a host that is busy with much memory takes its time."""
DYING_S = 2.0
"""How long a sentry that gave no answer is looked at before it is said to live."""
MESSAGE_CHARS_MAX = 500

# A guest's threads compute in stubs; the sentry that serves their system calls spins on a CPU of its own meanwhile.
# Without this share a guest that calls often would be held up long before it has used what it was given.
OVERHEAD_CPUS = 1.0
# Systrap backs each guest thread by host tasks: one in the stub, one in the sentry; the rest is the sentry's own.
HOST_TASKS_PER_GUEST_TASK = 2
OVERHEAD_TASKS = 256

_IMAGE_MAGIC = b"gVisorSF"
_MANIFEST = "space.json"
_VERSION = "version"
"""In a bundle: of the runsc that the machine was started by, and is. The one installed may be another by now."""
WRITE_AGAIN = 8
_PASSING = "encoding error"
"""What runsc says when it met something that is for a moment in a form it cannot write, as a socket that connects."""
_SILENT = "no answer"
_DELETED = "deleted and invalidated dentries"
"""Of the sentry's own words for a deleted file of the disk that is still open."""
_NO_SPACE = ("no space left on device", "disk quota exceeded")
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
        volumes=True,
    )

    def __init__(self, runsc: Path, state_dir: Path, guest_dir: Path) -> None:
        self._runsc = runsc
        self._root = state_dir / "runsc"
        self._bundles = state_dir / "bundles"
        self._guest_dir = guest_dir
        self._version = programs.Version(runsc)

    def limits(self, resources: Resources) -> HostLimits:
        return HostLimits(
            cpus=resources.cpus + OVERHEAD_CPUS,
            memory_mib=memory.on_host_mib(resources),
            pids=resources.pids * HOST_TASKS_PER_GUEST_TASK + OVERHEAD_TASKS,
            io_weight=resources.io_weight,
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
        bundle = self._bundle(machine_id)
        if not bundle.is_dir():
            raise MachineLost
        version = self._started_by(bundle) or await self._version.get()
        message = await self._written(machine_id, image, version)
        for _ in range(WRITE_AGAIN):
            if _PASSING not in message:
                break
            for name in control.IMAGE_FILES:
                (image / name).unlink(missing_ok=True)
            message = await self._written(machine_id, image, version)
        if message:
            await self._explain(machine_id, image, message)
        manifest = {
            "version": version,
            "guest": (bundle / "guest").read_text(),
            "bytes": {name: (image / name).stat().st_size for name in control.IMAGE_FILES},
        }
        (image / _MANIFEST).write_text(json.dumps(manifest))

    async def check_image(self, image: Path) -> None:
        try:
            manifest = self._manifest(image)
            with (image / control.IMAGE_FILES[0]).open("rb") as file:
                magic = file.read(len(_IMAGE_MAGIC))
            whole = magic == _IMAGE_MAGIC and all(
                (image / name).stat().st_size == manifest["bytes"][name] for name in control.IMAGE_FILES
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostError("The memory image cannot be read.", code="image-damaged") from error
        if not whole:
            raise HostError("The memory image is not complete.", code="image-damaged")
        if manifest["version"] != await self._version.get():
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
        found = await asyncio.to_thread(list, processes.processes_with_argument(f"--root={self._root}"))
        running = {self._id_in(words) for _, words in found} - {""}
        return frozenset(bundles | states | running)

    async def end_strays(self) -> None:
        for process, words in list(processes.processes_with_argument(f"--root={self._root}")):
            # Sentry and gofer call themselves runsc-sandbox and runsc-gofer; all others are a dead broker's requests.
            if words[0] != str(self._runsc):
                continue
            # Killed between the deed and its record, these would leave a machine that is paused and said to run.
            if not ({"pause", "resume"} & set(words) and await _ended(process, END_S)):
                await processes.kill(process, END_S)

    async def _written(self, machine_id: str, image: Path, version: str) -> str:
        """Return why the image could not be written, or ""."""
        try:
            return await self._write_image(machine_id, image, version)
        except OSError as error:
            return f"{_SILENT}: {error}"

    async def _write_image(self, machine_id: str, image: Path, version: str) -> str:
        """Return why the image could not be written, or ""."""
        if version in control.PROVEN:
            return await control.checkpoint(self._root / f"runsc-{machine_id}.sock", image, CHECKPOINT_S)
        words = ("checkpoint", "-leave-running", "-compression=none", f"-image-path={image}", machine_id)
        return await self._command(machine_id, *words, timeout_s=CHECKPOINT_S)

    async def _explain(self, machine_id: str, image: Path, message: str) -> NoReturn:
        """Raise what a failed checkpoint means."""
        seen = await self.inspect(machine_id)
        if seen.process and message.startswith(_SILENT):
            await _ended(seen.process, DYING_S)  # killed in this moment, it falls silent first and is gone then
            seen = await self.inspect(machine_id)
        if seen.state is MachineState.ABSENT:
            raise MachineLost
        log.warning("checkpoint-failed", machine=machine_id, reason=_speakable(message))
        if any(text in message.lower() for text in _NO_SPACE) or room.is_full(image):
            raise HostFull("There is no room for the machine's memory image.", code="snapshot-store-full")
        if _DELETED in message:
            raise Conflict(
                "A process has a file or directory open that was deleted from the disk, and memory with that cannot be"
                " kept. End or restart the process (`ls -l /proc/*/fd` shows it), or use `stop`.",
                code="open-deleted-file",
            )
        raise HostError("The machine's memory image could not be written.", code="checkpoint-failed")

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
        # Connections beyond the machine end at its checkpoint, at both ends; without this there would be no checkpoint.
        words += ["--net-disconnect-ok"]
        # Volumes are written by others, too: what a sentry has seen of one it looks at again.
        words += ["--file-access-mounts=shared"]
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
        (bundle / _VERSION).write_text(await self._version.get())
        argv = [*self._base(bundle / "log"), *verb, f"-bundle={bundle}", f"-pid-file={bundle / 'pid'}", machine.id]
        # SAFETY: argv holds fixed words, the broker's own paths and an id that matched its pattern; the guest's bytes
        # reach the machine through the channel's descriptors only. The machine's standard error is /dev/null, so it
        # cannot fill the host.
        result = await programs.run(argv, timeout_s=START_S, stdin=channel.stdin, stdout=channel.stdout, within=within)
        process = self._started(bundle) if result.status == 0 else None
        if process is None:
            raise HostError(f"The machine did not start: {self._reason(bundle / 'log')}", code="start-failed")
        seating.seat(machine.id, process.pid)
        memory.offer(process.pid)
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
        return _speakable(last)

    def _processes_of(self, machine_id: str) -> list[tuple[Process, list[str]]]:
        found = processes.processes_with_argument(f"--root={self._root}")
        bundle = f"--bundle={self._bundle(machine_id)}"
        return [(one, words) for one, words in found if machine_id in words or bundle in words]

    @staticmethod
    def _started_by(bundle: Path) -> str:
        with suppress(FileNotFoundError):  # started before that was written down
            return (bundle / _VERSION).read_text()
        return ""

    def _id_in(self, words: list[str]) -> str:
        """Return the id of the machine that a process of runsc works for: its last word, or a gofer's bundle."""
        bundles = [Path(word.partition("=")[2]) for word in words if word.startswith("--bundle=")]
        names = [*words, *(bundle.name for bundle in bundles if bundle.parent == self._bundles)]
        return next((name for name in names if ids.is_id("sbx", name)), "")


def _speakable(message: str) -> str:
    """Return a message of runsc's without host paths, and not longer than is of use."""
    words = (word if "/" not in word else "…" for word in message.split())
    return " ".join(words)[:MESSAGE_CHARS_MAX]


async def _ended(process: Process, timeout_s: float) -> bool:
    pidfd = processes.open_process(process)
    if pidfd is None:
        return True
    try:
        return await processes.wait_ended(pidfd, timeout_s)
    finally:
        os.close(pidfd)
