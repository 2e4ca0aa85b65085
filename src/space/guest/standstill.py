"""Standing still for a checkpoint, and going on after it in a world that may have changed."""

from __future__ import annotations

import base64
import binascii
import os
import signal
import time

from space.guest.groups import processes, send_signal
from space.guest.system import Refused, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLOCK_TOLERANCE_NS = 500_000_000
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
            still_running = any(found[pid][1] not in standing for pid in self._stopped if pid in found)
            fresh = [] if still_running and orderly else self._next(found, one_level=orderly)
            for pid in fresh:
                send_signal(pid, signal.SIGSTOP)
            self._stopped += fresh
            if fresh:
                asked = now
            elif still_running:
                time.sleep(_LOOK_AGAIN_S)  # A process in the middle of a system call stops at its end.
            else:
                return

    def _next(self, found: dict[int, tuple[int, str]], *, one_level: bool) -> list[int]:
        """Return who is to be stopped now, parents before children: the highest level alone, or all."""
        known, own, depths = set(self._stopped), os.getpid(), _depths(found)
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


def adjust(fields: dict[str, Any]) -> dict[str, Any]:
    """Take over the host's time, randomness and name for this guest, as far as each is given.

    Returns ``clock_stepped_ns``, by how much the clock was moved, and ``clock_off_ns``, by how much it still differs:
    the clock is only moved when it is off by more than half a second and the kernel lets the agent. As an
    ordinary process (in a test) the agent leaves the machine's clock and name alone.
    """
    if fields.get("entropy") is not None:
        _reseed(fields["entropy"])
    owns_machine = os.getpid() == 1
    if fields.get("hostname") is not None and owns_machine:
        name = fields["hostname"].encode()
        try:
            # SAFETY: the guest's own name; the length is that of the bytes given.
            call("sethostname", name, len(name))
        except OSError as error:
            raise Refused("hostname-not-set", str(error), error.errno) from error
    stepped = off = 0
    if fields.get("now_ns") is not None:
        off = fields["now_ns"] - time.time_ns()
        if abs(off) > _CLOCK_TOLERANCE_NS and owns_machine:
            try:
                # SAFETY: the guest's own clock, set to the host's.
                time.clock_settime_ns(time.CLOCK_REALTIME, fields["now_ns"])
            except OSError:
                pass  # The host sees clock_off_ns.
            else:
                stepped, off = off, 0
    return {"clock_stepped_ns": stepped, "clock_off_ns": off}


def _reseed(entropy: str) -> None:
    try:
        seed = base64.b64decode(entropy, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("invalid-request", "entropy: not base64") from None
    with open("/dev/urandom", "wb", buffering=0) as pool:
        pool.write(seed)


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


def _depths(found: dict[int, tuple[int, str]]) -> dict[int, int]:
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
