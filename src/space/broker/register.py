"""Whose each guest's address is: a symbolic link for each in one directory, which the gateway reads for every request.

``<guest's address>`` → ``<machine id>,<host_v4>,<host_v6>``. Nothing has to be asked, and nothing can be out of date
but by the moment between two system calls. An address without an entry is nobody's, and then nothing leaves.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from space.broker.addressing import Link


class Register:
    """The entries in ``directory``, which is root's alone to write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, links: Iterable[Link]) -> None:
        """Keep the entries of ``links`` and no others."""
        # SAFETY: below the run directory, which is root's; everybody may read it.
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in self.others(links):
            self.remove(name)

    def enter(self, link: Link, machine: str) -> None:
        """Let both addresses of a link be that machine's from now on. Repeatable; there is no moment in between."""
        target = f"{machine},{link.host_v4},{link.host_v6}"
        for name in _names(link):
            draft = self._directory / f".{name}"
            self.remove(draft.name)
            draft.symlink_to(target)
            draft.rename(self._directory / name)

    def strike(self, link: Link) -> None:
        """Let the addresses of a link be nobody's. Not there: success."""
        for name in _names(link):
            self.remove(name)

    def others(self, links: Iterable[Link]) -> list[str]:
        """Return what is there of no link of these, and what a crash has left half-done."""
        known = {name for one in links for name in _names(one)}
        there = self._directory.iterdir() if self._directory.is_dir() else ()
        return sorted({path.name for path in there} - known)

    def remove(self, name: str) -> None:
        """Remove one of `others`. Not there: success."""
        with suppress(FileNotFoundError):
            (self._directory / name).unlink()


def _names(link: Link) -> tuple[str, str]:
    return str(link.guest_v4), str(link.guest_v6)
