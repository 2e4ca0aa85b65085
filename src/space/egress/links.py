"""Whose link an address is: asked of the file system for every request, where the broker keeps it as long as it holds.

An entry is a symbolic link ``<links_dir>/<guest's address>`` with the target ``<machine>,<host_v4>,<host_v6>``.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# What links are made of (see broker/links.py): no server on any network has such an address.
LINKS_V4 = ipaddress.IPv4Network("198.18.0.0/15")
_LOCAL_PREFIX = 48


@dataclass(frozen=True, slots=True)
class Source:
    """Who is at the guest's end of a link, and what the host's end is called."""

    sandbox: str
    host_v4: str
    host_v6: str

    def is_link_address(self, text: str) -> bool:
        """Whether an address is the host's end of this link, or was that of another: of one that was suspended, say."""
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv4Address):
            return address in LINKS_V4
        return address in ipaddress.IPv6Network((self.host_v6, _LOCAL_PREFIX), strict=False)


class Links:
    """The links of this host."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def source(self, address: str) -> Source | None:
        """Return who has that address now; None: nobody, so nothing may come from it."""
        try:
            target = os.readlink(f"{self._directory}/{plain(address)}")  # noqa: PTH115 - for every request: half the time
        except (OSError, ValueError):
            return None
        sandbox, _, hosts = target.partition(",")
        host_v4, _, host_v6 = hosts.partition(",")
        return Source(sandbox, host_v4, host_v6)

    def sandboxes(self) -> set[str]:
        """Return all that have a link."""
        found: set[str] = set()
        for name in os.listdir(self._directory):  # noqa: PTH208
            source = self.source(name)
            if source is not None:
                found.add(source.sandbox)
        return found


def plain(address: str) -> str:
    """Return an address as the kernel gave it in the one form that entries have: no zone, no v4 inside v6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found)
