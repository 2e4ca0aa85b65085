"""Programs that are ended, whatever they were at."""

import asyncio
import os
from asyncio.subprocess import PIPE

import pytest

from space import children

FLOOD = "yes & yes >&2"


@pytest.mark.parametrize("read", [0, 1 << 16])
async def test_one_whose_output_nobody_reads_is_gone_at_once(read: int) -> None:
    for _ in range(10):
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", FLOOD, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert process.stdout is not None
        await process.stdout.read(read)
        async with asyncio.timeout(children.END_S - 1):
            await children.end(process)
        assert process.returncode == -9


async def test_whoever_holds_its_pipe_from_elsewhere_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "END_S", 0.2)
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "setsid sh -c 'echo $$; exec sleep 60' & wait", stdout=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    elsewhere = int(await process.stdout.readline())
    try:
        async with asyncio.timeout(5):
            await children.end(process)
    finally:
        os.kill(elsewhere, 9)
