"""A guest that lets a program's time pass does not keep the program's client waiting."""

import asyncio

from space.node.overdue import overdue

SHORT_S = 0.02
PATIENCE_S = 20


async def test_what_is_overdue_is_given_up_once() -> None:
    given_up = asyncio.Event()
    calls: list[None] = []

    def give_up() -> None:
        calls.append(None)
        given_up.set()

    with overdue(SHORT_S, lambda: True, give_up, late_s=SHORT_S):
        await asyncio.wait_for(given_up.wait(), PATIENCE_S)
        again = asyncio.Event()
        with overdue(5 * SHORT_S, lambda: True, again.set, late_s=0):
            await asyncio.wait_for(again.wait(), PATIENCE_S)
    assert len(calls) == 1


async def test_time_that_the_machine_stands_still_does_not_count() -> None:
    given_up, looked = asyncio.Event(), asyncio.Event()
    looks: list[bool] = []

    def due() -> bool:
        looks.append(given_up.is_set())
        if len(looks) == 10:
            looked.set()
        return looked.is_set()

    with overdue(SHORT_S, due, given_up.set, late_s=0):
        await asyncio.wait_for(looked.wait(), PATIENCE_S)
        await asyncio.wait_for(given_up.wait(), PATIENCE_S)
    assert not any(looks)
    assert len(looks) >= 10


async def test_nothing_is_given_up_in_time_or_without_a_limit() -> None:
    given_up = asyncio.Event()
    for timeout_s in (SHORT_S, None):
        with overdue(timeout_s, lambda: True, given_up.set, late_s=0):
            pass
    later = asyncio.Event()
    with overdue(5 * SHORT_S, lambda: True, later.set, late_s=0):
        await asyncio.wait_for(later.wait(), PATIENCE_S)
    assert not given_up.is_set()
