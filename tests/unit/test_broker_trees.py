"""A template's digest says what is in it, and a template's root holds what a machine needs, whatever links it brings."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from space.broker import trees
from space.broker.defaults import Defaults, EntryPoint, Wanted
from space.broker.sealing import head, seal
from space.broker.trees import UnfitError
from space.errors import HostError, InvalidRequest

DEFAULTS = Defaults(env={"A": "1"}, workdir="/w", user="u")
MIB = 1 << 20


def digest_of(root: Path, defaults: Defaults) -> str:
    return trees.look(os.fsencode(root), head(defaults)).digest


def complete(root: Path) -> None:
    trees.complete(os.fsencode(root))


def tidy(root: Path) -> None:
    trees.tidy(os.fsencode(root))


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def tree(directory: Path) -> Path:
    directory.mkdir()
    (directory / "etc").mkdir()
    (directory / "etc/a").write_text("one")
    (directory / "etc/b").write_text("two")
    (directory / "link").symlink_to("etc/a")
    (directory / "bin").mkdir(mode=0o700)
    (directory / "bin/p").write_bytes(b"\x7fELF")
    (directory / "bin/p").chmod(0o4755)
    return directory


def test_the_same_content_has_the_same_digest_whenever_and_wherever_it_was_made(tmp_path: Path) -> None:
    first, second = tree(tmp_path / "first"), tree(tmp_path / "second")
    os.utime(second / "etc/a", (1, 1))
    assert digest_of(first, DEFAULTS) == digest_of(second, DEFAULTS)


def replace_content(root: Path) -> None:
    (root / "etc/a").write_text("One")


def swap_contents(root: Path) -> None:
    (root / "etc/a").write_text("two")
    (root / "etc/b").write_text("one")


def change_mode(root: Path) -> None:
    (root / "bin/p").chmod(0o755)


def change_directory_mode(root: Path) -> None:
    (root / "bin").chmod(0o755)


def change_link(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("etc/b")


def link_to_copy(root: Path) -> None:
    (root / "link").unlink()
    shutil.copy(root / "etc/a", root / "link")


def rename(root: Path) -> None:
    (root / "etc/a").rename(root / "etc/c")


def add_empty(root: Path) -> None:
    (root / "new").touch()


def add_fifo(root: Path) -> None:
    os.mkfifo(root / "new")


def set_attribute(root: Path) -> None:
    os.setxattr(root / "etc/a", "user.note", b"x")


CHANGES = [
    *(replace_content, swap_contents, change_mode, change_directory_mode, change_link, link_to_copy),
    *(rename, add_empty, add_fifo, set_attribute),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_changes_the_digest(tmp_path: Path, change: Callable[[Path], None]) -> None:
    root = tree(tmp_path / "root")
    before = digest_of(root, DEFAULTS)
    try:
        change(root)
    except OSError as error:
        pytest.skip(f"this file system cannot: {error}")
    assert digest_of(root, DEFAULTS) != before


def test_owners_are_part_of_the_digest(tmp_path: Path) -> None:
    needs_root()
    root = tree(tmp_path / "root")
    before = digest_of(root, DEFAULTS)
    os.chown(root / "etc/a", 1000, 0)
    assert digest_of(root, DEFAULTS) != before


def changed(**changes: Any) -> Defaults:
    return DEFAULTS.model_copy(update=changes)


START = EntryPoint(start="serve", timeout_s=10)


@pytest.mark.parametrize(
    "defaults",
    [
        *(Defaults(), changed(env={"A": "2"}), changed(workdir="/"), changed(user="root")),
        *(changed(entry=START), changed(ports=[80]), changed(labels={"a": "b"}), changed(resources=Wanted(cpus=1))),
    ],
)
def test_defaults_are_part_of_the_digest(tmp_path: Path, defaults: Defaults) -> None:
    root = tree(tmp_path / "root")
    assert digest_of(root, defaults) != digest_of(root, DEFAULTS)


def test_a_digest_is_what_it_was_before_templates_had_more_defaults(tmp_path: Path) -> None:
    """The store of an installation is known by digests: none may change with a version."""
    needs_root()
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    (root / "file").write_text("text")
    (root / "file").chmod(0o640)
    os.chown(root / "file", 1000, 1001)
    (root / os.fsdecode(b"\xff")).symlink_to("file")
    os.setxattr(root / "file", "user.note", b"\xfe")
    assert digest_of(root, DEFAULTS) == "2df682f17cab93431ba29ae8750d0e6bb02bbedf95d00d10986e90e935a77b40"
    assert digest_of(root, Defaults()) == "3602a857a0cc040f1075de1ff517799932cadd5e1e143cfe5d92d5928b81c3d1"


def test_defaults_that_say_nothing_are_left_out_of_what_is_digested_and_order_of_ports_is_none() -> None:
    nothing = Defaults(entry=None, resources=Wanted(), ports=[], labels={})
    assert head(nothing) == head(Defaults()) == b'{"defaults":{"env":{},"user":"root","workdir":"/"}}\n'
    assert head(Defaults(ports=[443, 80, 80])) == head(Defaults(ports=[80, 443]))
    told = Defaults(entry=START, resources=Wanted(cpus=2)).told()
    assert told["entry"] == {"start": "serve", "timeout_s": 10.0}
    assert told["resources"] == {"cpus": 2.0}
    assert Defaults.model_validate_json(json.dumps(told)) == Defaults(entry=START, resources=Wanted(cpus=2))


def test_a_digest_does_not_depend_on_the_hosts_encoding(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    (root / os.fsdecode(b"\xff\xc3\xa9")).touch()
    code = "import sys; from pathlib import Path; sys.path[:0] = [sys.argv[1]]; from space.broker import trees; print(trees.look(sys.argv[2].encode(), b'').digest)"
    source = Path(trees.__file__).parents[2]
    words = [sys.executable, "-X", "utf8=0", "-c", code, str(source), str(root)]
    seen = {
        subprocess.run(words, env={"LC_ALL": locale}, capture_output=True, text=True, check=True).stdout.strip()
        for locale in ("C", "C.UTF-8", "en_US.ISO-8859-1")
    }
    assert seen == {trees.look(os.fsencode(root), b"").digest}


def test_names_that_are_no_text_are_told_apart(tmp_path: Path) -> None:
    digests = set()
    for name in (b"\xff", b"\xfe", "é".encode(), b"e\xcc\x81", b"a\nb"):
        root = tree(tmp_path / f"root-{name.hex()}")
        (root / os.fsdecode(name)).touch()
        digests.add(digest_of(root, DEFAULTS))
    assert len(digests) == 5


def test_a_completed_root_has_what_a_machine_needs_and_completing_again_changes_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    complete(root)
    assert (root / ".space").is_dir()
    assert (root / "tmp/.X11-unix").stat().st_mode & 0o7777 == 0o1777
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "etc/resolv.conf").is_file()
    before = digest_of(root, DEFAULTS)
    complete(root)
    assert digest_of(root, DEFAULTS) == before


def test_completing_keeps_files_that_are_there(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    (root / "etc/hosts").write_text("10.0.0.1 mine\n")
    complete(root)
    assert (root / "etc/hosts").read_text() == "10.0.0.1 mine\n"


def test_completing_writes_through_no_link_that_a_template_brings(tmp_path: Path) -> None:
    """F4: a root file system is hostile."""
    outside = tmp_path / "outside"
    outside.write_text("the host's")
    root = tree(tmp_path / "root")
    (root / "etc/resolv.conf").symlink_to(outside)
    (root / "etc/hostname").symlink_to(tmp_path / "missing")
    complete(root)
    assert outside.read_text() == "the host's"
    assert not (tmp_path / "missing").exists()
    assert not (root / "etc/resolv.conf").is_symlink()


@pytest.mark.parametrize("name", ["etc", "tmp", "run", ".space", "tmp/.X11-unix"])
def test_a_root_whose_directories_are_links_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / name).parent.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    (root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitError) as caught:
        complete(root)
    assert (caught.value.code, caught.value.path) == ("template-unfit", name.encode())
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- what a machine leaves of itself


def used(directory: Path, mark: str) -> Path:
    """A tree as a machine leaves it that was called `mark`."""
    root = tree(directory)
    complete(root)
    (root / "etc/hostname").write_text(mark)
    (root / "etc/hosts").write_text(mark)
    (root / "etc/resolv.conf").unlink()
    (root / "etc/resolv.conf").symlink_to(f"/run/{mark}")
    (root / "etc/machine-id").write_text(mark)
    (root / "etc/space/hooks").mkdir(parents=True)
    (root / "etc/space/hooks/kept").write_text("kept")
    (root / "var/lib/dbus").mkdir(parents=True)
    (root / "var/lib/dbus/machine-id").write_text(mark)
    for place in ("run", "tmp", "dev", "proc", "sys", ".space"):
        (root / place / mark / "below").mkdir(parents=True)
        (root / place / mark / "file").write_text(mark)
        (root / place / f"{mark}-link").symlink_to(directory.parent)
    shutil.rmtree(root / "tmp/.X11-unix")
    directory_fd = os.open(root / "tmp", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{directory_fd}/.X11-unix")
    os.close(directory_fd)
    return root


def test_the_same_work_in_two_machines_leaves_the_same_tree(tmp_path: Path) -> None:
    first, second = used(tmp_path / "first", "one"), used(tmp_path / "second", "another")
    assert digest_of(first, DEFAULTS) != digest_of(second, DEFAULTS)
    for root in (first, second):
        tidy(root)
    assert digest_of(first, DEFAULTS) == digest_of(second, DEFAULTS)
    (second / "etc/space/hooks/kept").write_text("changed")
    assert digest_of(first, DEFAULTS) != digest_of(second, DEFAULTS)


def test_a_tidy_tree_has_what_a_machine_needs_and_is_tidy_already(tmp_path: Path) -> None:
    root = used(tmp_path / "root", "one")
    tidy(root)
    assert (root / "etc/hosts").read_text() == "127.0.0.1 localhost\n::1 localhost\n"
    assert (root / "etc/hostname").read_text() == "sandbox\n"
    assert (root / "etc/resolv.conf").read_bytes() == (root / "etc/machine-id").read_bytes() == b""
    assert (root / "var/lib/dbus/machine-id").read_bytes() == b""
    assert not (root / "etc/resolv.conf").is_symlink()
    assert [path.name for path in (root / "tmp").iterdir()] == [".X11-unix"]
    assert (root / "tmp/.X11-unix").stat().st_mode & 0o7777 == (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    for place in ("run", "dev", "proc", "sys", ".space"):
        assert list((root / place).iterdir()) == []
    before = digest_of(root, DEFAULTS)
    tidy(root)
    assert digest_of(root, DEFAULTS) == before


def test_tidying_reaches_through_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "dbus").mkdir(parents=True)
    for name in ("file", "dbus/machine-id"):
        (outside / name).write_text("the host's")
    root = tree(tmp_path / "root")
    complete(root)
    for place in ("run/link", "tmp/link", "dev/link"):
        (root / place).symlink_to(outside)
    for name in ("hosts", "hostname", "machine-id"):
        (root / "etc" / name).unlink(missing_ok=True)
        (root / "etc" / name).symlink_to(outside / "file")
    (root / "var").mkdir()
    (root / "var/lib").symlink_to(outside)
    tidy(root)
    assert (outside / "file").read_text() == (outside / "dbus/machine-id").read_text() == "the host's"
    assert (root / "etc/hosts").read_text() != "the host's"


def test_a_name_file_that_is_a_directory_becomes_a_file(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    (root / "etc/hosts/below").mkdir(parents=True)
    (root / "etc/hosts/below/file").touch()
    tidy(root)
    assert (root / "etc/hosts").is_file()


@pytest.mark.parametrize("name", ["etc", "tmp", "run", ".space", "dev"])
def test_a_tree_whose_directories_are_links_is_not_tidied(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").touch()
    (root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitError, match="not a directory"):
        tidy(root)
    assert (tmp_path / "elsewhere/kept").exists()


# --- the limits of a tree


def test_a_device_node_is_refused_and_named(tmp_path: Path) -> None:
    needs_root()
    root = tree(tmp_path / "root")
    os.mknod(root / "etc/null", 0o666 | 0o020000, os.makedev(1, 3))
    with pytest.raises(UnfitError) as caught:
        digest_of(root, DEFAULTS)
    assert (caught.value.code, caught.value.path) == ("device-in-template", b"/etc/null")


def test_more_files_than_a_template_may_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "root")
    monkeypatch.setattr(trees, "ENTRIES_MAX", 7)
    assert digest_of(root, DEFAULTS)
    (root / "one-more").touch()
    with pytest.raises(UnfitError) as caught:
        digest_of(root, DEFAULTS)
    assert caught.value.code == "template-too-large"


def test_files_that_claim_to_be_huge_are_refused_before_they_are_read(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    with (root / "huge").open("wb") as file:
        file.truncate(trees.BYTES_MAX + 1)
    with pytest.raises(UnfitError) as caught:
        digest_of(root, DEFAULTS)
    assert caught.value.code == "template-too-large"


def test_a_file_with_many_names_is_read_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "root")
    (root / "large").write_bytes(os.urandom(MIB))
    for number in range(50):
        os.link(root / "large", root / f"large-{number}")
    monkeypatch.setattr(trees, "BYTES_MAX", 2 * MIB)
    seen = trees.look(os.fsencode(root), b"")
    assert MIB <= seen.bytes < 2 * MIB
    assert seen.entries == 7 + 51


def test_a_path_that_nobody_could_name_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "root")
    here = os.open(root, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 180, dir_fd=here)
        below = os.open("d" * 180, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(UnfitError) as caught:
        trees.look(os.fsencode(root), b"")
    assert caught.value.code == "template-too-large"
    subprocess.run(["rm", "-rf", root], check=True)  # the libraries of Python cannot


# --- the process that looks


async def test_a_tree_is_looked_at_with_it_as_the_root_of_everything(tmp_path: Path) -> None:
    needs_root()
    root = used(tmp_path / "root", "one")
    twin = used(tmp_path / "twin", "two")
    sealed = await seal(root, DEFAULTS, tidy=True, limit_s=30)
    tidy(twin)
    assert sealed.digest == digest_of(twin, DEFAULTS) == digest_of(root, DEFAULTS)
    assert sealed.entries > 10


async def test_what_is_wrong_with_a_tree_is_told_with_its_path(tmp_path: Path) -> None:
    needs_root()
    root = tree(tmp_path / "root")
    os.mknod(root / os.fsdecode(b"etc/\xff"), 0o666 | 0o060000, os.makedev(7, 0))
    with pytest.raises(InvalidRequest) as caught:
        await seal(root, DEFAULTS, tidy=False, limit_s=30)
    assert (caught.value.code, caught.value.details) == ("device-in-template", {"path": "/etc/\\xff"})


async def test_a_tree_that_takes_too_long_is_given_up_and_says_so(tmp_path: Path) -> None:
    needs_root()
    root = tree(tmp_path / "root")
    with (root / "long").open("wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(InvalidRequest, match=r"within 0\.3 s") as caught:
        await seal(root, DEFAULTS, tidy=False, limit_s=0.3)
    assert caught.value.code == "template-too-large"
    assert looking_at(root) == []


def test_a_tree_is_looked_at_no_longer_than_the_broker_lives(tmp_path: Path) -> None:
    needs_root()
    root = tree(tmp_path / "root")
    with (root / "long").open("wb") as file:
        file.truncate(200 << 30)
    words = [sys.executable, "-I", "-S", trees.__file__, "1", str(root)]
    done = subprocess.run(words, input=b"", capture_output=True, check=False, timeout=30)
    assert done.returncode == 1
    assert b"The broker has ended" in done.stderr


async def test_a_directory_that_is_not_there_is_the_hosts_trouble(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        await seal(tmp_path / "missing", DEFAULTS, tidy=False, limit_s=30)
    assert caught.value.code == "template-not-read"


def looking_at(root: Path) -> list[str]:
    """Processes that have `root` in their arguments."""
    words = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in words.splitlines() if str(root) in line and "trees.py" in line]
