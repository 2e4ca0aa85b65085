"""Ends the command that uses most before the sandbox's memory runs out; of what is nobody's, the process that does.

When the memory of a machine is used up, all that its host can do is to end the machine. So the agent watches what is
left, the more often the less there is. When it is low, every process is made to stand still, so that there is time to
see who uses how much; the fattest command is killed, and the others go on when there is enough again. As with Linux's
own killer, who has an ``oom_score_adj`` counts as using that many thousandths of all memory more. What lies in a
file system in memory belongs to nobody, so killing does not always help: who is small is then left alone until there
is nothing left at all.
"""

from __future__ import annotations

import os
import signal
import time

from space.guest.groups import processes, send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from space.guest.groups import Group
    from space.guest.loop import Loop, Timer

    class Freeze(Protocol):
        """Makes all groups stand still or go on; False where it cannot."""

        def __call__(self, *, frozen: bool) -> bool: ...


_LOW_BYTES_MIN = 16 << 20
_LOW_PART = 16
"""Memory is low when less than this part of it is left."""
_HELPFUL_PART = 32
"""Only who uses at least this part of the memory is killed, until there is much less than nothing left."""
_GROWTH_BYTES_S = 2 << 30
"""Programs do not take memory faster than this on each processor."""
_LOOK_S_MIN, _LOOK_S_MAX = 0.01, 0.5
"""gVisor counts at most a hundred times a second."""
_RELEASE_S = 0.1
"""How long memory may still be counted after the last process that used it is gone."""
_DYING_S_MAX = 5.0
"""How long who is killed may take to be gone. Everybody stands still meanwhile."""
_LET_GO_MAX = 16
_FILE_BYTES_MAX = 64 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Guard:
    """Watches while there is anything that could be killed: ``groups`` says what; ``on_kill`` is told of each one that
    is going to be. ``terminals`` are those groups that may be shells which control jobs.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        groups: Callable[[], list[Group]],
        terminals: Callable[[], list[Group]],
        freeze: Freeze,
        on_kill: Callable[[Group], None],
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._terminals = terminals
        self._freeze = freeze
        self._on_kill = on_kill
        self._timer: Timer | None = None
        self.meminfo = "/proc/meminfo"
        self._meminfo_fd: int | None = None
        self._dying: list[_Dying] = []
        self._postponed: list[Callable[[], None]] = []
        self.holding = False
        """Whether everything stands still, so that nothing may be started."""
        self._to_go: list[int] = []
        """Who is still to be let go, the next one last."""
        self._hopeless: int | None = None
        """How much was left when nobody was found whose end would help."""

    def postpone(self, action: Callable[[], None]) -> None:
        """Do it once everything goes on."""
        self._postponed.append(action)

    def begin(self) -> None:
        """Something has been started: watch, if that is not done already."""
        if self._timer is None:
            self._timer = self._loop.call_at(time.monotonic(), self._look)

    def stand_still(self) -> None:
        """Watch no more until ``begin``, and hold nobody: somebody else is going to, for a checkpoint."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.holding:
            self._let_go()

    def _look(self) -> None:
        self._timer = None
        again_s = _LOOK_S_MIN
        try:
            again_s = self._decide()
        finally:
            if again_s is not None:
                self._timer = self._loop.call_at(time.monotonic() + again_s, self._look)

    def _decide(self) -> float | None:
        """Do what is to be done now; return after how long to look again, or None when there is nothing to watch."""
        groups = self._groups()
        total, left = self._read()
        watch = bool(groups and total)
        low = low_bytes(total)
        self._dying = [one for one in self._dying if one.still_counts()]
        if not watch or left >= (2 * low if self._dying else low):
            self._dying, self._hopeless = [], None
            if not self.holding:
                rate = _GROWTH_BYTES_S * (os.cpu_count() or 1)
                return min(max((left - low) / rate, _LOOK_S_MIN), _LOOK_S_MAX) if watch else None
            self._let_go()
        elif self._hopeless is None or left < self._hopeless - low // 4:
            self._make_room(total, left, low, groups)
        elif self.holding:
            self._let_go()
        return _LOOK_S_MIN

    def _make_room(self, total: int, left: int, low: int, groups: list[Group]) -> None:
        """Have everybody stand still, and kill who uses most, so that twice what is low will be left."""
        self._hold(groups)
        left_soon = left + sum(one.bytes for one in self._dying)
        if left_soon >= low:
            return  # Until they are gone.
        dying = [one.group for one in self._dying]
        parts = [part for group in groups for part in group.parts()]
        sizes = [(resident(part), part) for part in parts if part not in dying]
        least = total // _HELPFUL_PART if left > -low else 1
        helpful = [(size + adjustment(part) * total // 1000, size, part) for size, part in sizes if size >= least]
        helpful.sort(key=lambda one: one[0])
        while helpful and left_soon < 2 * low:
            _, size, group = helpful.pop()
            left_soon += size
            self._dying.append(_Dying(group, size))
            self._on_kill(group)
            group.kill()
        if not self._dying:
            self._hopeless = left

    def _hold(self, groups: list[Group]) -> None:
        """Make everything stand still but the agent, and what began meanwhile, too.

        There is no time to look at the whole tree. Who is frozen knows nothing of it; of signals a shell does: one
        whose job stops before itself would tell its user, so those on terminals go first, parents (which are older)
        before children.
        """
        self._to_go.clear()
        if self._freeze(frozen=True):
            self.holding = True
            return
        if not self.holding:
            self.holding = True
            for group in self._terminals():
                for pid in sorted(group.pids()):
                    send_signal(pid, signal.SIGSTOP)
        if os.getpid() == 1:
            try:
                # SAFETY: as the first process of a sandbox: every other process is the sandbox's user's.
                os.kill(-1, signal.SIGSTOP)
            except OSError:
                pass  # There is nobody.
        else:
            for group in groups:
                for pid in group.pids():
                    send_signal(pid, signal.SIGSTOP)

    def _let_go(self) -> None:
        """Let some more go on, children before their parents, so that no parent finds a child that is stopped; not
        all at once, or those who are first take all there is before the last one goes on.
        """
        if not self._to_go and not self._freeze(frozen=False):
            self._to_go = self._all()
        for _ in range(_LET_GO_MAX):
            if self._to_go:
                send_signal(self._to_go.pop(), signal.SIGCONT)
        if not self._to_go:
            self.holding = False
            postponed, self._postponed = self._postponed, []
            for action in postponed:
                self._loop.call_soon(action)

    def _all(self) -> list[int]:
        """Return everybody who may stand still, children after their parents."""
        from space.guest.standstill import depths_of

        depths = depths_of(found := processes())
        if os.getpid() != 1:  # Outside a sandbox (in tests) only what it has started is its business.
            found = {pid for group in self._groups() for pid in group.pids()} & found.keys()
        return sorted(found, key=lambda pid: depths[pid])

    def _read(self) -> tuple[int, int]:
        """Return how many bytes there are, and how many are left: less than none when it is more than there are.
        Zeros where the kernel does not say.
        """
        try:
            if self._meminfo_fd is None:
                self._meminfo_fd = os.open(self.meminfo, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(self._meminfo_fd, _FILE_BYTES_MAX, 0)
            total, left = _field(text, b"MemTotal:"), _field(text, b"MemAvailable:")
            if left == 0:  # gVisor goes on giving, and says no more than this.
                left = min(0, total - _field(text, b"AnonPages:") - _field(text, b"Cached:"))
        except (OSError, ValueError, IndexError):
            return 0, 0
        return total, left


class _Dying:
    """A group that is being killed, whose memory is as good as free until it should be and is not."""

    def __init__(self, group: Group, size: int) -> None:
        self.group = group
        self.bytes = size
        self._until = time.monotonic() + _DYING_S_MAX
        self._gone = False

    def still_counts(self) -> bool:
        if not self._gone and self.group.kill():
            self._gone = True
            self._until = min(self._until, time.monotonic() + _RELEASE_S)
        return time.monotonic() < self._until


def low_bytes(total: int) -> int:
    """Return how little memory may be left, of so much, before somebody is ended."""
    return max(_LOW_BYTES_MIN, total // _LOW_PART)


def resident(group: Group) -> int:
    """Return how many bytes the processes of a group have resident; what they share counts for each."""
    return sum(_number(pid, "statm", 1) for pid in group.pids()) * _PAGE_BYTES


def adjustment(group: Group) -> int:
    """Return the highest ``oom_score_adj`` (-1000 to 1000) of a group's processes."""
    return max((_number(pid, "oom_score_adj", 0) for pid in group.pids()), default=0)


def _number(pid: int, file: str, at: int) -> int:
    """Return one number of a file about a process; 0 when it is not there any more."""
    try:
        fd = os.open(f"/proc/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 256).split()[at])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(fd)


def _field(text: bytes, name: bytes) -> int:
    return int(text[text.index(name) + len(name) :].split(None, 1)[0]) * 1024
