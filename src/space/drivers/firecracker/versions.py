"""Which releases of Firecracker are used. Pure, but for asking a program what it is."""

import re
from dataclasses import dataclass
from pathlib import Path

from space.drivers import programs
from space.errors import HostError

VERSION_S = 10.0
OLDEST = (1, 12, 0)
"""The first that lets a restored machine have another network device, which forks need where names differ."""
BROKEN = {(1, 16, 0): "its guests lose their channel (vsock) when they are restored"}
_FOUND = re.compile(r"^(?:Firecracker|Jailer) v(\d{1,4})\.(\d{1,4})\.(\d{1,4})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Programs:
    """A directory with the two programs of one release: ``firecracker`` and ``jailer``."""

    directory: Path

    @property
    def firecracker(self) -> Path:
        return self.directory / "firecracker"

    @property
    def jailer(self) -> Path:
        return self.directory / "jailer"

    async def version(self) -> str:
        """Return the release. Raise `HostError` unless both are there, of one release, and that one can be used."""
        if not (self.firecracker.is_file() and self.jailer.is_file()):
            raise HostError(
                "Firecracker and its jailer are not installed on this host: put both, of one release, into one "
                "directory.",
                code="no-firecracker",
            )
        if self.firecracker.resolve().name != "firecracker":
            # The jailer calls the jail by it.
            raise HostError("The program behind firecracker's link must have that name, too.", code="no-firecracker")
        # SAFETY: the operator's own programs, which say what they are and end.
        found = [
            parse(await programs.check([str(one), "--version"], timeout_s=VERSION_S))
            for one in (self.firecracker, self.jailer)
        ]
        if found[0] != found[1]:
            raise HostError("Firecracker and its jailer are of different releases.", code="firecracker-version")
        return check(found[0])


def parse(output: bytes) -> tuple[int, int, int]:
    """Return the release that a program says it is."""
    match = _FOUND.search(output.decode(errors="replace"))
    if not match:
        raise HostError("What is installed as Firecracker does not say its release.", code="firecracker-version")
    major, minor, patch = (int(one) for one in match.groups())
    return major, minor, patch


def check(release: tuple[int, int, int]) -> str:
    """Return the release in its usual form. Raise `HostError`, saying why, when it is not to be used."""
    text = ".".join(str(number) for number in release)
    if release < OLDEST:
        oldest = ".".join(str(number) for number in OLDEST)
        raise HostError(
            f"Firecracker {text} is too old: install {oldest} or later, best 1.16.1 or later.",
            code="firecracker-version",
        )
    if reason := BROKEN.get(release):
        raise HostError(
            f"Firecracker {text} cannot be used, as {reason}: install a later one.", code="firecracker-version"
        )
    return text
