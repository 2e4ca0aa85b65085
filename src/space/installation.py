"""What lies on the disk of one installation, and which of its processes live: directories, locks, readiness.

Used by the supervisor and by what starts or examines an installation from outside; the processes need none of it.
"""

import fcntl
import http.client
import os
import pwd
import signal
import socket
import struct
import time
from pathlib import Path

from space import authority
from space.errors import HostError
from space.settings import Settings

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` on 64-bit Linux: type, whence, start, length, pid (see fcntl(2))."""
_PROBE_S = 1.0


def users(settings: Settings) -> dict[str, str]:
    """Process name → the user it runs as, in the order of starting."""
    return {
        "broker": "root",
        "gateway": settings.gateway_user,
        "node": settings.node_user,
        "api": settings.api_user,
    }


def supervisor_lock(settings: Settings) -> Path:
    return settings.run_dir / "locks" / "supervisor"


def process_lock(settings: Settings, name: str) -> Path:
    return settings.run_dir / "locks" / name


def prepare(settings: Settings) -> None:
    """Make every directory and lock file with its owner and mode. Needs root and the installation's system users."""
    owners = {name: _account(user) for name, user in users(settings).items()}
    root, gateway, node, api = (owners[name] for name in ("broker", "gateway", "node", "api"))
    directories = [
        (settings.data_dir, root, 0o755),
        (settings.api_dir, api, 0o700),
        (settings.node_dir, node, 0o700),
        (settings.broker_dir, root, 0o700),
        # Root's: the gateway may not exchange what it signs with, and everybody may read the certificate.
        (settings.gateway_dir, root, 0o711),
        (settings.audit_dir, gateway, 0o700),
        (settings.run_dir, root, 0o755),
        (settings.run_dir / "api", api, 0o755),
        # Set-gid: their sockets get the api's group, which alone may connect, without the two being in it.
        (settings.run_dir / "node", (node[0], api[1]), 0o2750),
        (settings.run_dir / "gateway", (gateway[0], api[1]), 0o2750),
        (settings.run_dir / "broker", root, 0o755),
        (settings.channels_dir, (root[0], node[1]), 0o710),
        (settings.links_dir, root, 0o755),
        (settings.run_dir / "log", root, 0o755),
        (settings.run_dir / "locks", root, 0o755),
    ]
    for path, (uid, gid), mode in directories:
        path.mkdir(parents=True, exist_ok=True)
        # SAFETY: the paths come from settings that root alone can write, and their parents belong to root.
        os.chown(path, uid, gid, follow_symlinks=False)
        path.chmod(mode)
    for name, (uid, gid) in {"supervisor": root, **owners}.items():
        path = settings.run_dir / "locks" / name
        path.touch(mode=0o600)
        os.chown(path, uid, gid, follow_symlinks=False)  # SAFETY: as above
    authority.ensure(settings.gateway_dir, settings.instance, *gateway)


def _account(user: str) -> tuple[int, int]:
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise HostError(f"There is no system user {user!r}: run scripts/up once.", code="no-such-user") from None
    return account.pw_uid, account.pw_gid


class Lock:
    """A file's record lock, held while this process lives; children do not inherit it, and the kernel knows its holder.

    Record locks go when the holder closes any descriptor of the file: it must not open it a second time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, wait_s: float) -> bool:
        """Take the lock, waiting for another holder to go; False when it did not in that time."""
        deadline = time.monotonic() + wait_s
        self._file = self._file if self._file is not None else os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True

    def holder(self) -> int | None:
        """The pid of the process that holds it, as the kernel says; None when it is free (or held by this process)."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
        finally:
            os.close(file)
        return pid if kind != fcntl.F_UNLCK else None


def end_holder(path: Path, first: signal.Signals, wait_s: float) -> None:
    """End the process that holds the lock at ``path``, if any: with ``first``, and after ``wait_s`` with SIGKILL."""
    lock = Lock(path)
    for number in (first, signal.SIGKILL):
        deadline = time.monotonic() + wait_s
        if (pid := lock.holder()) is None:
            return
        # SAFETY: the kernel names the holder of a lock that only this installation's processes can take.
        os.kill(pid, number)
        while time.monotonic() < deadline:
            if lock.holder() is None:
                return
            time.sleep(0.02)
    raise HostError(f"The process {lock.holder()} does not end.", code="not-stopped")


def accepts(address: Path | tuple[str, int]) -> bool:
    """Whether someone accepts connections there."""
    try:
        if isinstance(address, Path):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PROBE_S)
                probe.connect(str(address))
        else:
            socket.create_connection(address, timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def _readyz(settings: Settings) -> tuple[int, str]:
    host = "127.0.0.1" if settings.api_host in {"0.0.0.0", "::"} else settings.api_host  # noqa: S104
    connection = http.client.HTTPConnection(host, settings.api_port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    finally:
        connection.close()


def is_ready(settings: Settings) -> bool:
    """Whether the api answers that it, the node and the broker can serve."""
    try:
        return _readyz(settings)[0] == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def unready(settings: Settings) -> str:
    """A sentence or two on what is not ready, and where to look."""
    missing = [name for name in users(settings) if Lock(process_lock(settings, name)).holder() is None]
    if missing:
        return f"Not running: {', '.join(missing)}; see {settings.run_dir}/log/{missing[0]}.log."
    try:
        return f"/readyz says: {_readyz(settings)[1]}"
    except (OSError, http.client.HTTPException) as error:
        return f"The api does not answer ({error}); see {settings.run_dir}/log/api.log."
