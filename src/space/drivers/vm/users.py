"""Users of virtual machines' programs: each machine has one that no other machine on the host has, of any driver and
any installation.

A machine's bundle names its user in the file ``user``; that the user is taken is a link in a directory of the whole
host, from the user's number to the bundle. Both are cleared by a reboot of the host, with the machines themselves.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

TAKEN = Path("/run/space-users")
FIRST, COUNT = 0x6000_0000, 0x0FFF_FFFF
"""Far above those that systems and containers give out."""
_FILE = "user"


def take(bundle: Path, taken: Path = TAKEN) -> int:
    """Return a user that is this bundle's alone until `give_back`. It has none yet, or one that it gives back."""
    give_back(bundle, taken)
    # SAFETY: root's alone, in a directory where only root makes anything.
    taken.mkdir(mode=0o700, exist_ok=True)
    while True:
        user = FIRST + secrets.randbelow(COUNT)
        # Written down before it is taken, so that what is taken can always be given back.
        (bundle / _FILE).write_text(str(user))
        with suppress(FileExistsError):
            (taken / str(user)).symlink_to(bundle)
            return user


def of(bundle: Path) -> int:
    """Return the bundle's user."""
    return int((bundle / _FILE).read_text())


def give_back(bundle: Path, taken: Path = TAKEN) -> None:
    """Let the bundle's user be anybody's, if it has one. Nothing of that user may run any more."""
    with suppress(OSError, ValueError):
        place = taken / str(of(bundle))
        if os.readlink(place) == str(bundle):  # noqa: PTH115 a path, and not what is there
            place.unlink()


def forget_lost(taken: Path = TAKEN) -> None:
    """Let users be anybody's whose bundles are gone, as when an installation was taken down. Nothing of them runs."""
    for place in taken.iterdir() if taken.is_dir() else ():
        if not place.exists():  # what it leads to is made before it, and removed after it
            place.unlink(missing_ok=True)
