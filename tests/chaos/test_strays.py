"""What an installation has left is removed whatever state it is in."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.model.ids import new_id
from tests.client import wait_until
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
    assert f"process {standing_still.pid}" in strays(*words)
    strays(*words, "--remove")
    assert standing_still.wait(TIMEOUT_S) == -9


def test_a_process_of_the_installation_is_found_and_removed_and_anothers_is_not(instance: str, tmp_path: Path) -> None:
    words = ["all", instance, str(tmp_path / "data"), str(tmp_path / "run")]
    program = [sys.executable, "-c", "import time; time.sleep(1000)", "space.supervise"]
    with contextlib.ExitStack() as processes:

        def start(whose: str) -> subprocess.Popen[bytes]:
            process = processes.enter_context(subprocess.Popen(program, env={"SPACE_INSTANCE": whose}))
            processes.callback(process.kill)
            return process

        ours, theirs = start(instance), start(instance + "x")
        wait_until(lambda: f"process {ours.pid}" in strays(*words), what="the process is listed")
        assert f"process {theirs.pid}" not in strays(*words)
        strays(*words, "--remove")
        assert ours.wait(TIMEOUT_S) == -9
        assert theirs.poll() is None


def strays(*words: str) -> list[str]:
    done = subprocess.run(
        [SCRIPTS / "strays", *words], stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S
    )
    return done.stdout.splitlines()
