"""Metadata of files on a file system that keeps no extended attributes: a ramfs."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.guest import attributes

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose files have no attributes."""
    where = tmp_path / "bare"
    where.mkdir()
    monkeypatch.setattr(attributes, "records", str(tmp_path / "records"))
    subprocess.run(["mount", "-t", "ramfs", "none", where], check=True)
    yield where
    subprocess.run(["umount", where], check=True)


def write(path: Path, data: bytes, metadata: dict[str, str]) -> None:
    with path.open("wb") as file:
        kept = attributes.replace(file.fileno(), "ours", metadata, created=False)
        file.write(data)
        file.flush()
        if not kept:
            attributes.record(file.fileno(), "ours", metadata)


def test_a_record_is_of_the_file_as_it_was_written_wherever_it_is_moved(bare: Path) -> None:
    one, other = bare / "one", bare / "other"
    write(one, b"same", {"a": "1", "b": "ü"})
    write(other, b"same", {"a": "2"})
    assert attributes.read(str(one), "ours") == {"a": "1", "b": "ü"}
    assert attributes.read(str(one), "others") == {}
    one.rename(bare / "moved")
    (bare / "link").symlink_to("moved")
    assert attributes.read(str(bare / "moved"), "ours") == attributes.read(str(bare / "link"), "ours")
    assert attributes.read(str(other), "ours") == {"a": "2"}
    other.write_bytes(b"SAME")
    assert attributes.read(str(other), "ours") == {}
    write(bare / "moved", b"same", {})
    assert attributes.read(str(bare / "moved"), "ours") == {}
    assert attributes.read(str(bare), "ours") == attributes.read(str(bare / "gone"), "ours") == {}


def test_records_are_roots_alone_and_the_newest_of_so_many(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "_RECORDS_MAX", 3)
    for number in range(5):
        write(bare / str(number), b"x", {"number": str(number)})
    found = [attributes.read(str(bare / str(number)), "ours") for number in range(5)]
    assert found == [{}, {}, {"number": "2"}, {"number": "3"}, {"number": "4"}]
    where = Path(attributes.records) / "ours"
    assert where.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in where.iterdir()} == {0o600}


def test_a_record_that_is_none_says_nothing(bare: Path) -> None:
    write(bare / "one", b"x", {"a": "1"})
    [record] = (Path(attributes.records) / "ours").iterdir()
    long = "n" * 256
    pairs = {"a": 5, "b": "yes", long: "no", "c": long * 17, "d": "\0", "\0": "e", "": "f", "g": "\ud800"}
    for text, expected in (
        (json.dumps(pairs), {"b": "yes"}),
        ("[]", {}),
        ("{", {}),
        ("\xff", {}),
    ):
        record.write_text(text, encoding="latin-1")
        assert attributes.read(str(bare / "one"), "ours") == expected
