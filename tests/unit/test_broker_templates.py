"""A template's digest says what is in it, and a template's root holds what a machine needs, whatever links it brings."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from space.broker.templates import Defaults, complete, digest_of
from space.errors import InvalidRequest

DEFAULTS = Defaults(env={"A": "1"}, workdir="/w", user="u")


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
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    root = tree(tmp_path / "root")
    before = digest_of(root, DEFAULTS)
    os.chown(root / "etc/a", 1000, 0)
    assert digest_of(root, DEFAULTS) != before


@pytest.mark.parametrize(
    "defaults", [Defaults(), Defaults(env={"A": "2"}, workdir="/w", user="u"), Defaults(env={"A": "1"})]
)
def test_defaults_are_part_of_the_digest(tmp_path: Path, defaults: Defaults) -> None:
    root = tree(tmp_path / "root")
    assert digest_of(root, defaults) != digest_of(root, DEFAULTS)


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
    with pytest.raises(InvalidRequest):
        complete(root)
    assert list((tmp_path / "elsewhere").iterdir()) == []
