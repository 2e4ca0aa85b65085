"""Operations on files of the agent, run as an ordinary process of this machine."""

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent import Agent, Peer, Refusal

NAMES = ["🤣.txt", "あ.txt", "a b+%20.txt", "line\nbreak", "-n", "*", "$HOME", os.fsdecode(b"not-utf8-\xff\xe9")]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    one = Agent(tmp_path_factory.mktemp("agent") / "channel")
    yield one
    one.stop()


@pytest.fixture
def peer(agent: Agent) -> Iterator[Peer]:
    one = agent.peer()
    yield one
    one.close()


@pytest.fixture
def open_dir(tmp_path: Path) -> Path:
    """A directory into which other users can see too."""
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        if path.owner() == Path.home().owner() and os.getuid() == 0:
            path.chmod(path.stat().st_mode | 0o755)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_names_and_bytes_come_back_as_they_went(peer: Peer, tmp_path: Path, name: str):
    """F1"""
    data = os.urandom(1000)
    path = str(tmp_path / name)
    assert peer.put("file-write", data, path=path) == {"size": 1000, "created": True, "full_path": None}
    info, got = peer.fetch("file-read", path=path)
    assert got == data
    assert info["name"] == name
    assert [line["name"] for line in peer.lines("list-dir", path=str(tmp_path))] == [name]


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 5 << 20, 33 << 20])
def test_files_of_every_size(peer: Peer, tmp_path: Path, size: int):
    """F3"""
    data = os.urandom(1 << 20)
    data = (data * (size // len(data) + 1))[:size]
    assert peer.put("file-write", data, path=str(tmp_path / "f"), size=size)["size"] == size
    assert (tmp_path / "f").read_bytes() == data
    assert peer.fetch("file-read", path=str(tmp_path / "f"))[1] == data


def test_a_large_file_takes_no_memory(agent: Agent, peer: Peer, tmp_path: Path):
    """F3"""
    size = 1 << 30
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(size)
    peer.fetch("file-read", path=str(tmp_path / "sparse"), length=1 << 20)
    before = agent.memory_kib()
    peer.keep, peer.count = False, 0
    peer.fetch("file-read", path=str(tmp_path / "sparse"))
    assert peer.count == size
    assert agent.memory_kib() - before < 8192


def test_a_reader_who_never_reads_holds_up_nothing_else(agent: Agent, tmp_path: Path):
    peer = agent.peer(acks=False)
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    number = peer.channel.new_number()
    peer.channel.open_receive(number)
    peer.call("file-read", path=str(tmp_path / "f"), stream=number)
    peer.until(lambda: len(peer.data.get(number, b"")) == 1 << 20)
    assert peer.call("stat", path=str(tmp_path / "f"))["size"] == 8 << 20
    assert len(peer.data[number]) == 1 << 20
    peer.close()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o644, "-rw-r--r--"),
        (0o755, "-rwxr-xr-x"),
        (0o600, "-rw-------"),
        (0o777, "-rwxrwxrwx"),
        (0o4711, "-rws--x--x"),
    ],
)
def test_modes_are_exact(peer: Peer, tmp_path: Path, mode: int, text: str):
    """F6"""
    peer.put("file-write", b"x", path=str(tmp_path / "f"), mode=mode)
    assert stat.filemode((tmp_path / "f").stat().st_mode) == text
    assert peer.call("stat", path=str(tmp_path / "f"))["mode"] == mode


def test_without_a_mode_a_new_file_gets_0644_and_an_old_one_keeps_its_own(peer: Peer, tmp_path: Path):
    """F6"""
    peer.put("file-write", b"x", path=str(tmp_path / "new"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644
    (tmp_path / "new").chmod(0o751)
    assert peer.put("file-write", b"yy", path=str(tmp_path / "new")) == {"size": 2, "created": False, "full_path": None}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o751
    assert (tmp_path / "new").read_bytes() == b"yy"


def test_missing_directories_are_made_on_write(peer: Peer, tmp_path: Path):
    peer.put("file-write", b"x", path=str(tmp_path / "a/b/c/f"))
    assert (tmp_path / "a/b/c/f").read_bytes() == b"x"


def test_an_exclusive_write_replaces_nothing(peer: Peer, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(Refusal, match="already-exists"):
        peer.put("file-write", b"new", path=str(tmp_path / "f"), exclusive=True)
    assert (tmp_path / "f").read_bytes() == b"old"


def test_a_write_that_is_shorter_than_announced_leaves_no_new_file(peer: Peer, tmp_path: Path):
    with pytest.raises(Refusal, match="size-mismatch"):
        peer.put("file-write", b"four", path=str(tmp_path / "f"), size=5)
    assert not (tmp_path / "f").exists()


def test_a_write_broken_off_leaves_no_new_file(peer: Peer, tmp_path: Path):
    number = peer.channel.new_number()
    peer.channel.open_send(number)
    peer.ask("file-write", path=str(tmp_path / "f"), stream=number)
    peer.feed(number, bytes(100_000))
    peer.until((tmp_path / "f").exists)
    peer.channel.reset(number, "cancelled")
    peer.until(lambda: not (tmp_path / "f").exists())


def test_ranges(peer: Peer, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"0123456789")
    path = str(tmp_path / "f")
    assert peer.fetch("file-read", path=path, offset=3)[1] == b"3456789"
    assert peer.fetch("file-read", path=path, offset=3, length=4)[1] == b"3456"
    assert peer.fetch("file-read", path=path, offset=8, length=40)[1] == b"89"
    assert peer.fetch("file-read", path=path, offset=99)[1] == b""
    assert peer.fetch("file-read", path=path, length=0)[1] == b""


def test_files_without_a_size_are_read_to_their_end(peer: Peer):
    info, data = peer.fetch("file-read", path="/proc/self/status")
    assert info["size"] == 0
    assert data.startswith(b"Name:")


@pytest.mark.parametrize("op", ["file-read", "file-write"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(peer: Peer, tmp_path: Path, op: str):
    os.mkfifo(tmp_path / "fifo")
    keep = os.open(tmp_path / "fifo", os.O_RDWR)
    (tmp_path / "dir").mkdir()
    for path, code in (
        (tmp_path / "fifo", "not-a-file"),
        (tmp_path / "dir", "is-a-directory"),
        (Path("/dev/zero"), "not-a-file"),
    ):
        with pytest.raises(Refusal, match=code):
            peer.fetch(op, path=str(path)) if op == "file-read" else peer.put(op, b"x", path=str(path))
    os.close(keep)


def test_links_are_followed_by_the_kernel_and_described_on_request(peer: Peer, tmp_path: Path):
    (tmp_path / "target").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "loose").symlink_to("nowhere")
    assert peer.call("stat", path=str(tmp_path / "link"))["type"] == "file"
    info = peer.call("stat", path=str(tmp_path / "link"), follow=False)
    assert (info["type"], info["target"]) == ("symlink", "target")
    with pytest.raises(Refusal, match="not-found"):
        peer.call("stat", path=str(tmp_path / "loose"))
    peer.put("file-write", b"new", path=str(tmp_path / "loose"))
    assert (tmp_path / "nowhere").read_bytes() == b"new"
    assert (tmp_path / "loose").is_symlink()


def test_listing_goes_as_deep_as_asked(peer: Peer, tmp_path: Path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/f").write_bytes(b"xyz")
    (tmp_path / "up").symlink_to("..")
    found = {line["path"]: line["type"] for line in peer.lines("list-dir", path=str(tmp_path), depth=2)}
    assert found == {"a": "directory", "a/b": "directory", "a/f": "file", "up": "symlink"}


def test_a_directory_with_very_many_entries_can_be_listed(peer: Peer, tmp_path: Path):
    for i in range(3000):
        (tmp_path / f"{i:0200d}").touch()
    assert len(peer.lines("list-dir", path=str(tmp_path))) == 3000


def test_moving(peer: Peer, tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with pytest.raises(Refusal, match="already-exists"):
        peer.call("move", source=str(tmp_path / "a"), target=str(tmp_path / "b"), overwrite=False)
    peer.call("move", source=str(tmp_path / "a"), target=str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"a"
    peer.call("move", source=str(tmp_path / "b"), target=str(tmp_path / "c"), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with pytest.raises(Refusal, match="not-found"):
        peer.call("move", source=str(tmp_path / "gone"), target=str(tmp_path / "c"))


def test_moving_between_file_systems_copies(peer: Peer, tmp_path: Path):
    shm = Path("/dev/shm") / f"space-test-{os.getpid()}"
    if shm.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    shm.mkdir()
    try:
        (shm / "d").mkdir()
        (shm / "d/f").write_bytes(b"x")
        peer.call("move", source=str(shm / "d"), target=str(tmp_path / "d"))
        assert (tmp_path / "d/f").read_bytes() == b"x"
        assert not (shm / "d").exists()
    finally:
        peer.call("remove", path=str(shm), recursive=True)


def test_removing(peer: Peer, tmp_path: Path):
    (tmp_path / "d/e/f").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "d/link").symlink_to(tmp_path / "outside")
    with pytest.raises(Refusal, match="not-empty"):
        peer.call("remove", path=str(tmp_path / "d"))
    peer.call("remove", path=str(tmp_path / "d"), recursive=True)
    assert not (tmp_path / "d").exists()
    assert (tmp_path / "outside/kept").exists(), "a link's target is not the link"
    with pytest.raises(Refusal, match="not-found"):
        peer.call("remove", path=str(tmp_path / "d"))
    peer.call("remove", path=str(tmp_path / "d"), missing_ok=True)


def test_a_tree_deeper_than_the_stack_and_than_any_path_is_removed(peer: Peer, tmp_path: Path):
    (tmp_path / "deep").mkdir()
    fd = os.open(tmp_path / "deep", os.O_RDONLY)
    for _ in range(1200):
        for name in ("a" * 100, "b"):
            os.mkdir(name, dir_fd=fd)
        above, fd = fd, os.open("a" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)
    peer.call("remove", path=str(tmp_path / "deep"), recursive=True)
    assert not (tmp_path / "deep").exists()


def test_making_directories(peer: Peer, tmp_path: Path):
    assert peer.call("mkdir", path=str(tmp_path / "a/b"), mode=0o700) == {"created": True, "full_path": None}
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
    assert peer.call("mkdir", path=str(tmp_path / "a/b")) == {"created": False, "full_path": None}
    with pytest.raises(Refusal, match="not-found"):
        peer.call("mkdir", path=str(tmp_path / "x/y"), parents=False)
    (tmp_path / "f").touch()
    with pytest.raises(Refusal, match="already-exists"):
        peer.call("mkdir", path=str(tmp_path / "f"))


def test_changing_modes(peer: Peer, tmp_path: Path):
    (tmp_path / "f").touch()
    peer.call("chmod", path=str(tmp_path / "f"), mode=0o640)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


class TestArchives:
    def test_a_tree_goes_out_and_comes_in_unchanged(self, peer: Peer, tmp_path: Path):
        tree = tmp_path / "tree"
        (tree / "sub").mkdir(parents=True)
        for name in NAMES:
            (tree / name).write_bytes(name.encode("utf-8", "surrogateescape"))
        (tree / "sub/run").write_bytes(b"#!/bin/sh\n")
        (tree / "sub/run").chmod(0o755)
        (tree / "big").write_bytes(bytes(3 << 20))
        (tree / "link").symlink_to("sub/run")
        os.link(tree / "big", tree / "twin")
        (tree / "sub").chmod(0o555)
        os.utime(tree / "sub", (1e9, 1e9))
        _, data = peer.fetch("archive-read", path=str(tree))
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert sum(member.islnk() for member in archive) == 1
        result = peer.put("archive-write", data, path=str(tmp_path / "copy"))
        assert result["skipped"] == 0
        copy = tmp_path / "copy/tree"
        for name in NAMES:
            assert (copy / name).read_bytes() == name.encode("utf-8", "surrogateescape")
        assert (copy / "link").readlink() == Path("sub/run")
        assert (copy / "big").stat().st_ino == (copy / "twin").stat().st_ino
        assert stat.S_IMODE((copy / "sub").stat().st_mode) == 0o555
        assert (copy / "sub").stat().st_mtime == 1e9
        assert stat.S_IMODE((copy / "sub/run").stat().st_mode) == 0o755

    def test_names_never_lead_out_of_the_target(self, peer: Peer, tmp_path: Path):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in ("../escape", "a/../../escape", "/absolute", "./plain"):
                member = tarfile.TarInfo(name)
                member.size = 1
                archive.addfile(member, io.BytesIO(b"x"))
        result = peer.put("archive-write", buffer.getvalue(), path=str(tmp_path / "in"))
        assert (result["entries"], result["skipped"]) == (2, 2)
        assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["absolute", "plain"]
        assert not (tmp_path / "escape").exists()

    def test_links_of_an_archive_never_lead_out_of_the_target(self, peer: Peer, tmp_path: Path):
        outside = tmp_path / "outside"
        outside.mkdir(mode=0o700)
        (outside / "kept").write_text("kept")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:

            def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
                member = tarfile.TarInfo(name)
                member.type, member.linkname, member.mode = kind, link, 0o777
                member.size = 1 if kind == tarfile.REGTYPE else 0
                archive.addfile(member, io.BytesIO(b"x"))

            add("link", tarfile.SYMTYPE, str(outside))
            add("link/new")
            add("link/kept")
            add("link/deep/new")
            add("link", tarfile.DIRTYPE)
            add("link/directory", tarfile.DIRTYPE)
            add("stolen", tarfile.LNKTYPE, "link/kept")
            add("twice", tarfile.SYMTYPE, str(outside))
            add("twice")
        result = peer.put("archive-write", buffer.getvalue(), path=str(tmp_path / "in"))
        assert (result["entries"], result["skipped"]) == (3, 6)
        assert [path.name for path in outside.iterdir()] == ["kept"]
        assert (outside / "kept").read_text() == "kept"
        assert stat.S_IMODE(outside.stat().st_mode) == 0o700
        assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["link", "twice"]
        assert (tmp_path / "in/twice").read_text() == "x"

    def test_an_archive_goes_through_links_that_were_there_before(self, peer: Peer, tmp_path: Path):
        (tmp_path / "usr/bin").mkdir(parents=True)
        (tmp_path / "bin").symlink_to("usr/bin")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("bin/tool"))
        assert peer.put("archive-write", buffer.getvalue(), path=str(tmp_path))["entries"] == 1
        assert (tmp_path / "usr/bin/tool").exists()

    @pytest.mark.parametrize("headers", [{"GNU.sparse.map": "0,x", "GNU.sparse.major": "0"}, {"size": "9" * 30}])
    def test_a_header_that_makes_no_sense_is_the_archives_fault(
        self, peer: Peer, tmp_path: Path, headers: dict[str, str]
    ):
        member = tarfile.TarInfo("p")
        member.pax_headers = headers
        with pytest.raises(Refusal, match="not-an-archive"):
            peer.put("archive-write", member.tobuf(tarfile.PAX_FORMAT) + bytes(1024), path=str(tmp_path / "in"))

    def test_a_header_that_claims_gigabytes_is_not_read_into_memory(self, peer: Peer, tmp_path: Path):
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 8 << 30
        with pytest.raises(Refusal, match="not-an-archive"):
            peer.put("archive-write", member.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20), path=str(tmp_path / "in"))

    @pytest.mark.parametrize("data", [b"not a tar at all" * 100, b"x"])
    def test_what_is_no_archive_is_refused(self, peer: Peer, tmp_path: Path, data: bytes):
        with pytest.raises(Refusal, match="not-an-archive"):
            peer.put("archive-write", data, path=str(tmp_path / "in"))

    def test_compressed_archives_are_taken(self, peer: Peer, tmp_path: Path):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            member = tarfile.TarInfo("f")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        assert peer.put("archive-write", buffer.getvalue(), path=str(tmp_path / "in"))["bytes"] == 3

    def test_a_file_that_is_missing_is_refused(self, peer: Peer, tmp_path: Path):
        with pytest.raises(Refusal, match="not-found"):
            peer.fetch("archive-read", path=str(tmp_path / "gone"))


@as_root
class TestRights:
    def test_another_users_file_is_read_with_that_users_rights(self, peer: Peer, open_dir: Path):
        (open_dir / "secret").write_bytes(b"s")
        (open_dir / "secret").chmod(0o600)
        with pytest.raises(Refusal, match="permission-denied"):
            peer.fetch("file-read", path=str(open_dir / "secret"), user="nobody")
        assert peer.fetch("file-read", path=str(open_dir / "secret"))[1] == b"s"

    def test_what_a_user_writes_is_the_users(self, peer: Peer, open_dir: Path):
        (open_dir / "d").mkdir()
        os.chown(open_dir / "d", 65534, 65534)
        peer.put("file-write", b"x", path=str(open_dir / "d/e/f"), user="nobody")
        assert (open_dir / "d/e").stat().st_uid == 65534
        info = peer.call("stat", path=str(open_dir / "d/e/f"))
        assert (info["uid"], info["owner"]) == (65534, "nobody")

    def test_a_user_cannot_write_where_only_root_may(self, peer: Peer, open_dir: Path):
        for op, fields in (
            ("mkdir", {"path": str(open_dir / "x")}),
            ("remove", {"path": str(open_dir), "recursive": True}),
            ("chmod", {"path": str(open_dir), "mode": 0o777}),
            ("move", {"source": str(open_dir), "target": str(open_dir) + "2"}),
        ):
            with pytest.raises(Refusal, match="permission-denied"):
                peer.call(op, user="nobody", **fields)
        with pytest.raises(Refusal, match="permission-denied"):
            peer.put("file-write", b"x", path=str(open_dir / "x"), user="nobody")

    def test_supplementary_groups_count(self, peer: Peer, open_dir: Path):
        (open_dir / "f").write_bytes(b"s")
        os.chown(open_dir / "f", 0, 4321)
        (open_dir / "f").chmod(0o640)
        with pytest.raises(Refusal, match="permission-denied"):
            peer.fetch("file-read", path=str(open_dir / "f"), user="65534:65534")
        assert peer.fetch("file-read", path=str(open_dir / "f"), user="65534:4321")[1] == b"s"

    def test_the_threads_of_users_do_not_change_the_others(self, agent: Agent, peer: Peer, open_dir: Path):
        (open_dir / "secret").write_bytes(b"s")
        (open_dir / "secret").chmod(0o600)
        numbers = [peer.ask("stat", path=str(open_dir / "secret"), user=user) for user in ["nobody", "root"] * 50]
        for number in numbers:
            peer.answer(number)
        assert peer.fetch("file-read", path=str(open_dir / "secret"))[1] == b"s"
        for task in Path(f"/proc/{agent.process.pid}/task").iterdir():
            assert "Uid:\t0\t0\t0\t0" in (task / "status").read_text()

    def test_a_user_cannot_signal_the_thread_that_works_for_it(self, agent: Agent, open_dir: Path):
        peer = agent.peer(acks=False)
        (open_dir / "f").write_bytes(bytes(4 << 20))
        (open_dir / "f").chmod(0o644)
        number = peer.channel.new_number()
        peer.channel.open_receive(number)
        peer.call("file-read", path=str(open_dir / "f"), stream=number, user="nobody")
        peer.until(lambda: len(peer.data.get(number, b"")) == 1 << 20)
        threads = [
            task.name
            for task in Path(f"/proc/{agent.process.pid}/task").iterdir()
            if "Uid:\t0\t65534\t0" in (task / "status").read_text()
        ]
        assert len(threads) == 1
        script = f"import ctypes; print(ctypes.CDLL(None).syscall(234, {agent.process.pid}, {threads[0]}, 9))"
        peer.acks = True
        assert peer.run("python3", "-c", script, user="nobody").stdout == b"-1\n"
        peer.close()
