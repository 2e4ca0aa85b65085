"""Start the agent: ``python agent.pyz [--cgroups DIRECTORY]``. Standard input and output are the channel."""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from space.guest.agent import Agent
from space.guest.groups import Groups
from space.guest.system import call

_PR_SET_CHILD_SUBREAPER = 36
_CHANNEL_FD_MIN = 10


def main() -> None:
    """Take the channel away from descriptors 0 to 2, so that nothing else can read or write it, and serve."""
    source = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FD_MIN)
    sink = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FD_MIN)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2) if os.getpid() == 1 else (0, 1):
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")
    os.umask(0o022)
    _protect()
    directory = sys.argv[2] if len(sys.argv) == 3 and sys.argv[1] == "--cgroups" else None
    agent = Agent(source, sink, Groups(directory))
    signal.set_wakeup_fd(agent.wake_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if os.getpid() == 1:
            signal.signal(number, signal.SIG_IGN)
    agent.run()


def _protect() -> None:
    """Orphans come to the agent, and the kernel's memory killer goes for others first."""
    try:
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("-1000")
    except OSError:
        pass  # Not root, in a test; as the first process of a sandbox it is.


if __name__ == "__main__":
    main()
