"""Contexts: what is in them, what is left out, and the tar that brings files to their place."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from e2b_dockerfile_utils import PatternMatcher

from space.node.builds import contexts
from space.node.builds.contexts import Context, make_plain
from space.node.builds.emission import Emission, Placing, is_tar
from space.node.builds.refusals import Refusal
from tests.images import File, Members, compressed, directory, hard_link, symlink, tar_of

TREE: Members = {
    "./a.txt": "A",
    "dir": directory(0o750),
    "dir/b.txt": File(b"B", 0o600, uid=5, gid=6),
    "dir/sub/c.md": "C",
    "link": symlink("dir/sub"),
    "out": symlink("../../etc"),
    "loop": symlink("loop"),
    "hard": hard_link("a.txt"),
}


def context(tmp_path: Path, members: Members) -> Context:
    path = tmp_path / "context.tar"
    path.write_bytes(tar_of(members))
    return Context(path)


def emitted(placing: dict[str, Any], add: Any) -> dict[str, tarfile.TarInfo]:
    """The members that an emission writes, by name; ``add`` is given the emission."""
    target = io.BytesIO()
    fields = {"missing": [], "inside": "", "name": None, "owner": (0, 0), "owner_within": None, "mode": None, **placing}
    emission = Emission(target, Placing.of(fields))
    add(emission)
    emission.end()
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        return {member.name: member for member in archive}


def test_paths_are_taken_from_the_root_and_missing_directories_are_there(tmp_path: Path) -> None:
    found = context(tmp_path, TREE)
    assert {path: entry.kind for path, entry in found.entries.items()} == {
        "": "directory",
        "a.txt": "file",
        "dir": "directory",
        "dir/b.txt": "file",
        "dir/sub": "directory",
        "dir/sub/c.md": "file",
        "link": "link",
        "out": "link",
        "loop": "link",
        "hard": "file",
    }
    assert found.read("hard", 10) == "A"


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("a.txt", ["a.txt"]),
        ("/a.txt", ["a.txt"]),
        ("../../a.txt", ["a.txt"]),
        (".", [""]),
        ("dir/", ["dir"]),
        ("*.txt", ["a.txt"]),
        ("dir/*", ["dir/b.txt", "dir/sub"]),
        ("*/*.txt", ["dir/b.txt"]),
        ("link/c.md", ["dir/sub/c.md"]),
        ("link", ["dir/sub"]),
        ("[^b-z].txt", ["a.txt"]),
        ("out", []),
        ("out/passwd", []),
        ("loop", []),
        ("nothing", []),
    ],
)
def test_a_source_is_found_within_the_context_and_nowhere_else(tmp_path: Path, pattern: str, paths: list[str]) -> None:
    assert context(tmp_path, TREE).find(pattern) == paths


def sparse(size: int) -> bytes:
    """A tar with one file that is a hole, in the old form of GNU's: its size is 11 bytes of a number, big-endian."""
    member = tarfile.TarInfo("hole")
    member.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b"%011o\0" % 0 * 2
    head[483:495] = b"\x80" + size.to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    return bytes(head) + bytes(10240)


@pytest.mark.parametrize("kind", ["hole", "links"])
def test_a_small_archive_of_large_files_is_refused_before_they_are_read(tmp_path: Path, kind: str) -> None:
    many = {f"link{number}": hard_link("a.txt") for number in range(100)}
    path = tmp_path / "context.tar"
    path.write_bytes(sparse(1 << 40) if kind == "hole" else tar_of({"a.txt": "x" * 100, **many}))
    with pytest.raises(Refusal, match="too large together"):
        Context(path, 10_000)
    assert Context(path, 1 << 50).entries


def test_a_path_that_nothing_could_be_unpacked_at_is_refused(tmp_path: Path) -> None:
    assert context(tmp_path, {"a/" * 2000: directory()}).entries
    with pytest.raises(Refusal, match="too long"):
        context(tmp_path, {"a/" * 3000: directory()})


def test_a_source_that_is_a_link_is_found_as_one_where_links_are_kept(tmp_path: Path) -> None:
    found = context(tmp_path, {"real/file": "x", "real/link": symlink("file"), "way": symlink("real")})
    assert found.find("way/link", follow=False) == ["real/link"]
    assert found.find("way/link") == ["real/file"]
    assert found.find("gone", follow=False) == []


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ("dir", ["a.txt", "hard", "link", "loop", "out"]),
        ("*\n!dir/sub", ["dir", "dir/sub", "dir/sub/c.md"]),
        ("**/*.md\n# comment\n\n", ["a.txt", "dir", "dir/b.txt", "dir/sub", "hard", "link", "loop", "out"]),
        ("**\n!a.txt", ["a.txt"]),
    ],
)
def test_what_is_ignored_is_not_there(tmp_path: Path, ignored: str, left: list[str]) -> None:
    found = context(tmp_path, TREE)
    found.ignore(ignored)
    assert sorted(path for path in found.entries if path) == left


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="dockerignore"):
        context(tmp_path, TREE).ignore("a[")


@pytest.mark.parametrize(
    "members",
    [
        {"../a": "x"},
        {"a/../../b": "x"},
        {"dev": File(kind=tarfile.CHRTYPE)},
        {"h": hard_link("not-there")},
        {"h": hard_link("/etc/shadow")},
    ],
)
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, members: Members) -> None:
    with pytest.raises(Refusal) as caught:
        context(tmp_path, members)
    assert caught.value.code == "archive-damaged"


@pytest.mark.parametrize("data", [b"x" * 1024, tar_of({"a": "x" * 5000})[:2000], b"\x1f\x8b" + b"x" * 100])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "context.tar"
    path.write_bytes(data)
    with pytest.raises(Refusal) as caught:
        Context(path)
    assert caught.value.code == "archive-damaged"


def test_an_archive_has_only_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "ENTRIES_MAX", 10)
    with pytest.raises(Refusal) as caught:
        context(tmp_path, {str(number): "" for number in range(20)})
    assert caught.value.code == "context-too-large"


def test_a_file_in_the_place_of_a_directory_takes_all_of_it_away(tmp_path: Path) -> None:
    found = context(tmp_path, {"a/b/c": "x", "a": "file"})
    assert {path: entry.kind for path, entry in found.entries.items() if path} == {"a": "file"}


def test_a_name_that_is_no_text_is_kept_and_matches_nothing(tmp_path: Path) -> None:
    name = b"\xff\xfe".decode("utf-8", "surrogateescape")
    found = context(tmp_path, {f"d/{name}": "x"})
    found.ignore("**/*")
    assert f"d/{name}" in found.entries
    assert found.digest(["d"]).startswith("sha256:")
    out = emitted({}, lambda emission: emission.add(found, "d", None))
    assert list(out) == [name]


# --- digests


def test_the_digest_is_of_names_modes_and_content_and_not_of_times_or_owners(tmp_path: Path) -> None:
    def digest(**fields: Any) -> str:
        return context(tmp_path, {"d/a": File(**{"data": b"1", **fields}), "d/b": "2"}).digest(["d"])

    assert digest() == digest(mtime=5) == digest(uid=7, gid=8)
    assert len({digest(), digest(data=b"3"), digest(mode=0o755)}) == 3
    assert context(tmp_path, {"d/a": "1"}).digest(["d"]) != context(tmp_path, {"d/c": "1"}).digest(["d"])
    assert context(tmp_path, {"a": "1"}).digest(["a"]) != context(tmp_path, {"b": "1"}).digest(["b"])


def test_what_is_excluded_does_not_count(tmp_path: Path) -> None:
    exclude = PatternMatcher(["*.md"])
    one = context(tmp_path, {"d/a": "1", "d/b.md": "2"}).digest(["d"], exclude)
    assert one == context(tmp_path, {"d/a": "1", "d/b.md": "3"}).digest(["d"], exclude)


# --- plain


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_compressed_archive_is_made_plain_and_bounded(tmp_path: Path, how: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(compressed(tar_of({"a": bytes(100_000)}), how))
    assert make_plain(source, target, 1_000_000) == target
    assert Context(target).find("a") == ["a"]
    with pytest.raises(Refusal) as caught:
        make_plain(source, target, 50_000)
    assert caught.value.code == "context-too-large"


def test_a_plain_archive_is_read_where_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(tar_of({"a": "1"}))
    assert make_plain(source, tmp_path / "target", 10) == source


# --- placing


def test_a_directorys_content_goes_into_the_target_which_is_like_it_if_it_is_new(tmp_path: Path) -> None:
    found = context(tmp_path, TREE)

    def add(emission: Emission) -> None:
        emission.begin(found.entries["dir"])
        emission.add(found, "dir", None)

    out = emitted({"missing": ["x", "x/y"], "inside": "x/y"}, add)
    assert list(out) == ["x", "x/y", "x/y/b.txt", "x/y/sub", "x/y/sub/c.md"]
    assert (out["x"].mode, out["x/y"].mode) == (0o755, 0o750)
    assert {(member.uid, member.gid) for member in out.values()} == {(0, 0)}


def test_owner_and_mode_are_as_asked_for_or_as_they_were(tmp_path: Path) -> None:
    found = context(tmp_path, TREE)
    kept = emitted({"owner": None}, lambda emission: emission.add(found, "dir", None))["b.txt"]
    assert (kept.uid, kept.gid, kept.mode) == (5, 6, 0o600)
    asked = emitted({"owner": (1, 2), "mode": 0o711}, lambda emission: emission.add(found, "dir", None))
    assert {(member.uid, member.gid, member.mode) for member in asked.values()} == {(1, 2, 0o711)}


def test_a_single_file_may_have_another_name(tmp_path: Path) -> None:
    found = context(tmp_path, TREE)
    assert list(emitted({"name": "z"}, lambda emission: emission.add(found, "a.txt", None))) == ["z"]
    assert list(emitted({"inside": "i"}, lambda emission: emission.add(found, "a.txt", None))) == ["i/a.txt"]


@pytest.mark.parametrize("how", ["none", "gzip", "zstd"])
def test_an_archive_is_unpacked_with_its_owners(tmp_path: Path, how: str) -> None:
    inner = tar_of({"/p/q": File(b"1", uid=3), "p/r": hard_link("/p/q"), "s": symlink("/etc")})
    found = context(tmp_path, {"inner": compressed(inner, how), "text": "no"})
    assert is_tar(found, "inner")
    assert not is_tar(found, "text")
    out = emitted({"inside": "to"}, lambda emission: emission.add_archive(found, "inner"))
    assert (out["to/p/q"].uid, out["to/p/r"].linkname, out["to/s"].linkname) == (3, "to/p/q", "/etc")


@pytest.mark.parametrize("members", [{"../x": "1"}, {"d": File(kind=tarfile.BLKTYPE)}])
def test_an_archive_in_the_context_that_leads_elsewhere_is_refused(tmp_path: Path, members: Members) -> None:
    found = context(tmp_path, {"inner": tar_of(members)})
    with pytest.raises(Refusal) as caught:
        emitted({}, lambda emission: emission.add_archive(found, "inner"))
    assert caught.value.code == "archive-damaged"
