"""Records are kept in order, found again by what they are about, pruned, and told to who follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from space.egress import audit
from space.egress.audit import Audit, Filter, Record

WAIT_S = 10


@asynccontextmanager
async def writing(directory: Path) -> AsyncIterator[Audit]:
    one = Audit(directory)
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)  # it begins
    async with asyncio.timeout(WAIT_S):
        yield one
    running.cancel()
    await asyncio.wait([running])


def record(**fields: Any) -> Record:
    return Record("sbx1", "prj", "http", **fields)


async def test_records_come_back_in_order_and_page_by_page(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        for number in range(30):
            await one.add(record(port=number))
        last = await one.read(Filter(), limit=10)
        assert [row["port"] for row in last] == list(range(20, 30))
        assert [row["port"] for row in await one.read(Filter(), after=last[0]["n"], limit=3)] == [21, 22, 23]
        assert [row["port"] for row in await one.read(Filter(), before=last[0]["n"], limit=3)] == [17, 18, 19]


async def test_records_are_found_by_what_they_are_about_and_by_nothing_written_into_them(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        await one.add(record(host="a.example", decision="allow", secrets=["token"]))
        await one.add(record(host="b.example"))
        await one.add(Record("sbx2", "prj2", "dns", host="a.example' OR '1'='1"))
        for wanted, count in (
            (Filter(sandbox="sbx1"), 2),
            (Filter(project="prj2"), 1),
            (Filter(decision="allow"), 1),
            (Filter(host="b.example"), 1),
            (Filter(secret="token"), 1),
            (Filter(secret="to"), 0),
            (Filter(host="a.example' OR '1'='1"), 1),
            (Filter(sandbox="' OR 1=1 --"), 0),
        ):
            assert len(await one.read(wanted)) == count, wanted
            assert sum(wanted.fits(row) for row in await one.read(Filter())) == count


async def test_records_are_there_after_a_restart_and_in_the_export(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        await one.add(record(host="a.example\n{}"))
        await one.read(Filter())
    async with writing(tmp_path) as one:
        assert [row["host"] for row in await one.read(Filter())] == ["a.example\n{}"]
    lines = (tmp_path / "egress.jsonl").read_text().splitlines()
    assert [json.loads(line)["host"] for line in lines] == ["a.example\n{}"]  # one line a record, whatever is in it


async def test_who_follows_is_told_of_what_was_and_of_what_comes(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        for number in range(3):
            await one.add(record(port=number))
        await one.read(Filter())
        following = one.follow(Filter(sandbox="sbx1"), after=1)
        assert [(await anext(following))["port"] for _ in range(2)] == [1, 2]
        waiting = asyncio.create_task(anext(following))  # type: ignore[arg-type]
        await one.add(Record("sbx2", "prj2", "http", port=8))
        await one.add(record(port=9))
        assert (await waiting)["port"] == 9
        await following.aclose()


async def test_who_does_not_keep_up_is_told_so(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        await one.add(record(port=0))
        await one.read(Filter())
        following = one.follow(Filter())
        waiting = asyncio.create_task(anext(following))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for number in range(audit.FOLLOWER_QUEUE_MAX + audit.GROUP_MAX + 10):
            await one.add(record(port=number))
        await one.read(Filter())
        rows = [await waiting]
        while {"missed": True} not in rows:
            rows.append(await anext(following))
        assert rows[-1] == {"missed": True}
        assert (await anext(following))["n"] > 1
        await following.aclose()


async def test_only_so_many_are_kept_of_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEPT_PER_SANDBOX", 5)
    async with writing(tmp_path) as one:
        for number in range(20):
            await one.add(record(port=number))
        await one.add(Record("sbx2", "prj2", "http", port=99))
        await one.read(Filter())
        await asyncio.get_running_loop().run_in_executor(one._thread, one._prune)
        assert [row["port"] for row in await one.read(Filter(sandbox="sbx1"))] == list(range(15, 20))
        assert len(await one.read(Filter(sandbox="sbx2"))) == 1


async def test_what_one_sandbox_has_used_up_takes_nothing_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "KEPT_PER_SANDBOX", 5)
    monkeypatch.setattr(audit, "KEPT", 10)
    async with writing(tmp_path) as one:
        await one.add(Record("sbx2", "prj2", "http", port=99))
        for _ in range(10):
            for number in range(20):
                await one.add(record(port=number))
            await one.read(Filter())
            await asyncio.get_running_loop().run_in_executor(one._thread, one._prune)
        assert len(await one.read(Filter(sandbox="sbx2"))) == 1
        for number in range(20):
            await one.add(Record(f"sbx{number + 3}", "prj", "http"))
        await one.read(Filter())
        await asyncio.get_running_loop().run_in_executor(one._thread, one._prune)
        assert len(await one.read(Filter())) == 10


async def test_who_reads_does_not_wait_for_what_comes_meanwhile(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:

        async def flood() -> None:
            while True:
                await one.add(record(port=2))

        await one.add(record(port=1))
        flooding = asyncio.create_task(flood())
        assert (await one.read(Filter(), after=0, limit=1000))[0]["port"] == 1
        flooding.cancel()
        await asyncio.wait([flooding])


async def test_a_long_search_finds_everything_step_by_step_while_records_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "SEARCHED_AT_ONCE", 7)
    async with writing(tmp_path) as one:
        for number in range(100):
            await one.add(record(port=number, host=f"{number % 10}.example", secrets=["s"] if number == 4 else []))
        first = (await one.read(Filter(), limit=100))[0]["n"]
        assert [row["port"] for row in await one.read(Filter(host="3.example"), limit=4)] == [63, 73, 83, 93]
        assert [row["port"] for row in await one.read(Filter(host="3.example"), after=first, limit=3)] == [3, 13, 23]
        assert [row["port"] for row in await one.read(Filter(secret="s"))] == [4]
        assert [row["port"] for row in await one.read(Filter(host="0.example"), before=first + 1)] == [0]
        assert len(await one.read(Filter(sandbox="sbx1"), limit=1000)) == 100
        searching = [asyncio.create_task(one.read(Filter(host="none.example"))) for _ in range(20)]
        await asyncio.sleep(0)
        await one.add(record(port=1000))
        assert (await one.read(Filter(), limit=1))[0]["port"] == 1000
        assert await asyncio.gather(*searching) == [[]] * 20


async def test_what_was_queued_is_written_before_the_end(tmp_path: Path) -> None:
    async with writing(tmp_path) as one:
        await one.read(Filter())  # it is open
        for number in range(audit.GROUP_MAX * 3):
            await one.add(record(port=number))
    lines = (tmp_path / "egress.jsonl").read_text().splitlines()
    assert [json.loads(line)["port"] for line in lines] == list(range(audit.GROUP_MAX * 3))
