"""Logs, the cache, and the programs that a build runs beside the node."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from space.errors import HostError, RequestError
from space.node.builds import children
from space.node.builds.cache import BuildCache
from space.node.builds.children import Limits
from space.node.builds.log import TEXT_CHARS_MAX, BuildLog, read_closed
from space.node.builds.reading import Reading
from space.node.builds.service import check_defaults
from tests.images import tar_of

LIMITS = Limits(file_bytes=1 << 20, memory_bytes=1 << 30, cpu_s=20)


# --- logs


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_output_becomes_lines_of_text_whatever_it_is_made_of(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = BuildLog(path, 1 << 20)
    for data in (b"one\ntw", b"o\n\xc3", b"\xa9\n\xff\n", b"x" * (TEXT_CHARS_MAX + 1), b"\nrest"):
        log.feed("stdout", data)
    log.feed("stderr", b"other\n")
    log.close()
    out = [line["text"] for line in lines(path) if line["stream"] == "stdout"]
    assert out == ["one", "two", "é", "\ufffd", "x" * TEXT_CHARS_MAX, "x", "rest"]
    assert [line["n"] for line in lines(path)] == list(range(log.lines))
    assert path.stat().st_size == log.bytes


def test_a_log_is_bounded_and_says_that_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = BuildLog(path, 5000)
    for _ in range(1000):
        log.write("info", "some text")
    log.close()
    assert path.stat().st_size <= 5000
    assert log.truncated
    assert "dropped" in lines(path)[-1]["text"]


async def test_a_reader_gets_whole_lines_from_where_it_wants_until_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = BuildLog(path, 1 << 20)
    log.write("info", "zero\none\ntwo")
    reader = log.read(1, follow=True)
    assert [json.loads(line)["text"] for line in (await anext(reader)).splitlines()] == ["one", "two"]
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.write("info", "three")
    assert json.loads(await waiting)["text"] == "three"
    log.close()
    assert [data async for data in reader] == []
    assert [json.loads(line)["n"] for line in b"".join([d async for d in read_closed(path, 2)]).splitlines()] == [2, 3]
    assert [data async for data in read_closed(path, 99)] == []
    assert [data async for data in log.read(99, follow=True)] == []


# --- the cache


class Shelf:
    """Snapshots that are only dropped."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.failing = False

    async def drop(self, snapshot: str) -> None:
        if self.failing:
            raise HostError("no")
        self.dropped.append(snapshot)


def cache_in(directory: Path) -> tuple[BuildCache, Shelf]:
    shelf = Shelf()
    return BuildCache(directory, shelf), shelf  # type: ignore[arg-type]


async def keep(cache: BuildCache, key: str, size: int = 10) -> str:
    async with cache.keeping(key, "sha256:t") as kept:
        kept.bytes = size
    return kept.snapshot


async def test_what_is_kept_is_found_by_its_key_also_by_the_next_node(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)
    snapshot = await keep(cache, "k")
    again, _ = cache_in(tmp_path)
    found = again.find("k")
    assert found is not None
    assert found.snapshot == snapshot
    assert again.is_own(snapshot)
    assert again.find("other") is None


async def test_a_disk_that_was_not_wholly_kept_is_dropped_and_never_found(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)
    with contextlib.suppress(HostError):
        async with cache.keeping("k", "sha256:t") as kept:
            assert cache.is_own(kept.snapshot), "known before it is there"
            raise HostError("no")
    assert cache.find("k") is None
    again, shelf = cache_in(tmp_path)
    await again.recover({kept.snapshot})
    assert shelf.dropped == [kept.snapshot]
    assert again.report() == []


async def test_what_is_not_there_any_more_is_forgotten(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)
    one, two = await keep(cache, "one"), await keep(cache, "two")
    again, shelf = cache_in(tmp_path)
    await again.recover({two})
    assert (again.find("one"), shelf.dropped) == (None, [])
    assert again.is_own(two)
    assert not again.is_own(one)


async def test_a_newer_disk_of_the_same_key_takes_the_place_of_the_older(tmp_path: Path) -> None:
    cache, shelf = cache_in(tmp_path)
    old, new = await keep(cache, "k"), await keep(cache, "k")
    found = cache.find("k")
    assert found is not None
    assert (found.snapshot, shelf.dropped) == (new, [old])


async def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache, shelf = cache_in(tmp_path)
    names = {key: await keep(cache, key) for key in ("a", "b", "c")}
    with cache.holding() as hold:
        first = cache.find("a")
        assert first is not None
        hold.take(first)
        assert [entry["id"] for entry in await cache.collect(max_bytes=15)] == [names["b"], names["c"]]
        await cache.forget_template("sha256:t")
        assert cache.find("a") is not None
    assert [entry["id"] for entry in await cache.collect(max_age_s=-1)] == [names["a"]]
    assert shelf.dropped == [names["b"], names["c"], names["a"]]


async def test_there_are_only_so_many_however_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space.node.builds.cache.ENTRIES_MAX", 2)
    cache, shelf = cache_in(tmp_path)
    names = [await keep(cache, str(number), 0) for number in range(4)]
    await cache.collect(max_bytes=1000)
    assert shelf.dropped == names[:2]


async def test_what_cannot_be_dropped_is_not_told_as_removed_and_not_begun_from(tmp_path: Path) -> None:
    cache, shelf = cache_in(tmp_path)
    snapshot = await keep(cache, "k")
    shelf.failing = True
    assert await cache.collect() == []
    assert cache.find("k") is None
    assert cache.is_own(snapshot), "it is the node's own as long as it is there"
    shelf.failing = False
    await cache.drop_unmade()
    assert shelf.dropped == [snapshot]


async def test_layers_of_one_repository_are_not_those_of_another_and_stay_while_one_is_pulled(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)
    for repository in ("host:5000/one", "host:5000/two"):
        (cache.blobs(repository) / "sha256" / ("a" * 64)).write_bytes(b"layer")
    assert cache.blobs("host:5000/one") != cache.blobs("host:5000/two")
    assert [entry["bytes"] for entry in cache.report()] == [5, 5]
    with cache.pulling():
        assert await cache.collect() == []
    assert len(await cache.collect()) == 2
    assert cache.report() == []


# --- the reader


async def test_a_pattern_that_takes_for_ever_is_given_up_and_holds_nobody_up(tmp_path: Path) -> None:
    """Matching it in a thread would hold the interpreter's lock all the while."""
    path = tmp_path / "context.tar"
    path.write_bytes(tar_of({"Dockerfile": "FROM scratch\n", ".dockerignore": "*a" * 40 + "b\n", "a" * 200: "x"}))
    common = {"dockerfile": "Dockerfile", "build_args": {}, "target": None, "ignore": [".dockerignore"], "configs": {}}
    reading = Reading(tmp_path, 1 << 20, cpu_s=1)
    ticks = 0
    asked = asyncio.ensure_future(reading.ask("plan", {**common, "archive": str(path)}))
    while not asked.done():
        await asyncio.sleep(0.02)
        ticks += 1
    with pytest.raises(RequestError) as caught:
        await asked
    assert caught.value.code == "context-too-large"
    assert ticks > 25


async def test_what_the_reader_refuses_is_an_error_with_its_line(tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(tar_of({"Dockerfile": "FROM scratch\nNONSENSE\n"}))
    asked = {"upload": str(upload), "plain": str(tmp_path / "plain"), "bytes_max": 1000}
    with pytest.raises(RequestError) as caught:
        await Reading(tmp_path, 1 << 20).ask(
            "outline", {**asked, "dockerfile": "Dockerfile", "build_args": {}, "target": None}
        )
    assert (caught.value.code, caught.value.details) == ("dockerfile-invalid", {"line": 2})


async def test_a_tar_that_breaks_off_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    inner = tar_of({"good": "1", "../bad": "2"})
    path = tmp_path / "context.tar"
    path.write_bytes(tar_of({"inner.tar": inner}))
    placing = {"missing": [], "inside": "", "name": None, "owner": None, "owner_within": None, "mode": None}
    step = {"exclude": [], "files": [], "archives": ["inner.tar"]}
    asked = {"step": step, "tops": [(str(path), "inner.tar")], "ignore": [], "placing": placing}
    with pytest.raises(RequestError) as caught:
        _ = [piece async for piece in Reading(tmp_path, 1 << 20).emit(asked)]
    assert caught.value.code == "archive-damaged"


# --- children


async def run(*argv: str, home: Path, timeout_s: float = 20, **options: Any) -> children.Finished:
    return await children.run(argv, home, LIMITS, timeout_s=timeout_s, output_bytes_max=1000, **options)


def alive(marker: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", marker], stdout=subprocess.PIPE, text=True, check=False).stdout
    return found.split()


async def test_a_child_gets_nothing_of_the_nodes_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_SECRET", "x")
    monkeypatch.setenv("SSL_CERT_FILE", "/evil")
    told = (await run("env", home=tmp_path)).output.decode().splitlines()
    assert {line.partition("=")[0] for line in told} <= {"PATH", "LC_ALL", "HOME", "TMPDIR", "PWD", "SHLVL", "_"}


async def test_a_childs_input_is_fed_and_its_output_bounded(tmp_path: Path) -> None:
    finished = await run("sh", "-c", "cat; head -c 100000 /dev/zero; echo no >&2; exit 3", home=tmp_path, stdin=b"abc")
    assert (finished.status, finished.complaint) == (3, "no\n")
    assert finished.output == b"abc" + bytes(997)


async def test_a_child_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    marker = f"sleep 98{os.getpid()}"
    with pytest.raises(TimeoutError):
        await run("sh", "-c", f"{marker} & {marker}", home=tmp_path, timeout_s=0.5)
    deadline = time.monotonic() + 5
    while alive(marker):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_child_writes_no_larger_file_than_it_may(tmp_path: Path) -> None:
    finished = await run("dd", "if=/dev/zero", f"of={tmp_path}/large", "bs=64k", "count=100", home=tmp_path)
    assert finished.status != 0
    assert (tmp_path / "large").stat().st_size <= LIMITS.file_bytes


def test_a_child_dies_with_the_node(tmp_path: Path) -> None:
    marker = f"sleep 97{os.getpid()}"
    text = f"""
import asyncio
from pathlib import Path
from space.node.builds import children
limits = children.Limits(1 << 20, 1 << 30, 20)
asyncio.run(children.run({marker.split()!r}, Path({str(tmp_path)!r}), limits, timeout_s=60, output_bytes_max=10))
"""
    parent = subprocess.Popen([sys.executable, "-c", text])
    try:
        deadline = time.monotonic() + 20
        while not alive(f"^{marker}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5
    while alive(f"^{marker}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_half_a_character_is_no_default() -> None:
    check_defaults({"labels": {"whole": "\U0001f600"}})
    with pytest.raises(RequestError) as refused:
        check_defaults({"labels": {"half": "\ud800"}})
    assert refused.value.code == "defaults-not-text"
