"""`unpack-layer` on layers that would write where they may not, lie, break off, or have no end: refused with a word."""

import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.layers import (
    BLOCK,
    Entry,
    directory,
    entry,
    file,
    link,
    make_root,
    refused,
    run,
    symlink,
    tar,
    tree,
    unpack,
    unpack_bytes,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


# --- names that lead out


def test_an_absolute_name_counts_from_the_root_of_the_tree(root: Path, tmp_path: Path) -> None:
    unpack(root, file("/abs", "1"), file("//etc//./x", "2"), file(f"{tmp_path}/outside/kept", "3"))
    assert (root / "abs").read_text() == "1"
    assert (root / "etc/x").read_text() == "2"
    assert (tmp_path / "outside/kept").read_text() == "kept"


@pytest.mark.parametrize(
    "name", ["..", "../outside/kept", "a/../b", "a/..", "/../x", ".wh.../x", "a/../../outside/kept"]
)
def test_a_name_that_leads_upwards_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    if name.startswith(".wh"):
        unpack(root, file(name))
    else:
        told = refused(root, [file("first", "kept"), file(name, "x")])
        assert (told["code"], told["path"]) == ("unsafe-path", name)
    assert (tmp_path / "outside/kept").read_text() == "kept"
    assert not (root / "b").exists()


@pytest.mark.parametrize(
    "entries",
    [
        [file(".space", "x")],
        [file(".space/bin/python3", "x")],
        [file("./.space/x", "x")],
        [directory(".space/lib")],
        [symlink(".space", "elsewhere")],
        [file(".wh..space")],
        [file(".space/.wh..wh..opq")],
        [symlink("a", ".space"), file("a/x", "x")],
        [symlink("a", "/etc/../.space/lib"), directory("etc"), file("a/x", "x")],
        [file("x", "x"), link(".space", "x")],
    ],
)
def test_what_is_below_the_runtimes_place_is_refused(root: Path, entries: list[Entry]) -> None:
    (root / ".space/lib").mkdir(parents=True)
    (root / ".space/lib/kept").write_text("kept")
    before = tree(root / ".space")
    assert refused(root, entries)["code"] == "unsafe-path"
    assert tree(root / ".space") == before


def test_the_runtimes_place_may_be_named_and_is_not_hidden_with_everything_else(root: Path) -> None:
    (root / ".space").mkdir(mode=0o755)
    (root / ".space/kept").write_text("kept")
    (root / "old").touch()
    told = unpack(root, directory(".space", mode=0o777, uid=5), file(".wh..wh..opq"), file("sub/.space/fine", "x"))
    assert told["skipped"] == 2
    assert (root / ".space").stat().st_uid == 0
    assert tree(root) == {
        ".space": "directory",
        ".space/kept": "kept",
        "sub": "directory",
        "sub/.space": "directory",
        "sub/.space/fine": "x",
    }


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE])
@pytest.mark.parametrize("name", ["device", "dev/null"])
def test_a_device_node_is_refused(root: Path, kind: bytes, name: str) -> None:
    told = refused(root, [entry(name, kind, devmajor=1, devminor=3)])
    assert (told["code"], told["path"]) == ("device-in-template", name)
    assert tree(root) == {}


def test_what_lies_under_another_mount_is_left_out_and_counted(root: Path) -> None:
    for name in ("mounted", "keep"):
        (root / name).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", root / "mounted"], check=True)
    try:
        (root / "mounted/file").write_text("kept")
        told = unpack(
            root,
            *(directory("mounted", mode=0o700), file("mounted/file", "x"), file("mounted/a/b", "x")),
            *(symlink("link", "mounted"), file("link/new", "x"), file(".wh.mounted"), file("mounted", "x")),
            *(file(".wh..wh..opq"), file("keep/x", "x")),
        )
        assert told["skipped"] == 7
        assert tree(root / "mounted") == {"file": "kept"}
        assert refused(root, [link("hard", "mounted/file")])["code"] == "unsafe-path"
    finally:
        subprocess.run(["umount", root / "mounted"], check=True)
    assert set(tree(root)) == {"mounted", "link", "keep", "keep/x"}


# --- archives that are none


def test_an_empty_archive_changes_nothing_and_what_follows_the_end_is_read(root: Path) -> None:
    assert unpack(root)["entries"] == 0
    assert unpack_bytes(root, bytes(1024))["entries"] == 0
    assert unpack_bytes(root, tar([file("a", "a")]) + b"x" * (4 << 20))["entries"] == 1


def test_an_archive_without_an_end_mark_is_whole_when_its_last_file_is(root: Path) -> None:
    data = tar([file("a", "a" * 600)])
    unpack_bytes(root, data[: 3 * BLOCK])
    assert (root / "a").read_text() == "a" * 600


WHOLE = tar([file("a", "a" * 5000), file("long" * 60, "b"), file("c", b"c" * 3000)])


@pytest.mark.parametrize("length", [0, 1, 511, 513, 1000, 5000, 5 * BLOCK, 11 * BLOCK + 3, 12 * BLOCK, 13 * BLOCK + 7])
def test_a_truncated_archive_is_refused(root: Path, length: int) -> None:
    assert refused(root, WHOLE[:length])["code"] == "not-an-archive"


@pytest.mark.parametrize("place", [0, 150, 11 * BLOCK + 5, 11 * BLOCK + 150])
def test_a_damaged_header_is_refused_and_not_taken_for_the_end(root: Path, place: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= 0x55
    assert refused(root, bytes(data))["code"] == "not-an-archive"


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08" + bytes(2000), b"x" * 2000, b"\xff" * 512])
def test_what_is_no_archive_is_refused(root: Path, data: bytes) -> None:
    assert refused(root, data)["code"] == "not-an-archive"


def header(name: str, kind: bytes, **fields: int | bytes) -> bytes:
    """A header with numbers as they stand, and the right sum."""
    member = entry(name, kind)
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    places = {"mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12)}
    for field, value in fields.items():
        at, length = places[field]
        text = value if isinstance(value, bytes) else tarfile.itn(value, length, tarfile.GNU_FORMAT)
        block[at : at + length] = text.ljust(length, b"\0")
    block[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(block[:512]))[0]
    return bytes(block[:512])


LIES = {
    "negative size": header("x", tarfile.REGTYPE, size=-512),
    "negative size of a directory": header("x", tarfile.DIRTYPE, size=-512),
    "a size that is no number": header("x", tarfile.REGTYPE, size=b"zzzzzzzzzzz"),
    "a size beyond the end": header("x", tarfile.REGTYPE, size=1 << 30),
    "a negative owner": header("x", tarfile.REGTYPE, uid=-1),
    "an owner that means no change": header("x", tarfile.REGTYPE, gid=2**32 - 1),
    "an unknown type": header("x", b"M"),
    "a volume's name": header("x", b"V"),
    "a header of a gigabyte": header("x", tarfile.XHDTYPE, size=1 << 30),
    "a long name of a gigabyte": header("x", tarfile.GNUTYPE_LONGNAME, size=1 << 30),
    "a header for nothing": header("x", tarfile.XHDTYPE, size=512) + b"11 path=abc".ljust(512, b"\0"),
    "a sparse file cut off": header("x", tarfile.GNUTYPE_SPARSE, size=512),
    "headers without end": header("x", tarfile.XHDTYPE, size=0) * 3000,
}


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_that_lies_is_refused(root: Path, lie: str) -> None:
    told = refused(root, LIES[lie] + (bytes(1024) if "cut off" not in lie and "beyond" not in lie else b""))
    assert told["code"] == "not-an-archive"


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "99999999999999999"}, None),
        ({"GNU.sparse.map": "0,600", "GNU.sparse.realsize": "600"}, None),
        ({"GNU.sparse.map": "0,100,50,100", "GNU.sparse.realsize": "600"}, "not-an-archive"),
        ({"GNU.sparse.map": "500,200", "GNU.sparse.realsize": "600"}, "not-an-archive"),
        ({"GNU.sparse.map": "-5,10", "GNU.sparse.realsize": "600"}, "not-an-archive"),
        ({"GNU.sparse.map": "x,y", "GNU.sparse.realsize": "600"}, "not-an-archive"),
        ({"GNU.sparse.map": "0,1", "GNU.sparse.realsize": str(1 << 50)}, "template-too-large"),
        ({"GNU.sparse.realsize": "x"}, "not-an-archive"),
        ({"size": "99999"}, "not-an-archive"),
        ({"size": "-512"}, "not-an-archive"),
        ({"size": "9" * 5000}, None),
        ({"uid": "-3"}, "not-an-archive"),
        ({"path": "a\0b"}, "unsafe-path"),
        ({"path": "/".join(["d" * 100] * 60)}, "template-too-large"),
        ({"path": "n" * 256}, "layer-not-unpacked"),
        ({"linkpath": "x"}, None),
    ],
    ids=str,
)
def test_extended_headers_that_lie_are_refused_or_mean_nothing(
    root: Path, records: dict[str, str], code: str | None
) -> None:
    data = tar([file("x", "text" * 25, pax_headers=records)])
    if code is not None:
        assert refused(root, data)["code"] == code
        return
    done = run(root, data)
    assert done.returncode in {0, 3}, done
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("mtime", ["nan", "inf", "-inf", "-5", "1e300", "99999999999999999999", "x"])
def test_a_time_that_makes_no_sense_is_the_beginning_or_the_end_of_times(root: Path, mtime: str) -> None:
    unpack(root, file("x", "x", pax_headers={"mtime": mtime}), directory("d", pax_headers={"mtime": mtime}))
    assert tree(root) == {"x": "x", "d": "directory"}


def test_any_archive_that_was_tampered_with_ends_with_a_word_and_inside_of_the_tree(root: Path, tmp_path: Path) -> None:
    """What is drawn is the same in every run."""
    drawn = random.Random(7)
    whole = tar(
        [
            *(directory("d"), file("d/f", "x" * 700), symlink("s", "d"), link("h", "d/f"), file("s/.wh.f")),
            *(file("n" * 150, "y", pax_headers={"SCHILY.xattr.user.a": "b"}), file("s/.wh..wh..opq")),
        ]
    )
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(drawn.randrange(1, 6)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        if drawn.random() < 0.5:  # with sums that are right, more is understood
            for place in range(0, len(data) - BLOCK, BLOCK):
                if data[place + 257 : place + 262] == b"ustar":
                    data[place + 148 : place + 156] = (
                        b"%06o\0 " % tarfile.calc_chksums(bytes(data[place : place + 512]))[0]
                    )
        target = root / "each"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        done = run(target, bytes(data))
        assert done.returncode in {0, 3}, done
        assert b"Traceback" not in done.stderr
        assert sorted(os.listdir(tmp_path)) == ["outside", "root"]  # noqa: PTH208
        assert os.listdir(root) == ["each"]  # noqa: PTH208


# --- limits


def test_more_entries_than_a_layer_may_have_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from space.guest import layers

    monkeypatch.setattr(layers, "ENTRIES_MAX", 3)
    source, sink = os.pipe()
    os.write(sink, tar([file(str(number)) for number in range(4)]))
    os.close(sink)
    with pytest.raises(layers.Unfit) as caught:
        layers.Layer(source, str(root)).unpack()
    os.close(source)
    assert caught.value.code == "template-too-large"
    assert len(tree(root)) == 3


def test_a_full_disk_is_told_as_one(root: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", root], check=True)
    try:
        told = refused(root, [file("big", b"x" * 200_000)])
    finally:
        subprocess.run(["umount", root], check=True)
    assert (told["code"], told["path"]) == ("disk-full", "big")


def test_memory_does_not_grow_with_the_archive(root: Path) -> None:
    """A hundred megabytes, and ten thousand files, in what an interpreter takes anyway and a little."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (96 << 20, 96 << 20))

    big = tar([file("big", bytes(100 << 20))])
    assert run(root, big, limit).returncode == 0
    many = tar([file(f"d{number % 100}/{number}", "x", pax_headers={"comment": "c" * 100}) for number in range(10_000)])
    assert run(root, many, limit).returncode == 0
    assert len(tree(root)) == 1 + 100 + 10_000
