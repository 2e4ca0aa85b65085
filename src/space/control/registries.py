"""The hosts that the preset ``package-registries`` stands for: the operator's, or those that set-up has found."""

import functools
from pathlib import Path

from space.model.hosts import normalise_host
from space.settings import Settings

FILE_BYTES_MAX = 64 * 1024


def registries(settings: Settings) -> tuple[str, ...]:
    """Return them, as ``host`` or ``host:port``; a file that is not there names none."""
    if settings.package_registries is not None:
        return settings.package_registries
    try:
        status = settings.registries_file.stat()
    except OSError:
        return ()
    return _read(settings.registries_file, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, _inode: int, _changed_ns: int) -> tuple[str, ...]:
    try:
        with path.open() as file:
            lines = file.read(FILE_BYTES_MAX).splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    # A line that is no host would make the preset, and with it every policy that has it, invalid.
    return tuple(line for line in map(str.strip, lines) if normalise_host(line.rpartition(":")[0] or line))
