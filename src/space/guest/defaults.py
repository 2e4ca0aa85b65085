"""What commands get that is not said with each of them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from space.guest.system import Identity

_OF_A_USER = ("HOME", "USER", "LOGNAME", "SHELL")


class Defaults:
    """What ``configure`` said about every command that follows."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.trust: dict[str, str] = {}
        """Variables that say where the certificates are; everything else that is said of the environment wins."""
        self.workdir: str | None = None
        self.user = "root"

    def set_env(self, env: dict[str, str]) -> None:
        """Have every command that follows get these, and tell those that run of them."""
        from space.guest.identity import write_environment

        self.env = env
        if os.getpid() == 1:
            write_environment(env)

    def env_for(self, identity: Identity) -> dict[str, str]:
        """Return the configured variables; for another than the default user without those that are about that one."""
        if identity.name == self.user.partition(":")[0]:
            return self.env
        return {name: value for name, value in self.env.items() if name not in _OF_A_USER}

    def directory_for(self, identity: Identity) -> str:
        """Return where commands start that name no directory."""
        for path in (self.workdir, identity.home):
            if path and os.path.isdir(path):
                return path
        return "/"
