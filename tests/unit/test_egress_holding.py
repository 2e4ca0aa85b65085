"""A sandbox holds so much of the gateway's memory and no more: those of its connections that hold most are ended."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import pytest

from space.egress import holding
from space.egress.holding import FEW, HELD_BYTES_MAX, Account, charge, note, too_much
from space.egress.wire import READ_BYTES_HIGH, accepted

WAIT_S = 10


@dataclass(eq=False)
class Held:
    held: int


@pytest.mark.parametrize(
    ("sizes", "ended"),
    [
        ([0] * 1000, []),
        ([HELD_BYTES_MAX] * (FEW - 1), []),  # few are not looked at
        ([HELD_BYTES_MAX // FEW] * FEW, []),
        ([1] * FEW + [HELD_BYTES_MAX], [HELD_BYTES_MAX]),
        ([1] * FEW + [HELD_BYTES_MAX, 9, HELD_BYTES_MAX + 1], [HELD_BYTES_MAX + 1, HELD_BYTES_MAX]),
    ],
)
def test_those_that_hold_most_go_until_the_rest_is_within_the_limit(sizes: list[int], ended: list[int]) -> None:
    accounts = {number: Held(size) for number, size in enumerate(sizes)}
    found = too_much(accounts)
    assert [accounts[number].held for number in found] == ended


async def test_what_is_made_for_a_connection_is_on_its_account_and_no_others() -> None:
    one, other = Account(), Account()
    kept: list[Held] = []

    async def work(account: Account, size: int) -> None:
        charge(account)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child(size))
        kept.append(Held(size))
        note(kept[-1])

    async def child(size: int) -> None:
        kept.append(Held(size * 10))
        note(kept[-1])

    await asyncio.gather(asyncio.create_task(work(one, 1)), asyncio.create_task(work(other, 2)))
    assert (one.held, other.held) == (11, 22)
    assert holding._account.get() is None
    kept.clear()
    assert (one.held, other.held) == (0, 0)


async def test_a_connection_that_nobody_reads_is_seen_to_hold_what_it_may() -> None:
    account = Account()
    charge(account)
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)  # noqa: FBT003 - of socket
    wire = await accepted(ours, None)
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(theirs, bytes(8 * READ_BYTES_HIGH)))
    async with asyncio.timeout(WAIT_S):
        while account.held <= READ_BYTES_HIGH:  # noqa: ASYNC110 - of what is asked nobody tells
            await asyncio.sleep(0)
    assert account.held < 3 * READ_BYTES_HIGH
    sending.cancel()
    wire.abort()
    theirs.close()
