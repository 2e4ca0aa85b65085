"""Programs that root starts: what they are given, what they are not, and that none outlives its time."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from space.broker.mounts import mount_points
from space.drivers import processes, programs
from space.drivers.programs import Confinement
from space.errors import HostError

MEMBARRIER = 324
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces and filters")


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


async def test_output_and_status_are_returned() -> None:
    finished = await programs.run(
        python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), timeout_s=20
    )
    assert (finished.status, finished.output, finished.complaint) == (3, b"out\n", "err\n")


async def test_data_is_fed_to_standard_input() -> None:
    assert await programs.check(["cat"], stdin=b"fed", timeout_s=20) == b"fed"


async def test_a_program_that_does_not_read_what_it_is_fed_does_no_harm() -> None:
    assert (await programs.run(["true"], stdin=b"x" * 4096, timeout_s=20)).status == 0


async def test_output_beyond_a_mebibyte_is_read_and_dropped() -> None:
    finished = await programs.run(["head", "-c", "3000000", "/dev/zero"], timeout_s=20)
    assert (finished.status, len(finished.output)) == (0, programs.OUTPUT_BYTES_MAX)


async def test_check_fails_unless_the_status_is_zero() -> None:
    with pytest.raises(HostError, match="false failed with status 1"):
        await programs.check(["false"], timeout_s=20)


async def test_a_program_that_is_not_there_is_an_error_without_its_path() -> None:
    with pytest.raises(HostError) as caught:
        await programs.run(["/no/such/directory/program"], timeout_s=20)
    assert "/no/such" not in caught.value.message


async def test_a_program_over_its_time_is_killed_before_the_error_is_raised(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(HostError, match="did not end within"):
        await programs.run(python(code), timeout_s=1)
    assert time.monotonic() - began < 20
    assert processes.identify(int(mark.read_text())) is None


async def test_a_cancelled_call_has_killed_its_program_when_it_returns(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    running = asyncio.ensure_future(programs.run(python(code), timeout_s=60))
    deadline = time.monotonic() + 20
    while not mark.exists() or not mark.read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes.identify(int(mark.read_text())) is None


async def test_the_environment_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "value")
    assert (await programs.check(["env"], timeout_s=20)).decode().split() == [
        f"{k}={v}" for k, v in programs.ENVIRONMENT.items()
    ]


async def test_descriptors_are_not_inherited_even_when_they_could_be(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), 1)
        listed = await programs.check(["ls", "-l", "/proc/self/fd"], timeout_s=20)
    assert str(tmp_path).encode() not in listed


async def test_a_program_is_in_a_session_of_its_own() -> None:
    """A signal to the broker's terminal or group does not reach it."""
    code = "import os; print(os.getsid(0) == os.getpid())"
    assert await programs.check(python(code), timeout_s=20) == b"True\n"


async def test_many_programs_run_side_by_side() -> None:
    began = time.monotonic()
    finished = await asyncio.gather(*(programs.run(["sleep", "0.5"], timeout_s=20) for _ in range(20)))
    assert [one.status for one in finished] == [0] * 20
    assert time.monotonic() - began < 8


@ROOT
async def test_system_calls_taken_away_are_missing_and_all_others_there() -> None:
    code = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(324, 0, 0, 0), ctypes.get_errno(), l.syscall(39) > 0)"
    within = Confinement(without=(MEMBARRIER,))
    assert (await programs.run(python(code), timeout_s=20, within=within)).output == b"-1 38 True\n"
    several = Confinement(without=(MEMBARRIER, 39))
    assert (await programs.run(["true"], timeout_s=20, within=several)).status == 0
    assert os.getpid() > 0


@ROOT
async def test_mounts_are_the_programs_alone(tmp_path: Path) -> None:
    shown, hidden, fixed = tmp_path / "shown", tmp_path / "hidden", tmp_path / "fixed"
    shown.write_text("shown")
    target = tmp_path / "target"
    target.write_text("below")
    for directory in (hidden, fixed):
        directory.mkdir()
        (directory / "file").write_text("x")
    within = Confinement(over=((shown, target),), hidden=(hidden,), read_only=(fixed,))
    script = 'cat "$1/target"; ls "$1/hidden"; touch "$1/fixed/new" && echo written; mount -o remount,rw "$1/fixed" 2>/dev/null; cat "$1/fixed/file"'
    finished = await programs.run(["sh", "-c", script, "sh", str(tmp_path)], timeout_s=20, within=within)
    assert finished.output == b"shownx"
    assert target.read_text() == "below"
    assert sorted(path.name for path in hidden.iterdir()) == ["file"]
    (fixed / "still-writable-here").touch()
    assert not any(tmp_path in place.parents for place in mount_points())


@ROOT
async def test_a_cgroup_that_cannot_be_joined_keeps_the_program_from_running(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    within = Confinement(cgroups=(tmp_path / "no such group" / "cgroup.procs",))
    finished = await programs.run(["touch", str(mark)], timeout_s=20, within=within)
    assert finished.status == 125
    assert not mark.exists()


async def test_a_programs_version_is_asked_anew_once_it_is_another(tmp_path: Path) -> None:
    program = tmp_path / "program"
    version = programs.Version(program)
    with pytest.raises(HostError):
        await version.get()
    for said in ("release 1", "release 2"):
        (tmp_path / "next").write_text(f"#!/bin/sh\necho '{said}'\necho once >> {tmp_path}/asked\n")
        (tmp_path / "next").chmod(0o755)
        (tmp_path / "next").replace(program)
        assert [await version.get() for _ in range(3)] == [said] * 3
    assert (tmp_path / "asked").read_text() == "once\n" * 2
    program.write_text("#!/bin/sh\n")
    with pytest.raises(HostError, match="does not say"):
        await version.get()
