"""A PostgreSQL server of the tests' own: a temporary directory, a Unix socket in it, an unprivileged user, no TCP."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

USER = "postgres"


def programs() -> Path | None:
    """Return where Debian has put the newest server's programs, or None when there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def unfit() -> str | None:
    """Return why no server can be started here, or None."""
    if programs() is None:
        return "the package postgresql is not installed"
    if os.geteuid() == 0 and USER not in {entry.pw_name for entry in pwd.getpwall()}:
        return f"there is no user {USER} to run PostgreSQL as"
    return None


@contextmanager
def serving() -> Generator[Path]:
    """Run a server and give the directory of its socket; gone without trace afterwards."""
    where = programs()
    assert where is not None
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    user = USER if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(directory, user)

    def run(*argv: str | Path) -> None:
        done = subprocess.run(
            [*map(str, argv)],
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd=directory,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    data, log = directory / "data", directory / "log"
    # Durability is not what is tested here.
    options = f"-c listen_addresses= -c unix_socket_directories={directory} -c fsync=off -c max_connections=200"
    try:
        run(where / "initdb", "-D", data, "-U", USER, "--auth=trust", "--no-sync", "--encoding=UTF8")
        run(where / "pg_ctl", "-D", data, "-l", log, "-o", options, "-w", "-t", "50", "start")
        try:
            yield directory
        finally:
            run(where / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(directory)
