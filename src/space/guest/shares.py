"""How many processes each command may have, where the kernel limits every group by itself (version 1, as in gVisor).

What is free is divided among the groups that live, over and over: one alone may have all of it, several grow by their
share at a time. So all of them together stay within what the sandbox has, but for ``GRANT_MIN`` each, and within that
even when every one of them multiplies as fast as it can.
"""

from __future__ import annotations

import os
import time

GRANT_MIN = 32
"""What a group may grow by at a time while there is as much: starting a pipeline is not held up by many neighbours."""
LIMIT_MIN = 8
"""What a group may have although nothing is free: a command that looks what is wrong can be started."""
AGAIN_S = 0.05
AGAIN_S_MAX = 1.0


class Shares:
    """Divides ``total`` processes and threads among the control groups below ``directory``."""

    def __init__(self, directory: str, total: int) -> None:
        self.total = total
        self.again_s: float | None = None
        """After how long to divide again; None while there are not several."""
        self._directory = directory
        self._limits: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._divided_at = -AGAIN_S

    def add(self, name: str) -> None:
        """Give a new, empty group its share. In a crowd of new ones it is reckoned by what was counted last."""
        if time.monotonic() - self._divided_at < AGAIN_S:
            self._counts[name] = 0
            self._limit(name, 0, self._grant())
        else:
            self.divide(name)
        self.again_s = AGAIN_S if len(self._counts) > 1 else None

    def divide(self, new: str | None = None) -> None:
        """Count, and let every group that lives, and the ``new`` one, grow by its share."""
        before = self._counts
        self._counts = {}
        for name in self._names():
            count = self._read(name, "pids.current")
            if count or name == new:
                self._counts[name] = count or 0
        self._limits = {name: limit for name, limit in self._limits.items() if name in self._counts}
        grant = self._grant()
        for name, count in self._counts.items():
            self._limit(name, count, grant)
        self._divided_at = time.monotonic()
        if len(self._counts) < 2:
            self.again_s = None
        elif self._counts != before or self.again_s is None:
            self.again_s = AGAIN_S
        else:
            self.again_s = min(2 * self.again_s, AGAIN_S_MAX)

    def _grant(self) -> int:
        free = max(0, self.total - sum(self._counts.values()))
        return min(free, max(free // max(1, len(self._counts)), GRANT_MIN))

    def _limit(self, name: str, count: int, grant: int) -> None:
        limit = max(count + grant, LIMIT_MIN)
        # One that is being killed has 0, so that it cannot multiply, and keeps that.
        if self._limits.get(name) == limit or (name in self._limits and self._read(name, "pids.max") == 0):
            return
        self._limits[name] = limit
        try:
            fd = os.open(f"{self._directory}/{name}/pids.max", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, b"%d\n" % limit)
        except OSError:
            pass
        finally:
            os.close(fd)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._directory) if name[:1] == "c" and name[1:].isdigit()]
        except OSError:
            return []

    def _read(self, name: str, file: str) -> int | None:
        try:
            fd = os.open(f"{self._directory}/{name}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return int(os.read(fd, 64))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
