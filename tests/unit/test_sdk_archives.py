"""Directories to tar and back; what comes out of a sandbox is hostile."""

import io
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space import HostError, InvalidRequest
from space.sdk.archives import Packer, Unpacker


def packed(directory: Path) -> bytes:
    packer, chunks = Packer(directory), []
    while chunk := packer.next_chunk():
        chunks.append(chunk)
    return b"".join(chunks)


def unpack(archive: bytes, target: Path, *, strip: int = 0, chunk: int = 65536) -> list[str]:
    target.mkdir(exist_ok=True)
    unpacker = Unpacker(target, strip=strip)
    try:
        for start in range(0, len(archive), chunk):
            unpacker.feed(archive[start : start + chunk])
    except BaseException:
        unpacker.abort()
        raise
    unpacker.finish()
    return unpacker.skipped


def made(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_tree_goes_through_and_comes_out_the_same(tmp_path: Path) -> None:
    """F1"""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a/b").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "🤣 +%20\n.txt").write_bytes(b"name")
    (source / ("long" * 60)).write_bytes(b"long name")
    (source / "a/b/large").write_bytes(os.urandom(3 * 1024 * 1024 + 17))
    (source / "a/run").write_bytes(b"#!/bin/sh\n")
    (source / "a/run").chmod(0o755)
    (source / "link").symlink_to("a/run")
    assert unpack(packed(source), target, chunk=1000) == []

    def tree(root: Path) -> dict[str, tuple[int, bytes | Path | None]]:
        return {
            str(p.relative_to(root)): (
                p.lstat().st_mode,
                p.readlink() if p.is_symlink() else p.read_bytes() if p.is_file() else None,
            )
            for p in root.rglob("*")
        }

    assert tree(target) == tree(source)


def test_other_programs_read_what_is_packed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/f").write_bytes(b"1234")
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path / "x"))) as archive:
        assert archive.getnames() == ["f"]
        assert archive.extractfile("f").read() == b"1234"


def test_leading_parts_can_be_dropped(tmp_path: Path) -> None:
    archive = made(
        (member("top", tarfile.DIRTYPE), b""), (member("top/f"), b"x"), (member("top/h", tarfile.LNKTYPE, "top/f"), b"")
    )
    unpack(archive, tmp_path / "t", strip=1)
    assert names(tmp_path / "t") == ["f", "h"]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/space-out"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    """F4"""
    with pytest.raises(InvalidRequest) as caught:
        unpack(made((member(name), b"x")), tmp_path / "t")
    assert caught.value.code == "unsafe-archive"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", ["/etc", "..", "../..", "a/../../.."])
def test_a_link_that_leads_out_is_left_out_and_named(tmp_path: Path, link: str) -> None:
    """F4"""
    assert unpack(made((member("l", tarfile.SYMTYPE, link), b""), (member("f"), b"x")), tmp_path / "t") == ["l"]
    assert names(tmp_path / "t") == ["f"]


def test_nothing_is_written_through_a_link_that_was_there_before(tmp_path: Path) -> None:
    """F4"""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t/l").symlink_to(outside)
    with pytest.raises(InvalidRequest):
        unpack(made((member("l/f"), b"x")), tmp_path / "t")
    assert names(outside) == []
    unpack(made((member("l"), b"replaced")), tmp_path / "t")
    assert (tmp_path / "t/l").read_bytes() == b"replaced"
    assert not (tmp_path / "t/l").is_symlink()


def test_a_hard_link_to_a_file_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        unpack(made((member("l", tarfile.LNKTYPE, "../../etc/passwd"), b"")), tmp_path / "t")


def test_devices_are_not_made_and_no_file_becomes_set_user_id(tmp_path: Path) -> None:
    device = member("null", tarfile.CHRTYPE)
    device.devmajor, device.devminor = 1, 3
    unpack(
        made((device, b""), (member("fifo", tarfile.FIFOTYPE), b""), (member("su", mode=0o6755), b"x")), tmp_path / "t"
    )
    assert names(tmp_path / "t") == ["su"]
    assert (tmp_path / "t/su").stat().st_mode & 0o7777 == 0o755


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = member("x", tarfile.XHDTYPE)
    info.size = 1 << 32
    with pytest.raises(InvalidRequest):
        unpack(info.tobuf() + bytes(1024 * 1024), tmp_path / "t")


@pytest.mark.parametrize(
    "damage", [lambda a: a[: len(a) // 2], lambda a: b"no archive at all" * 100, lambda a: a[:1500]]
)
def test_an_archive_that_is_not_whole_is_an_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    archive = made((member("a"), bytes(10_000)), (member("b"), bytes(10_000)))
    with pytest.raises(HostError) as caught:
        unpack(damage(archive), tmp_path / "t")
    assert caught.value.code == "archive-malformed"


@given(st.binary(max_size=4096))
def test_no_bytes_make_the_unpacker_hang_or_write_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    with suppress(HostError, InvalidRequest):
        unpack(data, root / "t")
    assert names(root) == ["t"]


@pytest.mark.parametrize(
    "links",
    [
        [("out", "later/.."), ("later", ".")],
        [("a/b/out", "later/../../.."), ("a/b/later", "../..")],
        [("out", "./later/./../"), ("later", ".")],
    ],
)
def test_links_that_lead_out_only_together_are_not_made(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    target = tmp_path / "target"
    through = links[0][0]
    archive = made(
        *((member(name, tarfile.SYMTYPE, link), b"") for name, link in links),
        (member(f"{through}/new/file"), b"x"),
    )
    with suppress(InvalidRequest):
        unpack(archive, target)
    assert names(tmp_path) == ["target"]
    assert all(path.resolve().is_relative_to(target) for path in target.rglob("*"))


def test_no_directory_is_made_through_a_link_that_leads_out(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "link").symlink_to(outside)
    for name in ("link/new/file", "link/new/deeper/file"):
        with pytest.raises(InvalidRequest) as caught:
            unpack(made((member(name), b"x")), target)
        assert caught.value.code == "unsafe-archive"
    assert names(outside) == []


def test_what_is_below_a_circle_of_links_is_refused_and_links_into_it_are_left_out(tmp_path: Path) -> None:
    circle = [(member("a", tarfile.SYMTYPE, "b"), b""), (member("b", tarfile.SYMTYPE, "a"), b"")]
    with pytest.raises(InvalidRequest):
        unpack(made(*circle, (member("a/file"), b"")), tmp_path / "target")
    for last in (member("c", tarfile.SYMTYPE, "a"), member("d", tarfile.LNKTYPE, "a")):
        target = tmp_path / last.name
        assert unpack(made(*circle, (last, b"")), target) == [last.name]
        assert names(target) == ["a", "b"]


def test_a_file_of_holes_cannot_claim_a_size_of_its_own(tmp_path: Path) -> None:
    info = member("sparse")
    info.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 20), "GNU.sparse.name": "sparse"}
    archive = info.tobuf(tarfile.PAX_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)
    with pytest.raises(InvalidRequest) as caught:
        unpack(archive, tmp_path / "target")
    assert caught.value.code == "unsafe-archive"


@pytest.mark.parametrize("headers", [{"GNU.sparse.map": "0,x"}, {"size": "9" * 30}, {"mtime": "9" * 400}])
def test_a_header_that_makes_no_sense_is_a_typed_error(tmp_path: Path, headers: dict[str, str]) -> None:
    info = member("file")
    info.pax_headers = headers
    with suppress(HostError, InvalidRequest):
        unpack(info.tobuf(tarfile.PAX_FORMAT) + bytes(2 * tarfile.BLOCKSIZE), tmp_path / "target")
