"""One machine's jail: what its Firecracker finds there, its cable, its start by Firecracker's jailer, and its relay.

What a machine uses of the host's files is mounted into its jail, in a mount namespace that only its Firecracker has: so
nothing of it is left on the host, however it ends. The jail itself belongs to the machine's user, who may be a guest
that has taken over its Firecracker: nothing there is believed, and no link of it followed.
"""

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from space.drivers import processes, programs
from space.drivers.base import Channel, Machine
from space.drivers.firecracker import config, relay
from space.drivers.firecracker.versions import Programs
from space.drivers.processes import Process
from space.drivers.vm import network
from space.drivers.vm.bundles import Bundle
from space.errors import HostError

START_S = 30.0
LAST_WORDS_S = 2.0
OPEN_FILES_MAX = 256
CONSOLE_BYTES_MAX = relay.WORDS_BYTES_MAX
"""What a pipe holds: the first that a machine writes on its serial line and that nobody has read. More is lost."""
_CONSOLE, _NETNS, _RELAY, _RELAY_PID = "console", "netns", "relay", "relay.pid"
_LAST_WORDS = "last-words"


@dataclass(frozen=True, slots=True)
class Jail:
    """``place`` is a directory of root's alone, that the jail is made in; it lies where devices are allowed, which
    Debian's ``/run`` is not.
    """

    bundle: Bundle
    place: Path

    @property
    def id(self) -> str:
        """What the jailer calls it; no other process's command line has this word."""
        return f"vm-{self.bundle.machine_id}"

    @property
    def root(self) -> Path:
        return self.place / "firecracker" / self.id / "root"

    @property
    def out(self) -> Path:
        """Where its images are written to: the user's, but not in the jail, where it could be made a link."""
        return self.place / "out"

    @property
    def api(self) -> Path:
        return self.root / config.API

    @property
    def user(self) -> int:
        return self.bundle.user

    def make(self, netns: Path) -> None:
        """Make it anew, empty, for a machine whose program does not run."""
        self.remove()
        self.bundle.make()
        self.place.mkdir(mode=0o700, parents=True)
        if forbids_jails(self.place):
            raise HostError(
                "The file system of the data directory forbids devices or programs, which a machine's jail needs: "
                "mount it without nodev and noexec.",
                code="no-firecracker",
            )
        self.root.mkdir(parents=True)
        self.out.mkdir(mode=0o700)
        # SAFETY: an empty directory just made, in one of root's alone.
        os.chown(self.out, self.user, self.user)
        (self.bundle.path / _NETNS).write_text(str(netns))
        os.mkfifo(self.bundle.path / _CONSOLE, 0o600)

    def remove(self) -> None:
        self.bundle.remove()
        # SAFETY: `rmtree` goes by descriptors and follows no link that the machine's user has made.
        with suppress(FileNotFoundError):
            shutil.rmtree(self.place)

    def read_console(self) -> str:
        """Return what came on the serial line since this was last asked."""
        descriptor = self._open_console()
        try:
            return os.read(descriptor, CONSOLE_BYTES_MAX).decode(errors="replace")
        except BlockingIOError:
            return ""
        finally:
            os.close(descriptor)

    async def last_words(self) -> str:
        """Return the same, of a machine that has ended, too."""
        if self.bundle.process() is None:
            if (carrier := self.relay()) and (pidfd := processes.open_process(carrier)) is not None:
                try:
                    await processes.wait_ended(pidfd, LAST_WORDS_S)
                finally:
                    os.close(pidfd)
            with suppress(FileNotFoundError):
                # SAFETY: a file of root's, that the relay could write so much to.
                return (self.bundle.path / _LAST_WORDS).read_text(errors="replace")
        return self.read_console()

    def _open_console(self) -> int:
        """Return the serial line's pipe, which nobody ever waits for: what does not fit is lost."""
        return os.open(self.bundle.path / _CONSOLE, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    async def lay_cable(self, netns: Path) -> None:
        """Make the tap device, the user's, and connect it to the link. There already: it is replaced."""
        await self.take_cable()
        within = programs.Confinement(netns=netns)
        device = f"tuntap add dev {network.TAP} mode tap user {self.user}\n{network.DEVICE}"
        knobs = [f"{name}={value}" for name, value in network.KNOBS.items()]
        # SAFETY: fixed words, in the machine's own network namespace.
        for argv, text in (
            (["ip", "-batch", "-"], device),
            (["nft", "-f", "-"], network.RULES),
            (["sysctl", "-q", "-w", *knobs], ""),
        ):
            finished = await programs.run(argv, timeout_s=START_S, stdin=text.encode(), within=within)
            if finished.status:
                raise HostError(f"The machine's link could not be laid: {argv[0]} failed.", code="start-failed")

    async def take_cable(self) -> None:
        """Take the tap device away, if there is one. It goes with the namespace, too."""
        try:
            netns = Path((self.bundle.path / _NETNS).read_text())
        except OSError:
            return
        if netns.exists():  # noqa: ASYNC240 a local file
            # SAFETY: as above.
            words = ["ip", "link", "delete", network.TAP]
            await programs.run(words, timeout_s=START_S, within=programs.Confinement(netns=netns))

    async def launch(
        self, found: Programs, machine: Machine, files: Mapping[str, Path], file_bytes_max: int
    ) -> Process:
        """Start Firecracker, which then waits for what it is asked. `files`: names in the jail, and what lies there.
        No file that it writes can become larger than `file_bytes_max`.
        """
        mounts: list[tuple[Path, Path]] = [(self.out, self.root / config.OUT)]
        (self.root / config.OUT).mkdir()
        for name, file in files.items():
            (self.root / name).touch()
            mounts.append((file, self.root / name))
        user = str(self.user)
        argv = [str(found.jailer), "--id", self.id, "--exec-file", str(found.firecracker.resolve())]
        argv += ["--uid", user, "--gid", user, "--chroot-base-dir", str(self.place)]
        argv += ["--resource-limit", f"fsize={file_bytes_max}"]
        argv += ["--netns", str(machine.netns), "--new-pid-ns", "--resource-limit", f"no-file={OPEN_FILES_MAX}"]
        argv += ["--", "--api-sock", f"/{config.API}", "--level", "Warn"]  # the serial line is for the guest
        # SAFETY: the jailer takes root's rights away: own user, mount, pid and network namespace, a root directory with
        # no more than the files above and four devices. Firecracker filters its own system calls. It joins the cgroups
        # before. Nothing it writes can fill the host: its output is a pipe that is never waited for.
        within = programs.Confinement(cgroups=machine.cgroups, over=tuple(mounts))
        console = self._open_console()
        try:
            finished = await programs.run(argv, timeout_s=START_S, stdout=console, within=within)
        finally:
            os.close(console)
        # SAFETY: the jailer wrote it as root; until the machine starts, nothing of a guest's has run there.
        process = _numbered(self.root / "firecracker.pid")
        if finished.status or process is None:
            raise HostError("The jailer failed.", code="start-failed")
        self.bundle.note_process(process)
        return process

    async def carry(self, machine: Machine, channel: Channel, process: Process) -> None:
        """Start the relay, which carries the channel until the machine's process ends."""
        spec, number = self.bundle.path / "relay.json", self.bundle.path / _RELAY_PID
        told = {"jail": str(self.root), "socket": config.VSOCK, "port": config.PORT, "user": self.user}
        told |= {"pid": process.pid, "start_ticks": process.start_ticks, "pid_file": str(number)}
        told |= {"console": str(self.bundle.path / _CONSOLE), "last_words": str(self.bundle.path / _LAST_WORDS)}
        spec.write_text(json.dumps(told))
        # SAFETY: fixed words, this interpreter and files of root's own. It gives up all rights before it sees a guest's
        # byte; no program it could start would get any.
        argv = ["setpriv", "--no-new-privs", "--", sys.executable, "-I", "-S", str(Path(relay.__file__)), str(spec)]
        within = programs.Confinement(netns=machine.netns, cgroups=machine.cgroups)
        finished = await programs.run(
            argv, timeout_s=START_S, stdin=channel.stdin, stdout=channel.stdout, within=within
        )
        started = _numbered(number)
        if finished.status or started is None:
            raise HostError("Its channel could not be made.", code="start-failed")
        self.bundle.note_process(started, _RELAY)

    def relay(self) -> Process | None:
        """Return the relay if it lives."""
        return self.bundle.process(_RELAY)

    def has_answered(self) -> bool:
        """Whether the guest has ever answered the relay."""
        with suppress(OSError):
            return (self.bundle.path / _RELAY_PID).read_text().endswith(relay.ANSWERED)
        return False

    def call_again(self) -> None:
        """Let the relay give up its connection to the guest, which may not know it any more, and make another."""
        if carrier := self.relay():
            processes.send(carrier, signal.SIGHUP)

    def running(self) -> list[Process]:
        """Return all that works for the machine: the jailer, or what has become of it, and the relay."""
        jailed = [one for one, words in processes.processes_with_argument(self.id) if "--id" in words]
        return jailed + [one for one, _ in processes.processes_with_argument(str(self.bundle.path / "relay.json"))]

    def take_image(self, image: Path, bytes_max: int) -> None:
        """Copy what was written to `out` into `image`, and remove it there. Raise `OSError` when there is no room.

        It is copied (on btrfs that copies nothing) and not moved: its writer may have it open for good.
        """
        for name in config.IMAGE:
            source = os.open(self.out / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(source)
                # SAFETY: of what the machine's user may have put there, only a file of possible size is copied.
                if not stat.S_ISREG(found.st_mode) or found.st_size > bytes_max:
                    raise HostError("The machine's memory image makes no sense.", code="checkpoint-failed")
                _copy(source, image / name, found.st_size)
            finally:
                os.close(source)
        self.drop_image()

    def drop_image(self) -> None:
        """Remove whatever was put there. What its user keeps from being removed now goes with the jail."""
        with suppress(OSError):
            for path in self.out.iterdir():
                # SAFETY: as above.
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def forbids_jails(directory: Path) -> bool:
    """Whether jails, which have devices and a program in them, cannot lie there."""
    return bool(os.statvfs(directory).f_flag & (os.ST_NODEV | os.ST_NOEXEC))


def _numbered(file: Path) -> Process | None:
    """Return the process whose number is in the file, if it lives."""
    try:
        return processes.identify(int(file.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return None


def _copy(source: int, target: Path, size: int) -> None:
    """Copy that many bytes into a new file that everybody may read who comes to it."""
    descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
    try:
        while size > 0:
            copied = os.copy_file_range(source, descriptor, size)
            if not copied:
                raise HostError("The machine's memory image was cut while it was copied.", code="checkpoint-failed")
            size -= copied
    finally:
        os.close(descriptor)
