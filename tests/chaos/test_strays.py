"""What an installation has left is removed whatever state it is in."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.model.ids import new_id
from tests.installation import SCRIPTS

HIERARCHY = Path("/sys/fs/cgroup")
TIMEOUT_S = 30


@pytest.fixture
def instance() -> str:
    return "t" + secrets.token_hex(3)


@pytest.fixture
def standing_still(instance: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the group of a machine that is paused."""
    v1 = HIERARCHY / "freezer"
    name, frozen, thawed = ("freezer.state", "FROZEN", "THAWED") if v1.is_dir() else ("cgroup.freeze", "1", "0")
    group = (v1 if v1.is_dir() else HIERARCHY) / instance / new_id("sbx")
    if os.geteuid() != 0 or not os.access(group.parents[1], os.W_OK):
        pytest.skip("needs root and cgroups")
    group.mkdir(parents=True)
    if not (group / name).exists():
        group.rmdir()
        group.parent.rmdir()
        pytest.skip("cgroups cannot be frozen here")
    process = subprocess.Popen(["sleep", "1000"])
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / name).write_text(frozen)
        yield process
    finally:
        process.kill()
        with contextlib.suppress(OSError):
            (group / name).write_text(thawed)
        process.wait(TIMEOUT_S)
        for left in (group, group.parent):
            with contextlib.suppress(OSError):
                left.rmdir()


def test_a_machine_that_stands_still_is_removed_too(
    standing_still: subprocess.Popen[bytes], instance: str, tmp_path: Path
) -> None:
    words = ["all", instance, str(tmp_path / "data"), str(tmp_path / "run")]
    listed = subprocess.run([SCRIPTS / "strays", *words], stdout=subprocess.PIPE, text=True, check=True, timeout=30)
    assert f"process {standing_still.pid}" in listed.stdout.splitlines()
    subprocess.run([SCRIPTS / "strays", *words, "--remove"], check=True, timeout=TIMEOUT_S)
    assert standing_still.wait(TIMEOUT_S) == -9
