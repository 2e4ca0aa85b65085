"""What programs that run already are told of the environment of the next ones."""

from pathlib import Path

from space.guest.identity import write_environment


def test_it_is_written_to_the_byte_and_anew_each_time(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_environment({"A": "1\n2", "B": "\udcff="}, str(tmp_path))
    path = tmp_path / "run/space/environment"
    assert path.read_bytes() == b"A=1\n2\0B=\xff=\0"
    assert path.stat().st_mode & 0o777 == 0o644
    write_environment({}, str(tmp_path))
    assert path.read_bytes() == b""
    assert list(path.parent.iterdir()) == [path]


def test_no_link_is_followed_and_no_system_without_a_place_is_harmed(tmp_path: Path) -> None:
    write_environment({"A": "1"}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/space").symlink_to(other)
    write_environment({"A": "1"}, str(tmp_path))
    assert list(other.iterdir()) == []
    (tmp_path / "run/space").unlink()
    (tmp_path / "run/space").mkdir()
    (other / "kept").write_text("kept")
    (tmp_path / "run/space/environment").symlink_to(other / "kept")
    write_environment({"A": "1"}, str(tmp_path))
    assert (other / "kept").read_text() == "kept"
    assert (tmp_path / "run/space/environment").read_bytes() == b"A=1\0"
