"""Templates on this host: which there are, that the same is made once, and that what was not finished is nothing."""

# ruff: noqa: ASYNC221 - a test has nothing else to do while a program runs

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from space.broker.defaults import Defaults
from space.broker.locks import exclusive
from space.broker.overlay import OverlayDisks
from space.broker.sealing import seal
from space.broker.templates import Template, Templates
from space.errors import HostFull, InvalidRequest, NotFound


@pytest.fixture
async def templates(tmp_path: Path) -> Templates:
    """Templates on a store of directories, which needs no mounts as long as there are no machines."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    disks = OverlayDisks(tmp_path / "disks")
    await disks.open()
    one = Templates(tmp_path / "templates", disks)
    await one.open()
    return one


def record(templates: Templates, hexdigest: str) -> Path:
    return templates._directory / f"{hexdigest}.json"


async def make(templates: Templates, tmp_path: Path, text: str, name: tuple[str, str] | None = None) -> Template:
    source = tmp_path / f"source-{text}"
    source.mkdir(exist_ok=True)
    (source / "file").write_text(text)
    if name:
        return await templates.add(source, *name, Defaults())
    async with templates.working() as working:
        root = await templates._disks.new_template(working)
        (root / "file").write_text(text)
        return await templates.keep(working, await seal(root, Defaults(), tidy=True, limit_s=30), Defaults())


def check_nothing(_: Template) -> None:
    return None


async def test_scratch_is_made_once_and_has_what_a_machine_needs(templates: Templates) -> None:
    for _ in range(2):
        await templates.make_scratch()
    (row,) = templates.listed()
    assert (row["name"], row["tag"], row["defaults"]) == (
        "scratch",
        "latest",
        {"env": {}, "workdir": "/", "user": "root"},
    )
    root = templates.root(templates.get(row["digest"]))
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
        *(".space", "dev", "etc", "etc/hostname", "etc/hosts", "etc/resolv.conf", "proc", "run", "sys", "tmp"),
        "tmp/.X11-unix",
    ]
    assert root.stat().st_mode & 0o7777 == 0o755
    assert await templates.sweep() == {}


async def test_scratch_of_an_earlier_version_stays_but_is_called_so_no_longer(
    templates: Templates, tmp_path: Path
) -> None:
    earlier = await make(templates, tmp_path, "earlier", ("scratch", "latest"))
    await templates.make_scratch()
    assert templates.get(earlier.digest) == earlier
    named = [row["digest"] for row in templates.listed() if row.get("name") == "scratch"]
    assert len(named) == 1
    assert named != [earlier.digest]


async def test_records_of_earlier_versions_are_read(templates: Templates) -> None:
    old = {
        "name": "base",
        "tag": "latest",
        "digest": "sha256:" + "ab" * 32,
        "defaults": {"env": {"A": "b"}, "workdir": "home", "user": "user"},
        "bytes": 4096,
        "imported_at": 1735689600.5,
    }
    record(templates, "ab" * 32).write_text(json.dumps(old))
    found = templates.get("sha256:" + "ab" * 32)
    assert (found.name, found.defaults.env, found.defaults.workdir) == ("base", {"A": "b"}, "home")
    assert templates.listed() == [{name: old[name] for name in ("name", "tag", "digest", "bytes", "defaults")}]


async def test_every_template_is_listed_and_only_the_newest_of_a_name_by_it(
    templates: Templates, tmp_path: Path
) -> None:
    first = await make(templates, tmp_path, "first", ("base", "latest"))
    second = await make(templates, tmp_path, "second", ("base", "latest"))
    unnamed = await make(templates, tmp_path, "third")
    rows = {row["digest"]: row for row in templates.listed()}
    assert list(rows) == [first.digest, second.digest, unnamed.digest]
    assert [row.get("name") for row in rows.values()] == [None, "base", None]
    assert [set(row) for row in (rows[first.digest], rows[unnamed.digest])] == [{"digest", "bytes"}] * 2
    await make(templates, tmp_path, "first", ("base", "latest"))
    assert [(row["digest"], row.get("name")) for row in templates.listed()][-1] == (first.digest, "base")


async def test_what_is_published_twice_is_one_template_and_keeps_its_name_and_bytes(
    templates: Templates, tmp_path: Path
) -> None:
    first, again = [await make(templates, tmp_path, "same") for _ in range(2)]
    assert first == again
    named = first.model_copy(update={"name": "base", "tag": "latest"})
    record(templates, first.digest.removeprefix("sha256:")).write_text(named.model_dump_json())
    assert await make(templates, tmp_path, "same") == named
    assert len(templates.all()) == 1


async def test_of_many_that_finish_the_same_template_at_once_all_get_it(templates: Templates, tmp_path: Path) -> None:
    made = await asyncio.gather(*(make(templates, tmp_path, "same") for _ in range(4)))
    assert len({one.digest for one in made}) == 1
    assert templates._disks.known_templates() == {made[0].digest.removeprefix("sha256:")}


async def test_a_name_that_is_none_leaves_no_template(templates: Templates, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        await make(templates, tmp_path, "text", ("NOT A NAME", "latest"))
    assert templates._disks.known_templates() == set()
    assert templates.all() == []


async def test_a_dropped_template_is_gone_and_dropping_it_again_succeeds(templates: Templates, tmp_path: Path) -> None:
    one = await make(templates, tmp_path, "text")
    for _ in range(2):
        await templates.drop(one.digest, check_nothing)
        assert templates._disks.known_templates() == set()
        with pytest.raises(NotFound):
            templates.get(one.digest)


async def test_a_template_that_somebody_needs_stays(templates: Templates, tmp_path: Path) -> None:
    one = await make(templates, tmp_path, "text")

    def check(template: Template) -> None:
        raise InvalidRequest(template.digest)

    with pytest.raises(InvalidRequest, match=one.digest):
        await templates.drop(one.digest, check)
    assert (templates.root(templates.get(one.digest)) / "file").read_text() == "text"


async def test_what_was_begun_and_not_finished_is_swept_and_nothing_else(templates: Templates, tmp_path: Path) -> None:
    kept = await make(templates, tmp_path, "kept")
    hexdigest = kept.digest.removeprefix("sha256:")
    disks = templates._disks
    for name in (".import-0123456789abcdef", ".publish-0123456789abcdef"):
        await disks.new_template(name)
    await disks.new_template(".publish-1")
    await disks.seal_template(".publish-1", "ef" * 32, 0)  # killed before it was recorded
    record(templates, "ef" * 32).with_suffix(".tmp").write_text("{")
    async with templates.working() as working:
        root = await disks.new_template(working)
        found = [".import-0123456789abcdef", ".publish-0123456789abcdef", "ef" * 32]
        assert await templates.sweep(dry_run=True) == dict.fromkeys(found, False)
        assert await templates.sweep() == dict.fromkeys(found, True)
        assert root.is_dir()
        assert await templates.sweep() == {}
    assert disks.known_templates() == {hexdigest}
    assert sorted(path.name for path in templates._directory.iterdir()) == [".lock", ".seal", f"{hexdigest}.json"]


@pytest.mark.parametrize("lock", [".lock", ".seal"])
async def test_while_another_process_is_at_work_nothing_is_swept(templates: Templates, lock: str) -> None:
    await templates._disks.new_template(".import-0123456789abcdef")
    async with exclusive(templates._directory / lock, wait_s=0, busy=""):
        assert await templates.sweep() == {}
    assert templates._disks.known_templates() == {".import-0123456789abcdef"}


async def test_a_publication_that_fails_leaves_nothing(templates: Templates) -> None:
    async def publish() -> None:
        async with templates.working() as working:
            root = await templates._disks.new_template(working)
            os.mknod(root / "device", 0o666 | 0o020000, os.makedev(1, 3))
            await seal(root, Defaults(), tidy=True, limit_s=30)

    with pytest.raises(InvalidRequest):
        await publish()
    assert templates._disks.known_templates() == set()


async def test_what_cannot_be_removed_keeps_nobody_from_removing_the_rest(templates: Templates) -> None:
    disks = templates._disks
    for name in (".publish-1", ".publish-2"):
        await disks.new_template(name)
    held = disks.template(".publish-1") / "held"
    held.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", held], check=True)
    try:
        assert await templates.sweep() == {".publish-1": False, ".publish-2": True}
    finally:
        subprocess.run(["umount", held], check=True)
    assert await templates.sweep() == {".publish-1": True}


async def test_without_room_for_scratch_all_else_is_there(templates: Templates, tmp_path: Path) -> None:
    class Full(OverlayDisks):
        async def new_template(self, name: str, of: str | None = None) -> Path:
            raise HostFull

    without = Templates(templates._directory, Full(tmp_path / "disks"))
    await without.make_scratch()
    assert without.listed() == []
    await templates.make_scratch()
    assert [row["name"] for row in templates.listed()] == ["scratch"]
