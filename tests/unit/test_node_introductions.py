"""What a guest is told of the present time, against a guest that finds it was told too late."""

import asyncio

import pytest

from space.errors import GuestError
from space.node.introductions import CLOCK_TRIES, awaken, configure
from space.protocol.frames import FrameType
from tests.unit.test_node_guests import commands, guest, message, scripted, tasks

__all__ = ["commands", "guest", "scripted", "tasks"]

RESOURCES = {"cpus": 1.0, "memory_mib": 512, "disk_mib": 512, "pids": 100}
DEFAULTS = {"env": {"A": "1"}, "workdir": "/", "user": "root"}
KNOWN = {
    "request": {"hostname": "sbx1", "env": {}, "resources": RESOURCES, "defaults": DEFAULTS},
    "machine_id": "0" * 32,
}
TOO_LATE = {"code": "clock-not-set", "message": "The clock is off by -0.951 s", "errno": 1}
TELLINGS = {"awaken": awaken, "configure": lambda guest: configure(guest, KNOWN)}


@pytest.mark.parametrize("op", TELLINGS)
async def test_a_message_that_was_long_on_its_way_is_sent_again_with_the_time_as_it_is_then(guest, scripted, op):
    telling = asyncio.ensure_future(TELLINGS[op](guest))
    number, first = await scripted.request()
    await scripted.write(message(FrameType.REPLY, number, error=TOO_LATE))
    number, second = await scripted.request()
    assert (first["op"], second["op"]) == (op, op)
    assert second["now_ns"] > first["now_ns"]
    assert second["entropy"] != first["entropy"]
    await scripted.write(message(FrameType.REPLY, number, ok={}))
    await telling


@pytest.mark.parametrize("op", TELLINGS)
async def test_a_clock_that_stays_wrong_is_an_error(guest, scripted, op):
    """L13"""
    telling = asyncio.ensure_future(TELLINGS[op](guest))
    for _ in range(CLOCK_TRIES):
        number, _ = await scripted.request()
        await scripted.write(message(FrameType.REPLY, number, error=TOO_LATE))
    with pytest.raises(GuestError) as caught:
        await telling
    assert caught.value.code == "clock-not-set"
