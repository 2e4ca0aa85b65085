"""Standing still for a checkpoint: every process but the agent is stopped, and goes on after it."""

from __future__ import annotations

import os
import signal
import time

from space.guest.groups import processes, send_signal

_STOP_S_MAX = 1.0
_ORDERLY_S = 0.5
"""After this the levels no longer wait for each other: a tree made deep on purpose is still stopped."""
_LOOK_AGAIN_S = 0.001
_SETTLE_S = 0.02
"""After this a process that waits in the kernel counts as standing; it may wait for a stopped child to execute."""
_STANDING = "TtZXx"
_KERNEL_THREADS_PARENT = 2


class Standstill:
    """Stops every process but the agent, and lets exactly those go on again.

    Parents are stopped before their children and go on after them, so that a shell never sees a child that is stopped.
    A process that was stopped already stays so.
    """

    def __init__(self) -> None:
        self._stopped: list[int] = []
        self.since: float | None = None
        """When everything was stopped (monotonic); None while it runs."""

    def begin(self) -> None:
        """Stop everything, from the top of the tree down, until a look finds nothing new and nothing that still runs.

        A level is touched only once the one above it stands: a parent that is still waiting for its child in the
        kernel would take the child's stop with it, and tell of it when it goes on.
        """
        if self.since is not None:
            return
        began = asked = self.since = time.monotonic()
        while (now := time.monotonic()) - began < _STOP_S_MAX:
            found = processes()
            orderly = now - began < _ORDERLY_S
            standing = _STANDING if now - asked < _SETTLE_S else _STANDING + "D"
            still_running = [pid for pid in self._stopped if pid in found and found[pid][1] not in standing]
            fresh = [] if still_running and orderly else self._next(found, one_level=orderly)
            # The kernel of a sandbox may lose a stop that meets a process while it executes a program.
            overdue = still_running if now - asked >= _SETTLE_S else []
            for pid in fresh + overdue:
                send_signal(pid, signal.SIGSTOP)
            self._stopped += fresh
            if fresh or overdue:
                asked = now
            elif still_running:
                time.sleep(_LOOK_AGAIN_S)  # A process in the middle of a system call stops at its end.
            else:
                return

    def _next(self, found: dict[int, tuple[int, str]], *, one_level: bool) -> list[int]:
        """Return who is to be stopped now, parents before children: the highest level alone, or all."""
        known, own, depths = set(self._stopped), os.getpid(), depths_of(found)
        fresh = sorted(
            (pid for pid in found if pid not in known and _may_stop(pid, found, own)), key=depths.__getitem__
        )
        return [pid for pid in fresh if depths[pid] == depths[fresh[0]]] if one_level else fresh

    def end(self) -> float:
        """Let everything go on that was stopped; return for how many seconds it stood still."""
        if self.since is None:
            return 0.0
        lasted = time.monotonic() - self.since
        self.since = None
        for pid in reversed(self._stopped):
            send_signal(pid, signal.SIGCONT)
        self._stopped.clear()
        return lasted


def _may_stop(pid: int, found: dict[int, tuple[int, str]], own: int) -> bool:
    parent, state = found[pid]
    if pid in (1, own, _KERNEL_THREADS_PARENT) or state in _STANDING:
        return False
    return parent != _KERNEL_THREADS_PARENT and (own == 1 or _descends(pid, own, found))


def _descends(pid: int, ancestor: int, found: dict[int, tuple[int, str]]) -> bool:
    """Outside a sandbox (in tests) only the agent's own descendants are its business."""
    seen = 0
    while pid in found and seen < len(found):
        pid = found[pid][0]
        if pid == ancestor:
            return True
        seen += 1
    return False


def depths_of(found: dict[int, tuple[int, str]]) -> dict[int, int]:
    """How deep in the tree each process is; parents are less deep than their children."""
    depths: dict[int, int] = {}
    for one in found:
        chain: list[int] = []
        pid = one
        while pid in found and pid not in depths and len(chain) <= len(found):
            chain.append(pid)
            pid = found[pid][0]
        level = depths.get(pid, 0)
        for member in reversed(chain):
            level += 1
            depths[member] = level
    return depths
