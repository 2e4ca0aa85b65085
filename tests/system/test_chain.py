"""A life that goes through many snapshots: each machine is restored from what the one before it was, in full swing."""

from contextlib import ExitStack

import pytest

from space import Client, Command, Gap, Sandbox
from tests.client import wait_until
from tests.installation import Installation

TRAFFIC = "i=0; while :; do i=$((i+1)); echo $i; echo $i > beat.new; mv beat.new beat; done"
LINES = 200


def lines_of(command: Command) -> list[int]:
    """What the command says without a gap, from the first whole line on."""
    found: list[int] = []
    rest: bytes | None = None
    while len(found) < LINES:
        event = command.next_event(timeout_s=60)
        if isinstance(event, Gap):
            found, rest = [], None
            continue
        first, *more = ((rest or b"") + event.data).split(b"\n")
        if rest is not None and more:
            found.append(int(first))
        found += [int(line) for line in more[:-1]]
        rest = more[-1] if more else (None if rest is None else first)
    return found


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.long)])
def test_the_first_exec_answers_after_each_of_many_snapshots_of_snapshots(
    installation: Installation, rounds: int
) -> None:
    """L17: with output on its way over the channel all the while, none of which is lost or doubled."""
    with Client(installation.url, installation.key) as client, ExitStack() as stack:
        sandbox = stack.enter_context(Sandbox.create("base", client=client, memory_mib=128))
        command = sandbox.start(TRAFFIC)
        beat = 0
        for number in range(rounds):
            lines = lines_of(command)
            assert lines == list(range(lines[0], lines[0] + len(lines))), f"round {number}"
            snapshot = sandbox.snapshot()
            life = stack.enter_context(Sandbox.create(f"snapshot:{snapshot.id}", client=client))
            assert life.run("echo first").stdout == "first\n", f"round {number}"
            before, beat = beat, int(life.files.read_text("/home/user/beat"))
            assert beat > before, "it goes on from where it was"
            assert sandbox.run("echo on").stdout == "on\n", "so does its source"
            command = life.command(command.id)
            sandbox.delete()
            client.snapshots.delete(snapshot.id)
            sandbox = life
        wait_until(lambda: int(sandbox.files.read_text("/home/user/beat")) > beat, what="the next beat")
