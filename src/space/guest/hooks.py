"""Hooks: programs of the sandbox's own, run before it stands still for a checkpoint and before it goes on after it.

They are executables in ``pre-suspend.d`` and ``post-wake.d`` below ``/etc/space/hooks``, run one after the other in the
order of their names, as root, with an end set to each and to all of them. Nothing hangs on their success. Because they
run as root, only what nobody but root can have put there is run.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque

from space.guest.groups import MARK, send_signal
from space.guest.spawning import PATH_DEFAULT, Program, spawn
from space.guest.system import Identity, Refused
from space.protocol.messages import HOOKS_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.groups import Group
    from space.guest.loop import Loop, Timer
    from space.guest.processes import Processes

    Done = Callable[[list[dict[str, Any]]], None]

DIRECTORY = "/etc/space/hooks"
PRE_SUSPEND = "pre-suspend.d"
POST_WAKE = "post-wake.d"
EACH_S = 10.0
ALL_S = 30.0
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KILL = 9
_KILL_AGAIN_S = 0.005
_KILL_FOR_S = 5.0
_ROOT = Identity(0, 0, (), "root", "/root", "/bin/sh")


class Hooks:
    """The hooks of one directory. Without one there are none."""

    def __init__(self, directory: str | None, loop: Loop, processes: Processes) -> None:
        self._directory = directory
        self._loop = loop
        self._processes = processes
        self._running: _Round | None = None

    def run(self, event: str, env: dict[str, str], done: Done) -> None:
        """Run all hooks of ``event`` and call ``done`` with an entry for each: now, when there is none, or later."""
        self.cancel()
        found = find(self._directory, event) if self._directory is not None else []
        if not found:
            done([])
            return
        self._running = _Round(found, env, self._loop, self._processes, done)
        self._running.next()

    def cancel(self) -> None:
        """End what runs; nobody is told."""
        if self._running is not None:
            self._running.cancel()
            self._running = None


class _Round:
    """The hooks of one event, one after the other."""

    def __init__(
        self, found: list[tuple[str, str | None]], env: dict[str, str], loop: Loop, processes: Processes, done: Done
    ) -> None:
        self._waiting = deque(found)
        self._env = {"PATH": PATH_DEFAULT, "HOME": "/root", "USER": "root", "LOGNAME": "root", **env}
        self._loop = loop
        self._processes = processes
        self._done: Done | None = done
        self._until = time.monotonic() + ALL_S
        self._results: list[dict[str, Any]] = []
        self._name = ""
        self._pid = 0
        self._group: Group | None = None
        self._timer: Timer | None = None

    def next(self) -> None:
        """Begin the next hook, or report."""
        while self._waiting:
            self._name, path = self._waiting.popleft()
            left_s = min(EACH_S, self._until - time.monotonic())
            if left_s <= 0:
                self._add("timed-out")
            elif path is None or not self._start(path):
                self._add("refused")
            else:
                self._timer = self._loop.call_at(time.monotonic() + left_s, self._time_out)
                return
        done, self._done = self._done, None
        if done is not None:
            done(self._results)

    def cancel(self) -> None:
        self._waiting.clear()
        self._done = None
        if self._group is not None:
            self._time_out()

    def _start(self, path: str) -> bool:
        try:
            self._group = group = self._processes.groups.new(f"hook {self._name}")
        except OSError:
            return False
        env = {**self._env, MARK: group.mark} if group.mark is not None else dict(self._env)
        program = Program([path], env, "/", _ROOT)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        program.files = (null, null, null)
        try:
            self._pid = spawn(program, group)
        except (Refused, OSError):
            self._leave()
            return False
        finally:
            os.close(null)
        self._processes.on_end[self._pid] = self._ended
        return True

    def _ended(self, status: int) -> None:
        self._pid = 0
        if self._timer is not None and self._timer.action is not None:
            self._timer.cancel()
            code = os.waitstatus_to_exitcode(status)
            self._add("exited", code if code >= 0 else 128 - code)
            self._leave()
            self.next()

    def _time_out(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kill_on(time.monotonic() + _KILL_FOR_S)

    def _kill_on(self, until: float) -> None:
        """Kill all there is of the hook until nothing is left, then go on."""
        self._processes.reap()
        if self._pid:
            send_signal(self._pid, _KILL)
        gone = self._group is None or (self._group.kill() and not self._pid)
        if gone or time.monotonic() >= until:
            self._add("timed-out")
            self._leave()
            self.next()
        else:
            self._loop.call_at(time.monotonic() + _KILL_AGAIN_S, lambda: self._kill_on(until))

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._processes.linger(group)

    def _add(self, outcome: str, code: int | None = None) -> None:
        self._results.append({"name": self._name, "outcome": outcome, "exit": code})


def find(directory: str, event: str) -> list[tuple[str, str | None]]:
    """Return the hooks of an event: their names in order, each with its path, or None when it must not be run.

    A directory on the way that others than root may write to, or that is a link, has no hooks. Files that are not
    executable are no hooks.
    """
    at = _open_trusted(directory, event)
    if at is None:
        return []
    found: list[tuple[str, str | None]] = []
    try:
        for name in sorted(os.listdir(at))[:HOOKS_MAX]:
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
            if name.startswith(".") or (stat.S_ISREG(info.st_mode) and not info.st_mode & 0o111):
                continue
            trusted = stat.S_ISREG(info.st_mode) and _is_roots_alone(info)
            found.append((name, os.path.join(directory, event, name) if trusted else None))
    except OSError:
        pass  # Root is changing them at this very moment; what was found is run.
    finally:
        os.close(at)
    return found


def _open_trusted(directory: str, event: str) -> int | None:
    """Walk to the directory without following a link, looking at every step; None when one is not root's alone."""
    # In a test the directory lies below what everybody may write to; there the walk begins with itself.
    start, steps = ("/", directory.strip("/").split("/")) if directory == DIRECTORY else (directory, [])
    at = -1
    try:
        at = os.open(start, _OPEN)
        for step in [*steps, event]:
            _check_directory(at)
            below = os.open(step, _OPEN, dir_fd=at)
            os.close(at)
            at = below
        _check_directory(at)
    except OSError:
        if at >= 0:
            os.close(at)
        return None
    return at


def _check_directory(at: int) -> None:
    if not _is_roots_alone(os.fstat(at)):
        raise PermissionError


def _is_roots_alone(info: os.stat_result) -> bool:
    return info.st_uid == 0 and not info.st_mode & 0o022
