"""`unpack-layer`, as a program of this machine on a tree of the test's own: a layer does what its specification says."""

import os
import random
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent import SOURCE
from tests.layers import (
    BLOCK,
    Entry,
    directory,
    entry,
    file,
    link,
    make_root,
    refused,
    symlink,
    tar,
    tree,
    unpack,
    unpack_bytes,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


# --- what a layer brings


def test_files_directories_and_links_are_as_the_layer_says(root: Path) -> None:
    told = unpack(
        root,
        directory("./", mode=0o711, uid=5, gid=6, mtime=1_600_000_000),
        directory("etc/", mode=0o1750, uid=1000, gid=1001),
        file("etc/passwd", "root", mode=0o640, uid=4_000_000_000, gid=7, mtime=1_700_000_000.5),
        file("bin/sudo", "elf", mode=0o6755, uid=0, gid=20),
        symlink("bin/link", "/etc/passwd", uid=1, gid=2),
        link("etc/again", "/etc/passwd"),
        entry("pipe", tarfile.FIFOTYPE, mode=0o622, uid=3, gid=4),
    )
    assert told == {"entries": 7, "bytes": 7, "hidden": 0, "skipped": 0, "xattrs_left_out": 0}

    def seen(name: str) -> tuple[int, int, int, float]:
        status = (root / name).lstat()
        return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime

    assert seen(".") == (0o711, 5, 6, 1_600_000_000)
    assert seen("etc") == (0o1750, 1000, 1001, 1_700_000_000)
    assert seen("etc/passwd") == (0o640, 4_000_000_000, 7, 1_700_000_000.5)
    assert seen("bin/sudo")[:3] == (0o6755, 0, 20)
    assert seen("bin/link")[1:] == (1, 2, 1_700_000_000)
    assert seen("pipe") == (0o622, 3, 4, 1_700_000_000)
    assert stat.S_ISFIFO((root / "pipe").lstat().st_mode)
    assert (root / "etc/again").samefile(root / "etc/passwd")
    assert seen("bin")[:3] == (0o755, 0, 0)  # not in the layer
    assert tree(root)["bin/link"] == "-> /etc/passwd"


def test_a_directory_has_its_time_though_something_was_made_in_it_later(root: Path) -> None:
    unpack(root, directory("a", mtime=1000), directory("a/b", mtime=2000), file("a/b/c", mtime=3000), file("a/d"))
    assert [(root / name).stat().st_mtime for name in ("a", "a/b", "a/b/c")] == [1000, 2000, 3000]


def test_a_set_group_bit_of_a_directory_gives_nothing_to_what_is_made_in_it(root: Path) -> None:
    unpack(root, directory("a", mode=0o2775, gid=50), directory("a/b", mode=0o755), file("a/c"), symlink("a/d", "c"))
    unpack(root, directory("a", mode=0o755, gid=50), file("a/e"), directory("a", mode=0o2755, gid=60), file("a/f"))
    for name in ("a/b", "a/c", "a/d", "a/e", "a/f"):
        assert (root / name).lstat().st_gid == 0
    unpack(root, file("x"), directory(".", mode=0o2755, gid=70), file("y"), file("a/g", gid=60))
    assert [(root / name).lstat().st_gid for name in ("x", "y", "a/g")] == [0, 0, 60]
    assert stat.S_IMODE((root / "a/b").stat().st_mode) == 0o755


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_may_be_long_and_need_not_be_text(root: Path, kind: int) -> None:
    odd = os.fsdecode(b"\xff\xfe \n\xc3\xa9")
    long = "/".join(["d" * 200] * 5)
    options = {} if kind == tarfile.GNU_FORMAT else {"pax_headers": {"hdrcharset": "BINARY"}}
    unpack(
        root,
        file(f"{odd}/{odd}", "odd"),
        file(f"{long}/" + "f" * 255, "long"),
        symlink("link", f"{long}/{odd}"),
        link("hard", f"{long}/" + "f" * 255),
        kind=kind,
        encoding="utf-8",
        **options,
    )
    assert (root / odd / odd).read_text() == "odd"
    assert (root / long / ("f" * 255)).read_text() == (root / "hard").read_text() == "long"
    assert os.readlink(root / "link") == f"{long}/{odd}"  # noqa: PTH115


def test_names_that_a_header_of_the_extended_kind_gives_as_they_are(root: Path) -> None:
    """GNU tar does so with names that are no text, without saying that they are none."""
    record = b"path=\xff\xfe/name\n"
    header = b"%d " % (len(record) + 3) + record
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, len(header)
    data = member.tobuf() + header.ljust(BLOCK, b"\0") + tar([file("short", "text")])
    unpack_bytes(root, data)
    assert (root / os.fsdecode(b"\xff\xfe") / "name").read_text() == "text"


def test_attributes_are_kept_where_the_kernel_takes_them_and_else_counted(root: Path) -> None:
    capability = b"\x01\x00\x00\x02\x00\x04\x00\x00" + bytes(12)
    headers = {
        "SCHILY.xattr.user.note": os.fsdecode(b"\xff\n=1"),
        "SCHILY.xattr.security.capability": capability.decode(),
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "label",
        "SCHILY.xattr.nonsense": "x",
        "SCHILY.fflags": "nodump",
    }
    told = unpack(
        root,
        file("file", "text", mode=0o4755, uid=1, pax_headers=headers),
        directory("dir", pax_headers={"SCHILY.xattr.user.note": "dir"}),
        symlink("link", "file", pax_headers={"SCHILY.xattr.user.note": "link"}),
    )
    assert os.getxattr(root / "file", "user.note") == b"\xff\n=1"
    assert os.getxattr(root / "dir", "user.note") == b"dir"
    names = set(os.listxattr(root / "file"))
    assert names <= {"user.note", "security.capability"}
    assert told["xattrs_left_out"] == 3 + 1 + ("security.capability" not in names)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o4755


@pytest.mark.parametrize("kind", ["posix", "gnu", "oldgnu", "posix0.1", "posix0.0"])
def test_holes_stay_holes(root: Path, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as out:
        for number in range(40):
            out.seek(number << 20)
            out.write(bytes([number + 1]) * 5000)
        out.truncate(100 << 20)
    kind, _, version = kind.replace("posix0", "posix:0").partition(":")
    words = ["tar", f"--format={kind}", "-S", *([f"--sparse-version={version}"] if version else [])]
    data = subprocess.run([*words, "-C", tmp_path, "-c", "sparse"], capture_output=True, check=True).stdout
    assert len(data) < 2 << 20
    unpack_bytes(root, data)
    made = root / "sparse"
    assert subprocess.run(["cmp", source, made], check=False).returncode == 0
    assert made.stat().st_size == 100 << 20
    assert made.stat().st_blocks * 512 < 2 << 20


def test_a_whole_system_comes_out_as_tar_unpacks_it(root: Path, tmp_path: Path) -> None:
    """A tree of this machine with all that tar itself keeps, through both."""
    source = tmp_path / "source"
    subprocess.run(["cp", "-a", "/usr/lib/python3.11/email", source], check=True)
    random_bytes = random.Random(1)
    for number in range(50):
        path = source / f"file-{number}"
        path.write_bytes(random_bytes.randbytes(random_bytes.randrange(200_000)))
        path.chmod(random_bytes.randrange(0o7777))
        os.chown(path, random_bytes.randrange(1 << 16), random_bytes.randrange(1 << 16))
    os.link(source / "file-1", source / "zz-again")
    data = subprocess.run(["tar", "--xattrs", "-C", source, "-c", "."], capture_output=True, check=True).stdout
    unpack_bytes(root, data)
    done = subprocess.run(["diff", "-r", "--no-dereference", source, root], capture_output=True, check=False)
    assert done.stdout == b""
    for path in source.rglob("*"):
        here, there = path.lstat(), (root / path.relative_to(source)).lstat()
        same = ("st_mode", "st_uid", "st_gid", "st_mtime", "st_nlink")
        assert [getattr(here, name) for name in same] == [getattr(there, name) for name in same], path


# --- what was there before


def test_later_entries_win_and_nothing_is_written_through_what_was_there(root: Path, tmp_path: Path) -> None:
    (root / "linked").write_text("below")
    os.link(root / "linked", root / "other")
    (root / "link").symlink_to(tmp_path / "outside/kept")
    unpack(
        root, file("linked", "one"), file("link", "two"), file("twice", "first"), file("twice", "second", mode=0o600)
    )
    assert tree(root) == {"linked": "one", "other": "below", "link": "two", "twice": "second"}
    assert (tmp_path / "outside/kept").read_text() == "kept"
    assert stat.S_IMODE((root / "twice").stat().st_mode) == 0o600


KINDS: dict[str, Callable[[str], list[Entry]]] = {
    "file": lambda name: [file(name, "new")],
    "directory": lambda name: [directory(name), file(f"{name}/new", "new")],
    "link": lambda name: [symlink(name, "elsewhere")],
    "hard": lambda name: [file("source", "new"), link(name, "source")],
    "pipe": lambda name: [entry(name, tarfile.FIFOTYPE)],
}
OUTCOMES = {
    "file": {"at": "new"},
    "directory": {"at": "directory", "at/new": "new"},
    "link": {"at": "-> elsewhere"},
    "hard": {"at": "new", "source": "new"},
    "pipe": {"at": "special"},
}


@pytest.mark.parametrize("same_layer", [False, True])
@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_anything_replaces_anything(root: Path, before: str, after: str, same_layer: bool) -> None:
    first, second = KINDS[before]("at"), KINDS[after]("at")
    if same_layer:
        unpack(root, *first, *second)
    else:
        unpack(root, *first)
        unpack(root, *second)
    expected = {**({"source": "new"} if before == "hard" else {}), **OUTCOMES[after]}
    assert tree(root) == expected


def test_a_directory_that_is_there_keeps_what_is_in_it_and_gets_the_new_rights(root: Path) -> None:
    unpack(root, directory("d", mode=0o700, uid=1), file("d/old", "old"))
    unpack(root, directory("d", mode=0o755, uid=2), file("d/new", "new"))
    assert tree(root) == {"d": "directory", "d/old": "old", "d/new": "new"}
    assert (stat.S_IMODE((root / "d").stat().st_mode), (root / "d").stat().st_uid) == (0o755, 2)


def test_a_deep_directory_can_be_replaced(root: Path) -> None:
    deep = "/".join(["d"] * 1500)
    unpack(root, file(f"{deep}/file", "x"), *(file(f"d/more-{number}/file") for number in range(20)))
    unpack(root, file("d", "flat"))
    assert tree(root) == {"d": "flat"}


# --- links


def test_a_hard_link_may_lead_to_what_an_earlier_layer_has_brought(root: Path) -> None:
    unpack(root, directory("usr/bin"), symlink("bin", "usr/bin"), file("usr/bin/tool", "tool", mode=0o755, uid=9))
    unpack(root, link("usr/again", "bin/tool"), symlink("soft", "nowhere"), link("hard-to-soft", "soft"))
    assert (root / "usr/again").samefile(root / "usr/bin/tool")
    assert (root / "usr/again").stat().st_uid == 9
    assert tree(root)["hard-to-soft"] == "-> nowhere"


def test_a_hard_link_to_itself_changes_nothing(root: Path) -> None:
    unpack(root, file("a/b", "text"), symlink("c", "a"), link("a/b", "a/b"), link("c/b", "a/b"))
    assert tree(root) == {"a": "directory", "a/b": "text", "c": "-> a"}


@pytest.mark.parametrize("target", ["missing", "a/missing/x", "a", "/", "../outside/kept", "dangling/x", ".space/x"])
def test_a_hard_link_that_leads_to_no_file_of_the_tree_is_refused(root: Path, target: str) -> None:
    (root / ".space").mkdir()
    (root / ".space/x").touch()
    told = refused(root, [directory("a"), symlink("dangling", "gone"), link("new", target)])
    assert (told["code"], told["path"].rpartition("/")[2] in {"new", "kept"}) == ("unsafe-path", True)
    assert "new" not in tree(root)
    assert "gone" not in tree(root)


def test_a_hard_link_cannot_replace_the_directory_it_leads_into(root: Path) -> None:
    assert refused(root, [file("a/b", "text"), link("a", "a/b")])["code"] == "unsafe-path"


def test_directories_behind_links_are_those_of_the_tree(root: Path, tmp_path: Path) -> None:
    """As in a system whose /lib is a link to usr/lib; an absolute link counts from the tree's own root."""
    (root / str(tmp_path)[1:] / "outside").mkdir(parents=True)
    unpack(
        root,
        *(
            directory("usr/lib"),
            symlink("lib", "usr/lib"),
            symlink("abs", "/usr/lib"),
            symlink("up", "../../usr/../lib"),
        ),
        *(file("lib/one", "1"), file("abs/two", "2"), file("up/three", "3"), file("abs/d/four", "4")),
        symlink("out", f"{tmp_path}/outside"),
        file("out/new", "contained"),
    )
    inside = {name: text for name, text in tree(root / "usr/lib").items() if name != "d"}
    assert inside == {"one": "1", "two": "2", "three": "3", "d/four": "4"}
    assert (root / str(tmp_path)[1:] / "outside/new").read_text() == "contained"
    assert os.listdir(tmp_path / "outside") == ["kept"]  # noqa: PTH208


def test_a_link_made_by_the_same_layer_does_not_lead_out(root: Path, tmp_path: Path) -> None:
    up = "/".join([".."] * 20)
    unpack(root, symlink("a", f"{up}{tmp_path}/outside"), file("a/new", "x"), symlink("b", ".."), file("b/c", "y"))
    assert os.listdir(tmp_path / "outside") == ["kept"]  # noqa: PTH208
    assert (root / str(tmp_path)[1:] / "outside/new").read_text() == "x"
    assert (root / "c").read_text() == "y"
    assert not (tmp_path / "c").exists()


def test_a_link_that_is_exchanged_meanwhile_is_looked_at_again(root: Path) -> None:
    unpack(
        root,
        *(directory("one"), directory("two"), symlink("at", "one"), file("at/first", "1")),
        *(symlink("at", "two"), file("at/second", "2"), directory("at"), file("at/third", "3")),
    )
    assert {name for name in tree(root) if "/" in name} == {"one/first", "two/second", "at/third"}


def test_a_dangling_link_on_the_way_gets_its_directory_in_the_tree(root: Path) -> None:
    unpack(root, symlink("at", "/gone/below"), file("at/file", "x"))
    assert (root / "gone/below/file").read_text() == "x"


@pytest.mark.parametrize(
    "entries",
    [
        [symlink("a", "b"), symlink("b", "a"), file("a/x")],
        [symlink("a", "a"), file("a/x")],
        [symlink("a", "a/a/a"), file("a/x")],
        [file("a", "text"), file("a/x")],
        [file("a", "text"), symlink("b", "a/.."), file("b/x")],
    ],
)
def test_a_path_through_a_circle_or_a_file_is_refused(root: Path, entries: list[Entry]) -> None:
    assert refused(root, entries)["code"] == "unsafe-path"


# --- whiteouts


def lower(root: Path) -> None:
    unpack(
        root,
        *(file("a", "a"), directory("d"), file("d/one", "1"), file("d/two", "2"), file("d/sub/three", "3")),
        *(symlink("link", "d"), directory("e"), file("e/four", "4")),
    )


def test_a_whiteout_hides_a_file_a_link_or_a_directory_with_all_in_it(root: Path) -> None:
    lower(root)
    told = unpack(root, file(".wh.a"), file("d/.wh.sub"), file(".wh.link"), file(".wh.never-was"), file(".wh.e"))
    assert told["hidden"] == 4
    assert tree(root) == {"d": "directory", "d/one": "1", "d/two": "2"}


def test_a_whiteout_through_a_link_hides_what_is_behind_it(root: Path) -> None:
    lower(root)
    unpack(root, file("link/.wh.one"))
    assert "d/one" not in tree(root)
    assert "d/two" in tree(root)


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_directory_has_only_what_its_own_layer_says_wherever_that_stands(root: Path, first: bool) -> None:
    lower(root)
    mark = [file("d/.wh..wh..opq")]
    own = [file("d/one", "new"), file("d/sub/five", "5"), directory("d/empty"), symlink("d/link", "x")]
    unpack(root, directory("d"), *(mark + own if first else own + mark))
    assert tree(root / "d") == {"one": "new", "sub": "directory", "sub/five": "5", "empty": "directory", "link": "-> x"}
    assert tree(root)["e/four"] == "4"


@pytest.mark.parametrize("first", [True, False])
def test_a_whiteout_hides_nothing_of_its_own_layer(root: Path, first: bool) -> None:
    lower(root)
    mark = [file(".wh.a"), file(".wh.d")]
    own = [file("a", "new"), file("d/sub/new", "new")]
    unpack(root, *(mark + own if first else own + mark))
    found = {name: text for name, text in tree(root).items() if name[0] in "ad"}
    assert found == {"a": "new", "d": "directory", "d/sub": "directory", "d/sub/new": "new"}


def test_an_opaque_root_leaves_what_its_layer_says(root: Path) -> None:
    lower(root)
    unpack(root, file("e/new", "new"), file(".wh..wh..opq"))
    assert tree(root) == {"e": "directory", "e/new": "new"}


def test_what_was_replaced_in_a_layer_is_no_longer_what_it_has_made(root: Path) -> None:
    lower(root)
    unpack(root, file("d/sub/new"), file("d", "file"), directory("d"), file("d/only", "x"), file("d/.wh..wh..opq"))
    assert tree(root / "d") == {"only": "x"}


def test_a_whiteout_does_not_reach_through_the_link_it_names(root: Path, tmp_path: Path) -> None:
    (root / "out").symlink_to(tmp_path / "outside")
    unpack(root, file(".wh.out"))
    assert tree(root) == {}
    assert (tmp_path / "outside/kept").exists()


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh.."])
def test_a_whiteout_that_names_nothing_is_refused(root: Path, name: str) -> None:
    lower(root)
    before = tree(root)
    assert refused(root, [file(name)])["code"] == "not-an-archive"
    assert tree(root) == before


def test_what_other_file_systems_keep_for_themselves_is_left_out(root: Path) -> None:
    told = unpack(
        root, file(".wh..wh.aufs"), directory(".wh..wh.plnk"), file(".wh..wh.plnk/1.2", "x"), file("d/.wh.x/y")
    )
    assert told["skipped"] == 4
    assert tree(root) == {}


def test_the_agent_itself_does_not_wait_for_what_only_layers_need() -> None:
    code = (
        "import sys, space.guest.__main__, space.guest.agent; print({'tarfile', 'space.guest.layers'} & {*sys.modules})"
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": os.defpath}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
