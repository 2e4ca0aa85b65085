"""Becomes QEMU, for the driver: opens what that may use, lays the cable, gives up all rights.

``python -I -S launch.py SPEC`` as root, in the machine's network namespace and cgroup, with the channel as standard
input and output. SPEC is data of the driver's own, as `marshal` writes it for the same interpreter:

* ``files``: ``[[path, writable], …]``, opened as descriptors 3 and following; after them the socket for requests, bound
  to the path ``listen``; after that the tap device.
* ``network``: ``{tap, knobs, device, rules}`` as in `network`.
* ``argv``, ``user``: the program and the number of its user and group.
* ``file_bytes_max``: how large a file the program may write.
* ``jail``, ``kernel``: an empty directory to make its root directory on, and the one of the guest's kernel.
* ``patience_s``: how long it may take until the machine runs, with all the memory that it may have to load.
* ``pid_file``, ``reason_file``: where its number goes, and the beginning of its complaint when it does not start.

Returns 0 once the machine runs; its program then has no parent but init.

Every machine waits for this: so it knows the built-in part of the standard library alone, as importing the rest takes
longer than all that is done here, and the program begins before its cable is laid.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import select
import struct
import sys
import time

# What the module `socket` is made of, without its enumerations.
from _socket import AF_UNIX, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KERNEL = "/kernel"
"""Where the program finds the directory of the guest's kernel."""
REASON_BYTES_MAX = HEARD_BYTES_MAX = 2048
_FIRST = 3
_ABOVE = 64
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OPEN_FILES = 512
# Requests to QEMU's monitor (its docs/interop/qmp-spec.txt), which greets before it has looked at what it is to run.
_BEGIN, _STATUS, _GO_ON = (b'{"execute": "%s"}' % word for word in (b"qmp_capabilities", b"query-status", b"cont"))
_LOADS, _STANDS, _RUNS = b'"status": "inmigrate"', b'"status": "', b'"status": "running"'
_REFUSED = b'"desc": "'
_LOOK_AGAIN_S = 0.002
_ANSWER_S = 30.0
# See unshare(2), mount(2) and pivot_root(2).
_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_REC, _PRIVATE, _DETACH = 16384, 1 << 18, 2
_PIVOT_ROOT = 155  # on x86-64
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    with open(sys.argv[1], "rb") as file:  # noqa: PTH123
        # SAFETY: root's own file, in a directory of root's alone.
        spec: dict[str, Any] = marshal.load(file)  # noqa: S302
    opened = [_open(path, writable=writable) for path, writable in spec["files"]]
    opened += [_listen(spec["listen"]), _make_tap(spec["network"]["tap"])]
    complaints, complain = os.pipe()
    pid = os.fork()
    if not pid:
        _become(spec, opened, complain)
    os.close(complain)
    # Before anything else: from here on the driver finds the program and can end it.
    _write(spec["pid_file"], b"%d" % pid)
    try:
        # While the program begins. It does not run the machine before it is asked to, which is after this.
        _lay_cable(spec["network"])
        started, reason = _started(pid, spec, complaints)
    except OSError as error:
        started, reason = False, str(error).encode()
    if not started:
        _write(spec["reason_file"], reason)
    os._exit(not started)


def _open(path: str, *, writable: bool) -> int:
    # SAFETY: paths are the driver's own, in directories of root's alone; a link at the end is not followed.
    return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)


def _listen(path: str) -> int:
    listening = socket(AF_UNIX)
    # SAFETY: in the machine's bundle, which is root's alone: nobody else connects to it.
    listening.bind(path)
    listening.listen(1)
    return listening.detach()


def _make_tap(name: str) -> int:
    """Make the tap device, which is there as long as the program has it open."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    # SAFETY: this process is in the machine's own network namespace, where the device is made.
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    return tap


def _lay_cable(network: dict[str, Any]) -> None:
    """Connect the tap device to the link."""
    running = [_run(["ip", "-batch", "-"], network["device"]), _run(["nft", "-f", "-"], network["rules"])]
    for knob, value in network["knobs"].items():
        # SAFETY: fixed names, and what they are of the machine's own network namespace.
        with open(f"/proc/sys/{knob}", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
    if sum(os.waitpid(pid, 0)[1] for pid in running):
        raise OSError("Its cable could not be laid")


def _run(argv: list[str], text: str) -> int:
    """Start a program that reads this, which is less than a pipe holds; return its number."""
    source, sink = os.pipe()
    os.write(sink, text.encode())
    os.close(sink)
    actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
    try:
        # SAFETY: fixed words, in the machine's own network namespace and cgroup, whose end is its end, too.
        return os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
    finally:
        os.close(source)


def _become(spec: dict[str, Any], opened: list[int], complain: int) -> None:
    try:
        os.setsid()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for descriptor in [*opened, complain]]
        os.dup2(high.pop(), 2)
        for place, descriptor in enumerate(high, _FIRST):
            os.dup2(descriptor, place)
        os.closerange(_FIRST + len(high), _ABOVE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["file_bytes_max"], spec["file_bytes_max"]))
        _enter_jail(spec["jail"], spec["kernel"])
        user = str(spec["user"])
        # SAFETY: from here on it has a user of its own, no group, no capability, and no way to get any.
        drop = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]
        drop += ["--bounding-set=-all", "--no-new-privs", "--"]
        os.execvp(drop[0], [*drop, *spec["argv"]])  # noqa: S606
    except OSError as error:
        os.write(2, str(error).encode()[:REASON_BYTES_MAX])
    finally:
        os._exit(126)


def _enter_jail(place: str, kernel: str) -> None:
    """See no more of the host than its programs and the guest's kernel, both read-only; what was opened stays open."""
    # SAFETY: all of this is in mount, IPC and host-name namespaces of this process's own, from which nothing reaches
    # the host; the paths are the driver's own, in directories of root's alone.
    _call("unshare", _NEWNS | _NEWUTS | _NEWIPC)
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("jail", place, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=64k,mode=0755")
    for source, name, flags in (("/usr", "usr", 0), (kernel, KERNEL[1:], _NOEXEC)):
        target = f"{place}/{name}"
        os.mkdir(target, 0o755)  # noqa: PTH102
        _mount(source, target, None, _BIND)
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | flags)
    for name in ("bin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{place}/{name}")  # noqa: PTH211
    _mount(None, place, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    os.chdir(place)
    # The old root comes to lie over the new one, and is taken away there with all that is below it.
    _call("syscall", _PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _started(pid: int, spec: dict[str, Any], complaints: int) -> tuple[bool, bytes]:
    """Have the program run the machine as soon as it can; return whether it does, and what it has complained of."""
    reason = heard = b""
    deadline = time.monotonic() + spec["patience_s"]
    connection = socket(AF_UNIX)
    connection.settimeout(_ANSWER_S)
    connection.connect(spec["listen"])
    _ask(connection, _BEGIN + _STATUS)
    watched: list[socket | int] = [connection, complaints]
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(watched, [], [], left)
        if connection in ready:
            piece = _heard(connection)
            *lines, heard = (heard + piece)[-HEARD_BYTES_MAX:].split(b"\n")
            for line in lines:
                if outcome := _heed(connection, line):
                    return outcome[0], reason + outcome[1]
            if not piece:
                watched.remove(connection)  # it has ended, and what it had to say is there to be read
        if complaints in ready:
            if not (piece := os.read(complaints, REASON_BYTES_MAX)):
                break
            reason = (reason + piece)[:REASON_BYTES_MAX]
    os.waitpid(pid, os.WNOHANG)
    return False, reason


def _heed(connection: socket, line: bytes) -> tuple[bool, bytes] | None:
    """Ask on, as an answer suggests. Return whether the machine runs, and if not why, once that is sure."""
    if _RUNS in line:
        return True, b""
    if _REFUSED in line:  # and asked again it would say the same
        return False, line.partition(_REFUSED)[2].partition(b'"')[0]
    if _LOADS in line:
        time.sleep(_LOOK_AGAIN_S)
        _ask(connection, _STATUS)
    elif _STANDS in line:
        _ask(connection, _GO_ON + _STATUS)
    return None


def _ask(connection: socket, requests: bytes) -> None:
    try:  # noqa: SIM105  what that would import takes longer than all of this
        connection.sendall(requests)
    except ConnectionError:
        pass  # it has ended, which is heard next


def _heard(connection: socket) -> bytes:
    try:
        return connection.recv(REASON_BYTES_MAX)
    except ConnectionError:
        return b""


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
