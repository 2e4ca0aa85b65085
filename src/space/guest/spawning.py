"""Start one program: exact arguments, environment and user, without ever copying the agent.

``posix_spawn`` is the kernel's cheap way (vfork); what it cannot set is set on this thread around the call: the user's
credentials, the working directory, and the group the new process is born into.
"""

from __future__ import annotations

import errno
import os
import signal
import stat

from space.guest.system import ActingAs, Identity, Refused, refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from space.guest.groups import Group

PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RESET_SIGNALS = tuple(
    signal.Signals[name]
    for name in (
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGPIPE",
        "SIGTERM",
        "SIGCHLD",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGXFSZ",
    )
)
"""Some the agent ignores, some whoever started it may have; a program starts with none of them ignored."""


class Program:
    """What to start, in full. ``terminal`` is a terminal's path, which becomes standard input, output and error and the
    controlling terminal; ``files`` are the descriptors for the three, -1 for the terminal where there is one. ``cwd``
    is a path that is entered as the user, or the descriptor of a directory that somebody was in already.
    """

    __slots__ = ("argv", "cwd", "env", "files", "identity", "terminal")

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | int, identity: Identity) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.identity = identity
        self.files: tuple[int, int, int] | None = None
        self.terminal: str | None = None


class _Exposed:
    """While entered, what this process starts is not spared by the kernel's memory killer, as the agent itself is."""

    fd: int | None = None

    def __enter__(self) -> None:
        if self.fd is not None:
            os.pwrite(self.fd, b"0", 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.fd is not None:
            os.pwrite(self.fd, _SPARED, 0)


_SPARED = b"-1000"
_exposed = _Exposed()


def spare_from_memory_killer() -> None:
    """Have the kernel's memory killer go for others first; programs started later are not spared. Needs root."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(fd, _SPARED, 0)
    except OSError:
        return  # Not root, in a test.
    _exposed.fd = fd


class _Inside:
    """While entered, the agent is in the directory of a descriptor, if it is one. It always ends in the root."""

    def __init__(self, cwd: str | int) -> None:
        self._cwd = cwd

    def __enter__(self) -> None:
        if isinstance(self._cwd, int):
            os.chdir(self._cwd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.chdir("/")


def environment(identity: Identity, *layers: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a program gets: what its user implies, then each layer over the last, unexpanded."""
    env = {
        "PATH": PATH_DEFAULT,
        "HOME": identity.home,
        "USER": identity.name,
        "LOGNAME": identity.name,
        "SHELL": identity.shell,
    }
    for layer in layers:
        env.update(layer)
    return env


def spawn(program: Program, group: Group) -> int:
    """Start it as the leader of a session of its own, inside ``group``, and return its pid. Raises ``Refused``."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if program.terminal is not None:
        # The leader of a session without a terminal gets the one it opens first as its controlling terminal.
        actions.append((os.POSIX_SPAWN_OPEN, 0, program.terminal, os.O_RDWR, 0))
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    if program.files is not None:
        actions += [(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in enumerate(program.files) if fd >= 0]
    argv = [os.fsencode(word) for word in program.argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in program.env.items()}
    # SAFETY: during the call this thread has the user's rights; all the agent's descriptors are close-on-exec.
    with _exposed, group, _Inside(program.cwd), ActingAs(program.identity, wholly=True):
        if isinstance(program.cwd, str):
            _enter_directory(program.cwd)
        path = find_program(program.argv[0], program.env.get("PATH", PATH_DEFAULT))
        try:
            return os.posix_spawn(
                os.fsencode(path),
                argv,
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=_RESET_SIGNALS,
            )
        except OSError as error:
            raise refused(error, program.argv[0]) from error


def find_program(name: str, path: str) -> str:
    """Return where a program is, looked up as this thread's user; raises ``Refused``."""
    if "/" in name:
        return name
    number = errno.ENOENT
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        try:
            if stat.S_ISREG(os.stat(candidate).st_mode):
                if os.access(candidate, os.X_OK):
                    return candidate
                number = errno.EACCES
        except OSError:
            continue
    what = "is not executable" if number == errno.EACCES else "is not on the PATH"
    raise Refused("permission-denied" if number == errno.EACCES else "not-found", f"{name!r} {what}", number)


def _enter_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        answer = refused(error, f"working directory {path}")
        # Whatever the reason, it is not the program's: "permission denied" alone would be taken for that.
        answer.failure["code"] = "no-such-directory"
        raise answer from error
