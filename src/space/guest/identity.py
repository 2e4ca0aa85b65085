"""What a guest takes over from its host: the time, randomness, its name and machine id, and how many CPUs it has.

At boot, and again after every restore, because a memory image holds all of these as they once were and may be the
beginning of several machines.
"""

from __future__ import annotations

import base64
import binascii
import errno
import fcntl
import math
import os
import stat
import struct
import time

from space.guest.groups import processes
from space.guest.system import Refused, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLOCK_TOLERANCE_NS = 500_000_000
_MACHINE_ID_BYTES_MAX = 64
_RESOLVER_BYTES_MAX = 64 * 1024
NAME_SERVER = "192.0.2.53"
"""Of a range that no network has (RFC 5737), and the same everywhere: what a program has read once stays right in a
copy of it."""
_NOT_THROUGH_LINKS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AFRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  the guest's own
_NOSUID, _NODEV = 2, 4
# See random(4).
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_names_asked_for: list[str] = []
"""Whether that was seen to; an image of the memory goes with its disk."""
_cpus: list[int] = []
"""The CPUs there are, found before this process restricts itself to some of them."""


def adjust(fields: dict[str, Any]) -> dict[str, Any]:
    """Take over the host's time, randomness and names for this guest, as far as each is given.

    Returns ``clock_stepped_ns``, by how much the clock was moved, and ``clock_off_ns``, by how much it still differs:
    it is only moved when it is off by more than half a second. Raises ``Refused`` when any of it cannot be had; then
    the guest is not what it is to be. As an ordinary process (in a test) the agent leaves the machine's clock and names
    alone.
    """
    owns_machine = os.getpid() == 1
    if fields.get("entropy") is not None:
        _reseed(fields["entropy"], owns_machine=owns_machine)
    if fields.get("hostname") is not None and owns_machine:
        _set_hostname(fields["hostname"])
    if fields.get("machine_id") is not None and owns_machine:
        write_machine_id(fields["machine_id"])
    if owns_machine and not _names_asked_for:
        _names_asked_for.append(NAME_SERVER)
        write_name_server()
    if fields.get("now_ns") is None:
        return {"clock_stepped_ns": 0, "clock_off_ns": 0}
    return _set_clock(fields["now_ns"], owns_machine=owns_machine)


def write_machine_id(machine_id: str, root: str = "/") -> None:
    """Put the id where programs look for it: ``/etc/machine-id``, and where D-Bus has a file of its own, in that too.

    No symbolic link is followed: one that has the name is replaced by the file.
    """
    try:
        _put_machine_id(root, ("etc",), machine_id)
    except OSError as error:
        raise Refused("machine-id-not-set", f"/etc/machine-id: {error.strerror}", error.errno) from error
    try:
        _put_machine_id(root, ("var", "lib", "dbus"), machine_id, only_instead_of_a_file=True)
    except (FileNotFoundError, NotADirectoryError):
        pass  # No D-Bus, or a place that is somewhere else by a link.
    except OSError as error:
        raise Refused("machine-id-not-set", f"/var/lib/dbus/machine-id: {error.strerror}", error.errno) from error


def write_name_server(root: str = "/") -> None:
    """Have programs ask somebody for names where nobody is named yet. Whom is no matter: all questions reach the
    gateway.
    """
    try:
        directory = os.open(os.path.join(root, "etc"), _NOT_THROUGH_LINKS)
    except OSError:
        return  # Then there is no program that would ask, either.
    try:
        if "nameserver" not in (_contents(directory, "resolv.conf", _RESOLVER_BYTES_MAX) or ""):
            _put(directory, "resolv.conf", f"nameserver {NAME_SERVER}\n", 0o644)
    except OSError:
        pass  # A full disk, say: names are no reason to refuse the guest everything else.
    finally:
        os.close(directory)


def write_environment(env: dict[str, str], root: str = "/") -> None:
    """Tell programs that run already what the next ones will have in their environment, in ``/run/space/environment``,
    which looks as ``/proc/<pid>/environ`` does. Everybody may read it: whoever runs a program has these variables.
    """
    text = "".join(f"{name}={value}\0" for name, value in env.items())
    try:
        above = os.open(os.path.join(root, "run"), _NOT_THROUGH_LINKS)
        try:
            try:
                os.mkdir("space", 0o755, dir_fd=above)
            except FileExistsError:
                pass
            directory = os.open("space", _NOT_THROUGH_LINKS, dir_fd=above)
        finally:
            os.close(above)
        try:
            _put(directory, "environment", text, 0o644)
        finally:
            os.close(directory)
    except OSError:
        pass  # No /run, or a full one: programs that ask there go on with what they have.


def set_cpus(cpus: float, *, everybody: bool = False) -> None:
    """Have the agent, and with it every program started from now on, see as many CPUs as ``cpus`` rounds up to.

    What a quota of processor time means is the host's to enforce; this is so that ``nproc`` and thread pools agree with
    it. ``everybody``: what runs already, too. No effect where there are no more CPUs, or the kernel does not let it be.
    """
    if not _cpus:
        _cpus.extend(sorted(os.sched_getaffinity(0)))
    wanted = set(_cpus[: max(1, math.ceil(cpus))])
    if os.sched_getaffinity(0) == wanted:
        return
    pids = [*processes()] if everybody and os.getpid() == 1 else [os.getpid()]
    for pid in pids:
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, wanted)
            except OSError:
                pass  # It has ended, or the kernel does not offer that.


def size_shared_memory(memory_mib: int) -> None:
    """Let ``/dev/shm`` hold half of the memory, as it does where a guest boots with it.

    One that is restored from the image of a smaller guest has it as small as that had, and this kernel changes no size
    of a tmpfs. So another is mounted over it, as long as there is nothing in it.
    """
    size = memory_mib * 1024 * 1024 // 2
    try:
        found = os.statvfs(_SHARED_MEMORY)
        if os.getpid() != 1 or found.f_blocks * found.f_frsize >= size or os.listdir(_SHARED_MEMORY):
            return
        # SAFETY: the guest's own mount, over one of the same kind that nobody uses yet; its size is a number.
        call("mount", b"shm", _SHARED_MEMORY.encode(), b"tmpfs", _NOSUID | _NODEV, b"mode=1777,size=%d" % size)
    except OSError:
        pass  # It has none, or keeps it as it is: smaller than it could be.


def _reseed(entropy: str, *, owns_machine: bool) -> None:
    """Have the kernel draw from this what anybody is given from now on.

    What is only written to ``/dev/urandom`` Linux heeds within a minute: until then all copies of a machine would be
    given the same. gVisor has neither call, nor needs them: it passes on its host's randomness.
    """
    try:
        seed = base64.b64decode(entropy, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("invalid-request", "entropy: not base64") from None
    try:
        with open("/dev/urandom", "wb", buffering=0) as pool:
            pool.write(seed)
            if owns_machine:
                try:
                    fcntl.ioctl(pool, _ADD_ENTROPY, struct.pack("ii", 8 * len(seed), len(seed)) + seed)
                    fcntl.ioctl(pool, _RESEED)
                except OSError as error:
                    if error.errno != errno.ENOTTY:
                        raise
    except OSError as error:
        raise Refused("entropy-not-taken", f"/dev/urandom: {error.strerror}", error.errno) from error


def _set_hostname(hostname: str) -> None:
    name = hostname.encode()
    try:
        # SAFETY: the guest's own name; the length is that of the bytes given.
        call("sethostname", name, len(name))
    except OSError as error:
        raise Refused("hostname-not-set", str(error), error.errno) from error


def _set_clock(now_ns: int, *, owns_machine: bool) -> dict[str, Any]:
    off = now_ns - time.time_ns()
    if abs(off) <= _CLOCK_TOLERANCE_NS or not owns_machine:
        return {"clock_stepped_ns": 0, "clock_off_ns": off}
    try:
        # SAFETY: the guest's own clock, set to the host's.
        time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)
    except OSError as error:
        raise Refused(
            "clock-not-set", f"The clock is off by {off / 1e9:.3f} s: {error.strerror}", error.errno
        ) from error
    return {"clock_stepped_ns": off, "clock_off_ns": 0}


def _put_machine_id(
    root: str, names: tuple[str, ...], machine_id: str, *, only_instead_of_a_file: bool = False
) -> None:
    directory = os.open(root, _NOT_THROUGH_LINKS)
    try:
        for name in names:
            below = os.open(name, _NOT_THROUGH_LINKS, dir_fd=directory)
            os.close(directory)
            directory = below
        present = _contents(directory, "machine-id", _MACHINE_ID_BYTES_MAX)
        if present == machine_id or (present is None and only_instead_of_a_file):
            return
        _put(directory, "machine-id", f"{machine_id}\n", 0o444)
    finally:
        os.close(directory)


def _put(directory: int, name: str, text: str, mode: int) -> None:
    """Put a file there, whatever it was."""
    draft = f".{name}.space"
    try:
        os.unlink(draft, dir_fd=directory)
    except FileNotFoundError:
        pass
    fd = os.open(draft, _AFRESH, mode, dir_fd=directory)
    try:
        data = text.encode("utf-8", "surrogateescape")
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)


def _contents(directory: int, name: str, bytes_max: int) -> str | None:
    """Return what a file says; None when there is none that is a regular file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.read(fd, bytes_max).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
