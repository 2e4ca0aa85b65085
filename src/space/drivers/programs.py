"""Running a fixed program for the root process: list argv, minimal environment, bounded time and output, optional
confinement.

The child is started by a thread of its own. That costs a tenth of a millisecond, keeps the event loop free while the
kernel copies mounts, and lets the *thread* enter namespaces which the child inherits: a thread that has called
``unshare`` is never used again.
"""

import asyncio
import ctypes
import errno
import os
import struct
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import structlog

from space.errors import HostError

OUTPUT_BYTES_MAX = 1 << 20
COMPLAINT_BYTES_MAX = 2048
KILLED_S = 10.0
VERSION_S = 30.0
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

log = structlog.get_logger()

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _SECCOMP_ALLOW, _SECCOMP_ERRNO = 22, 2, 0x7FFF0000, 0x00050000
_BPF = struct.Struct("=HBBI")
_BPF_LOAD, _BPF_JEQ, _BPF_RETURN = 0x20, 0x15, 0x06

# Joins every cgroup named before "--" (0 means the writer), then becomes the program. Data only ever arrives as
# arguments.
_JOIN_AND_EXEC = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended. `output` is its standard output, cut at 1 MiB; `complaint` the start of its standard
    error.
    """

    status: int
    output: bytes
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Confinement:
    """Where a program runs. Empty means: where the caller runs."""

    netns: Path | None = None
    cgroups: tuple[Path, ...] = ()
    over: tuple[tuple[Path, Path], ...] = ()
    """(file, target) pairs bind-mounted in a mount namespace of the program's own."""
    hidden: tuple[Path, ...] = ()
    """Directories covered by an empty tmpfs in that namespace."""
    without: tuple[int, ...] = ()
    """Numbers of system calls that the kernel says it does not have."""
    read_only: tuple[Path, ...] = ()
    """Directories that are read-only in that namespace, and in every bind mount made of them there."""


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes | int = subprocess.DEVNULL,
    stdout: int | None = None,
    within: Confinement | None = None,
) -> Finished:
    """Run to the end. `stdin` is data or a descriptor.

    With `stdout`, a descriptor, the program may leave children behind that keep it; `output` is then empty, and
    standard error is /dev/null.

    Raise `HostError` when the program cannot be started or does not end in time; it is then killed. A cancelled call
    kills it, too. Either way it has ended when this returns, so nobody undoes what it is still doing.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Finished] = loop.create_future()
    attempt = _Attempt(list(argv), stdin, stdout, within)

    def work() -> None:
        try:
            result: Finished | Exception = attempt.run()
        except Exception as error:  # noqa: BLE001 carried over to the waiting task, whatever it is
            result = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, done, result)

    threading.Thread(target=work, name=f"run {argv[0]}", daemon=True).start()
    try:
        await asyncio.wait([done], timeout=timeout_s)
    finally:
        if not done.done():
            attempt.abandon()
            await asyncio.wait([done], timeout=KILLED_S)
            if done.done():
                done.exception()  # looked at, though nobody asks for it any more
    name = Path(argv[0]).name
    if attempt.abandoned:
        raise HostError(f"{name} did not end within {timeout_s:g} s.", code="program-timeout")
    try:
        return done.result()
    except OSError as error:
        raise HostError(f"{name} cannot be run: {error.strerror}.", code="program-failed") from error


async def check(argv: Sequence[str], *, timeout_s: float, stdin: bytes | int = subprocess.DEVNULL) -> bytes:
    """Run to the end and return standard output; raise `HostError` unless the status is 0."""
    finished = await run(argv, timeout_s=timeout_s, stdin=stdin)
    if finished.status:
        log.warning("program-failed", argv=list(argv), status=finished.status, complaint=finished.complaint)
        raise HostError(f"{Path(argv[0]).name} failed with status {finished.status}.", code="program-failed")
    return finished.output


class Version:
    """What a program says that it is; asked anew once another has taken its place, as an upgrade of the host does."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._said = ""
        self._of: tuple[int, int, int] | None = None

    async def get(self) -> str:
        """Return the first line of ``--version``. Raise `HostError` when there is none."""
        file = None
        with suppress(OSError):
            found = self._program.stat()
            file = (found.st_ino, found.st_mtime_ns, found.st_size)
        if file and file == self._of:
            return self._said
        # SAFETY: the operator's or the system's own program, which says what it is and ends.
        output = await check([str(self._program), "--version"], timeout_s=VERSION_S)
        if not output.strip():
            raise HostError(f"{self._program.name} does not say of which version it is.", code="program-failed")
        self._said, self._of = output.decode(errors="replace").strip().splitlines()[0], file
        return self._said


def _settle(done: "asyncio.Future[Finished]", result: Finished | Exception) -> None:
    if done.done():
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)


class _Attempt:
    """One start of a program; `run` belongs to its thread, `abandon` to the loop."""

    def __init__(self, argv: list[str], stdin: bytes | int, stdout: int | None, within: Confinement | None) -> None:
        self._argv = argv
        self._stdin = stdin
        self._stdout = stdout
        self._within = within
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self.abandoned = False

    def run(self) -> Finished:
        argv = self._argv
        if self._within:
            _enter(self._within)
            if self._within.cgroups:
                argv = ["/bin/sh", "-c", _JOIN_AND_EXEC, "sh", *map(str, self._within.cgroups), "--", *argv]
        if self._stdout is not None:
            # What stays behind is a machine: it runs at the usual priority, however much the caller has raised its own.
            os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
            return self._run(argv, subprocess.DEVNULL)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        try:
            finished = self._run(argv, errors)
            return replace(finished, complaint=os.pread(errors, COMPLAINT_BYTES_MAX, 0).decode(errors="replace"))
        finally:
            os.close(errors)

    def _run(self, argv: list[str], stderr: int) -> Finished:
        feed = self._stdin if isinstance(self._stdin, bytes) else None
        with self._lock:
            if self.abandoned:
                return Finished(-9, b"")
            # SAFETY: argv is built by drivers and broker from fixed words, their own paths and validated ids; no shell
            # sees data; the environment is fixed; every descriptor above 2 is closed.
            self._child = child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if isinstance(self._stdin, bytes) else self._stdin,
                stdout=subprocess.PIPE if self._stdout is None else self._stdout,
                stderr=stderr,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        with child:
            output = _exchange(child, feed)
        return Finished(child.returncode, output)

    def abandon(self) -> None:
        """Kill the program unless it has ended."""
        with self._lock:
            self.abandoned = True
            if self._child and self._child.poll() is None:
                self._child.kill()


def _exchange(child: subprocess.Popen[bytes], feed: bytes | None) -> bytes:
    if feed is not None and child.stdin:
        # Callers feed at most a few KiB, less than a pipe holds: this cannot block on a child that writes first.
        with suppress(BrokenPipeError):
            child.stdin.write(feed)
            child.stdin.close()
    return _read_bounded(child.stdout) if child.stdout else b""


def _read_bounded(stream: IO[bytes]) -> bytes:
    kept = bytearray()
    while chunk := os.read(stream.fileno(), 65536):
        kept += chunk[: OUTPUT_BYTES_MAX - len(kept)]
    return bytes(kept)


def _enter(within: Confinement) -> None:
    """Move the calling thread into the namespaces. What its child inherits ends with the child."""
    if within.netns:
        netns = os.open(within.netns, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # SAFETY: affects only this thread, which runs one program and ends; needs CAP_SYS_ADMIN, which the broker
            # has.
            _call("setns", netns, _CLONE_NEWNET)
        finally:
            os.close(netns)
    if within.over or within.hidden or within.read_only:
        # SAFETY: the mounts below are made in a namespace of this thread's own, made a slave first: none reaches the
        # host, but what the host unmounts goes here, too, so nothing is held longer than there. The network namespace
        # comes first because /proc/sys/net shows that of the caller.
        _call("unshare", _CLONE_NEWNS | _CLONE_FS)
        _mount(None, Path("/"), None, _MS_REC | _MS_SLAVE)
        for directory in within.hidden:
            _mount("none", directory, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        for file, target in within.over:
            _mount(str(file), target, None, _MS_BIND)
        for directory in within.read_only:
            _mount(str(directory), directory, None, _MS_BIND)
            _mount(None, directory, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    if within.without:
        _deny(within.without)


def _deny(numbers: tuple[int, ...]) -> None:
    """Let the calling thread, and what it starts, find these system calls missing (ENOSYS). See seccomp(2)."""
    found = [_BPF.pack(_BPF_JEQ, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    # Load the number; every match jumps behind "allow" to the last instruction.
    instructions = [_BPF.pack(_BPF_LOAD, 0, 0, 0), *found]
    instructions += [
        _BPF.pack(_BPF_RETURN, 0, 0, _SECCOMP_ALLOW),
        _BPF.pack(_BPF_RETURN, 0, 0, _SECCOMP_ERRNO | errno.ENOSYS),
    ]
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = _BpfProgram(len(instructions), ctypes.addressof(code))
    # SAFETY: only takes away, only from this thread and its child; the structures outlive the call, which copies them.
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


class _BpfProgram(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _mount(source: str | None, target: Path, kind: str | None, flags: int) -> None:
    _call("mount", source and source.encode(), os.fsencode(target), kind and kind.encode(), flags, None)


_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
