"""Processes are told apart for ever, and their ends are noticed."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from space.drivers import processes
from space.drivers.processes import Process


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def identified(child: "subprocess.Popen[bytes]") -> Process:
    found = processes.identify(child.pid)
    assert found is not None
    return found


def test_a_process_is_the_same_each_time_it_is_looked_at(sleeper: "subprocess.Popen[bytes]") -> None:
    assert identified(sleeper) == identified(sleeper)
    assert processes.is_alive(identified(sleeper))


def test_a_process_that_has_ended_is_not_alive_although_nobody_has_waited_for_it(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    process = identified(sleeper)
    sleeper.kill()
    deadline = time.monotonic() + 10
    while processes.is_alive(process):
        assert time.monotonic() < deadline
    assert processes.identify(sleeper.pid) is None


@pytest.mark.parametrize("other", [{"start_ticks": 1}, {"boot_id": "another"}])
async def test_another_process_of_the_same_number_is_neither_alive_nor_killed(
    sleeper: "subprocess.Popen[bytes]", other: dict[str, object]
) -> None:
    """L12."""
    mistaken = dataclasses.replace(identified(sleeper), **other)
    assert not processes.is_alive(mistaken)
    assert processes.open_process(mistaken) is None
    assert await processes.kill(mistaken, 1)
    assert sleeper.poll() is None


async def test_kill_returns_when_the_process_has_ended(sleeper: "subprocess.Popen[bytes]") -> None:
    process = identified(sleeper)
    assert await processes.kill(process, 10)
    assert not processes.is_alive(process)
    assert await processes.kill(process, 10)


async def test_an_end_is_told_once(sleeper: "subprocess.Popen[bytes]") -> None:
    told = asyncio.Event()
    pidfd = processes.open_process(identified(sleeper))
    assert pidfd is not None
    stop = processes.on_end(pidfd, told.set)
    sleeper.send_signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        await told.wait()
    stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)


async def test_a_watch_that_was_stopped_tells_nothing(sleeper: "subprocess.Popen[bytes]") -> None:
    told: list[int] = []
    pidfd = processes.open_process(identified(sleeper))
    assert pidfd is not None
    stop = processes.on_end(pidfd, lambda: told.append(1))
    stop()
    stop()
    assert await processes.kill(identified(sleeper), 10)
    assert told == []


async def test_waiting_for_a_process_that_does_not_end_gives_up(sleeper: "subprocess.Popen[bytes]") -> None:
    pidfd = processes.open_process(identified(sleeper))
    assert pidfd is not None
    assert not await processes.wait_ended(pidfd, 0.05)
    os.close(pidfd)


def test_processes_are_found_by_a_whole_word_of_their_command_line() -> None:
    word = f"--word-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(60)", word]) as child:
        deadline = time.monotonic() + 10
        while not (found := [process.pid for process, _ in processes.processes_with_argument(word)]):
            assert time.monotonic() < deadline
        assert found == [child.pid]
        assert list(processes.processes_with_argument(word[:-1])) == []
        child.kill()
