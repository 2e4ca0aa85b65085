"""Files through the SDK, against a scripted server on loopback."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from space import AsyncClient, AsyncSandbox, Client, GuestError, InvalidRequest, Sandbox, Unavailable
from tests.scripted_server import ScriptedServer, error, sandbox

ID = sandbox()["id"]
FILES = f"/v1/sandboxes/{ID}/files"
STAT = {"name": "f", "path": "/f", "type": "file", "size": 3, "mode": "0755", "user": "user", "group": "user"}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on(f"GET /v1/sandboxes/{ID}", sandbox())
        server.on(f"POST /v1/sandboxes/{ID}/access", {"url": server.url, "token": "t"})
        yield server


@pytest.fixture
def sbx(server: ScriptedServer) -> Iterator[Sandbox]:
    with Client(server.url, "sk_test") as client:
        yield Sandbox.connect(ID, client=client)


@pytest.mark.parametrize("name", ["🤣.txt", "あ.txt", "a b+%20.txt", "new\nline", "c:d?e#f&g=h", "100%"])
def test_any_name_arrives_as_it_is(server: ScriptedServer, sbx: Sandbox, name: str) -> None:
    """F1"""
    server.on(f"GET {FILES}", Response(b"content"))
    server.on(f"PUT {FILES}", {})
    assert sbx.files.read(f"/d/{name}") == b"content"
    sbx.files.write(f"/d/{name}", "text")
    assert [s.query["path"] for s in server.seen if s.path == FILES] == [f"/d/{name}"] * 2


def test_a_mode_is_sent_in_octal(server: ScriptedServer, sbx: Sandbox) -> None:
    """F6"""
    server.on(f"PUT {FILES}", {})
    sbx.files.write("/f", b"x", mode=0o644, user="root")
    sent = server.seen[-1]
    assert (sent.query["mode"], sent.query["user"], sent.body) == ("0644", "root", b"x")


def test_a_stat_reads_the_mode_as_a_number(server: ScriptedServer, sbx: Sandbox) -> None:
    """F6"""
    server.on(f"GET {FILES}/stat", STAT)
    info = sbx.files.stat("/f")
    assert (info.type, info.mode, info.size, info.user) == ("file", 0o755, 3, "user")


def test_exists_is_false_only_for_what_is_not_there(server: ScriptedServer, sbx: Sandbox) -> None:
    gone, forbidden = error(404, "file-not-found", errno=2), error(403, "permission-denied", errno=13)
    server.on(f"GET {FILES}/stat", STAT, gone, forbidden)
    assert sbx.files.exists("/f")
    assert not sbx.files.exists("/f")
    with pytest.raises(GuestError):
        sbx.files.exists("/f")


def test_a_part_of_a_file_is_a_range(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"GET {FILES}", Response(b"cd", status_code=206))
    assert b"".join(sbx.files.read_stream("/f", start=2, length=2)) == b"cd"
    assert b"".join(sbx.files.read_stream("/f", start=2)) == b"cd"
    assert [s.headers["range"] for s in server.seen if "range" in s.headers] == ["bytes=2-3", "bytes=2-"]


def test_a_download_that_breaks_off_is_an_error_and_never_a_shorter_file(server: ScriptedServer, sbx: Sandbox) -> None:
    async def breaks(request: Request) -> Response:
        async def body():
            yield b"half"
            raise ConnectionError

        return StreamingResponse(body())

    server.on(f"GET {FILES}", breaks)
    with pytest.raises(Unavailable) as caught:
        sbx.files.read("/f")
    assert caught.value.code == "connection-lost"


def test_an_upload_from_chunks_is_never_sent_a_second_time(server: ScriptedServer, sbx: Sandbox) -> None:
    """Its chunks are gone: a repeat would write a shorter file."""
    server.on(f"PUT {FILES}", error(503, "unavailable", headers={"retry-after": "0"}))
    with pytest.raises(Unavailable):
        sbx.files.write_stream("/f", iter([b"a", b"b"]))
    assert len(server.requests(f"PUT {FILES}")) == 1


def test_a_local_file_is_uploaded_with_its_mode_and_downloaded_with_the_others(
    server: ScriptedServer, sbx: Sandbox, tmp_path: Path
) -> None:
    server.on(f"PUT {FILES}", {})
    server.on(f"GET {FILES}/stat", STAT)
    server.on(f"GET {FILES}", Response(b"abc"))
    local = tmp_path / "local"
    local.write_bytes(bytes(3_000_000))
    local.chmod(0o600)
    sbx.files.upload(local, "/f")
    assert (server.seen[-1].query["mode"], len(server.seen[-1].body)) == ("0600", 3_000_000)
    sbx.files.download("/f", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abc"
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o755


def test_a_directory_travels_as_an_archive(server: ScriptedServer, sbx: Sandbox, tmp_path: Path) -> None:
    server.on(f"PUT {FILES}/archive", {})
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/f").write_bytes(b"x")
    sbx.files.upload(tmp_path / "tree", "/home/user/tree")
    sent = server.seen[-1]
    assert sent.query["path"] == "/home/user/tree"
    with tarfile.open(fileobj=io.BytesIO(sent.body)) as archive:
        assert archive.getnames() == ["sub", "sub/f"]

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(tmp_path / "tree", "tree")
        link = tarfile.TarInfo("tree/out")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    server.on(f"GET {FILES}/stat", {**STAT, "type": "directory"})
    server.on(f"GET {FILES}/archive", Response(buffer.getvalue()))
    assert sbx.files.download("/home/user/tree", tmp_path / "back") == ["tree/out"]
    assert (tmp_path / "back/sub/f").read_bytes() == b"x"


def test_a_hostile_archive_is_refused_and_writes_nothing_outside(
    server: ScriptedServer, sbx: Sandbox, tmp_path: Path
) -> None:
    """F4"""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("tree/../../evil")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    server.on(f"GET {FILES}/stat", {**STAT, "type": "directory"})
    server.on(f"GET {FILES}/archive", Response(buffer.getvalue()))
    with pytest.raises(InvalidRequest):
        sbx.files.download("/tree", tmp_path / "deep/back")
    assert not list(tmp_path.rglob("evil"))


def test_directories_are_listed_made_moved_and_removed(server: ScriptedServer, sbx: Sandbox) -> None:
    server.on(f"GET {FILES}/list", {"entries": [{**STAT, "name": "b"}, {**STAT, "name": "a"}]})
    for verb in ("POST /mkdir", "POST /move", "DELETE "):
        method, _, path = verb.partition(" ")
        server.on(f"{method} {FILES}{path}", {})
    assert [info.name for info in sbx.files.list("/d")] == ["a", "b"]
    sbx.files.mkdir("/d/e", mode=0o700)
    sbx.files.move("/a", "/b")
    sbx.files.remove("/b", recursive=True)
    made, moved, removed = server.seen[-3:]
    assert made.json == {"path": "/d/e", "mode": "0700"}
    assert moved.json == {"source": "/a", "destination": "/b"}
    assert removed.query == {"path": "/b", "recursive": "true"}


async def test_the_asynchronous_form_does_the_same(server: ScriptedServer, tmp_path: Path) -> None:
    server.on(f"PUT {FILES}", {})
    server.on(f"GET {FILES}", Response(b"abc"))
    (tmp_path / "local").write_bytes(b"local")

    async def chunks():
        yield b"one"
        yield b"two"

    async with AsyncClient(server.url, "sk_test") as client:
        sbx = await AsyncSandbox.connect(ID, client=client)
        await sbx.files.write_stream("/f", chunks())
        assert server.seen[-1].body == b"onetwo"
        await sbx.files.upload(tmp_path / "local", "/f")
        assert server.seen[-1].body == b"local"
        assert await sbx.files.read_text("/f") == "abc"
