"""Templates in the SDK against a scripted server: what is sent, how it is followed, and how contexts are packed."""

import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from space import (
    AsyncClient,
    Build,
    Client,
    Conflict,
    Forbidden,
    InvalidRequest,
    OutcomeUnknown,
    RegistryAuth,
    Sandbox,
    SandboxError,
    SpaceError,
    Template,
    Unavailable,
)
from space.sdk import build_contexts
from space.sdk._async import uploads as async_uploads
from space.sdk._sync import uploads as sync_uploads
from tests.scripted_server import ScriptedServer, error, operation, sandbox, snapshot

BUILD = "bldaaaaaaaaaaaaaaaa"
UPLOAD = "uplaaaaaaaaaaaaaaaa"
DIGEST = "sha256:" + "a" * 64
STARTS, LOG, ONE = "POST /v1/templates/builds", f"GET /v1/builds/{BUILD}/log", f"GET /v1/builds/{BUILD}"
PASSWORD = "s3cret-of-the-registry"


def build(state: str = "pending", **fields: Any) -> dict[str, Any]:
    """A build as the api describes one."""
    return {
        "id": BUILD,
        "name": "tool",
        "tag": "latest",
        "state": state,
        "source": {"kind": "image"},
        "step": None,
        "steps": None,
        "digest": DIGEST if state == "succeeded" else None,
        "bytes": 5,
        "base": None,
        "failure": None,
        "resources": {"cpus": 1.0, "memory_mib": 1024, "disk_mib": 8192, "pids": 1024},
        "timeout_s": 1800.0,
        "cancelling": False,
        "timings": {},
        "created_at": "2026-01-02T03:04:05Z",
        "started_at": None,
        "finished_at": None,
        **fields,
    }


def template(**fields: Any) -> dict[str, Any]:
    """A template as the api describes one."""
    return {
        "name": "tool",
        "tag": "latest",
        "digest": DIGEST,
        "builtin": False,
        "bytes": 5,
        "defaults": {"env": {}},
        "driver": None,
        "source": {"kind": "image"},
        "base": None,
        "build_id": BUILD,
        "created_at": "2026-01-02T03:04:05Z",
        "untagged_at": None,
        "deleted_at": None,
        "tags": ["tool:latest"],
        "lineage": {"images": []},
        "packages": [{"name": "p", "version": "1"}],
        **fields,
    }


def logged(*lines: dict[str, Any]) -> Response:
    return Response("".join(json.dumps(line) + "\n" for line in lines), media_type="application/x-ndjson")


def said(n: int, text: str) -> dict[str, Any]:
    return {"type": "log", "n": n, "at": 1.5, "stream": "stdout", "text": text}


END = {"type": "end", "state": "succeeded", "digest": DIGEST, "code": None, "next": 9}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on(STARTS, build())
        server.on(LOG, logged(said(0, "hello"), END))
        server.on(ONE, build("succeeded"))
        server.on(f"GET /v1/templates/{DIGEST}", template(name=None, tag=None))
        server.on("POST /v1/uploads", {"id": UPLOAD, "size": 1, "bytes": 0})
        server.on(f"DELETE /v1/uploads/{UPLOAD}", Response(status_code=204))
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, "sk_test") as client:
        yield client


def keep_pieces(server: ScriptedServer, kept: bytearray) -> None:
    """Let the server keep what it is sent, each piece at the end of what there is."""

    async def append(request: Request) -> Response:
        offset, body = int(request.query_params["offset"]), await request.body()
        if offset != len(kept):
            return error(409, "wrong-offset", offset=len(kept))
        kept.extend(body)
        return JSONResponse({"bytes": len(kept)})

    async def show(_request: Request) -> Response:
        return JSONResponse({"id": UPLOAD, "bytes": len(kept)})

    server.on(f"PUT /v1/uploads/{UPLOAD}", append)
    server.on(f"GET /v1/uploads/{UPLOAD}", show)


# Building


def test_a_template_is_built_followed_and_returned_and_begun_from_by_its_digest(
    server: ScriptedServer, client: Client
) -> None:
    heard: list[str] = []
    auth = RegistryAuth(username="me", password=PASSWORD)
    made = client.templates.build(
        "tool:v1",
        on_log=lambda line: heard.append(f"{line.n} {line.stream} {line.text}"),
        image="images.example/a:1",
        auth=auth,
        ca_pem="PEM",
        steps=[{"run": "true"}, {"env": {"A": "b"}}],
        env={"C": "d"},
        workdir="/w",
        start=("serve", "-x"),
        ready="check",
        ready_timeout_s=5,
        cpus=2,
        memory_mib=512,
        ports=(80, 443),
        builder={"disk_mib": 1 << 14},
        timeout_s=60,
        no_cache=True,
    )
    assert (made.digest, made.tags, made.reference) == (DIGEST, ("tool:latest",), DIGEST)
    assert heard == ["0 stdout hello"]
    (sent,) = server.requests(STARTS)
    assert sent.headers["idempotency-key"]
    assert sent.json == {
        "name": "tool",
        "tag": "v1",
        "source": {
            "kind": "image",
            "reference": "images.example/a:1",
            "auth": {"username": "me", "password": PASSWORD},
            "ca_pem": "PEM",
        },
        "steps": [{"run": "true"}, {"env": {"A": "b"}}],
        "defaults": {
            "env": {"C": "d"},
            "workdir": "/w",
            "ports": [80, 443],
            "resources": {"cpus": 2, "memory_mib": 512},
            "entry": {"start": ["serve", "-x"], "ready": "check", "timeout_s": 5},
        },
        "resources": {"disk_mib": 1 << 14},
        "timeout_s": 60,
        "no_cache": True,
    }
    assert PASSWORD not in repr(auth)
    server.on("POST /v1/sandboxes", {"sandbox": sandbox(), "operation": operation()})
    Sandbox.create(made, client=client)
    assert server.requests("POST /v1/sandboxes")[0].json == {"template": DIGEST}


def test_templates_and_snapshots_are_sources_by_name_or_themselves(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/snapshots/snpaaaaaaaaaaaaaaaa", snapshot(kind="disk"))
    kept = client.snapshots.get("snpaaaaaaaaaaaaaaaa")
    for source in (
        {"template": "base:v1"},
        {"template": Template(digest=DIGEST)},
        {"snapshot": kept},
        {"snapshot": "snpb"},
    ):
        client.builds.start("tool", **source)
    assert [seen.json["source"] for seen in server.requests(STARTS)] == [
        {"kind": "template", "template": "base:v1"},
        {"kind": "template", "template": DIGEST},
        {"kind": "snapshot", "snapshot": "snpaaaaaaaaaaaaaaaa"},
        {"kind": "snapshot", "snapshot": "snpb"},
    ]
    assert server.requests(STARTS)[0].json == {"name": "tool", "source": {"kind": "template", "template": "base:v1"}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "exactly one"),
        ({"image": "a", "template": "b"}, "exactly one"),
        ({"image": "a", "memory": 1}, "memory"),
        ({"template": "a", "steps": [{"copy": {"to": "/x"}}]}, "context"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    server: ScriptedServer, client: Client, options: Any, problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        client.builds.start("tool", **options)
    with pytest.raises(InvalidRequest):
        client.builds.start("tool", template="a", auth=RegistryAuth(username="a", password="b"))
    assert server.seen == []


def test_a_dockerfile_and_what_steps_copy_are_sent_and_let_go_of(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile.dev").write_text("FROM scratch\n")
    (tmp_path / "x").write_text("copied")
    kept = bytearray()
    keep_pieces(server, kept)
    client.builds.start("tool", dockerfile=tmp_path, file="Dockerfile.dev", build_args={"V": "1"}, target="last")
    assert server.requests(STARTS)[0].json == {
        "name": "tool",
        "source": {"kind": "dockerfile", "upload": UPLOAD, "dockerfile": "Dockerfile.dev"},
        "build_args": {"V": "1"},
        "target": "last",
    }
    with tarfile.open(fileobj=io.BytesIO(kept)) as archive:
        assert archive.getnames() == ["Dockerfile.dev", "x"]
    kept.clear()
    client.builds.start("tool", template="base", steps=[{"copy": {"sources": ["x"], "to": "/y"}}], context=tmp_path)
    assert server.requests(STARTS)[1].json["steps"] == [{"copy": {"sources": ["x"], "to": "/y", "upload": UPLOAD}}]
    assert len(server.requests(f"DELETE /v1/uploads/{UPLOAD}")) == 2
    kept.clear()
    server.on(STARTS, error(429, "builds-max"))
    with pytest.raises(SpaceError):
        client.builds.start("tool", dockerfile=tmp_path, file="Dockerfile.dev")
    assert len(server.requests(f"DELETE /v1/uploads/{UPLOAD}")) == 3


def test_what_a_build_failed_with_is_raised_with_its_class_and_details(server: ScriptedServer, client: Client) -> None:
    described = {"code": "step-failed", "message": "It ended with 3.", "kind": "SandboxError", "details": {"line": 3}}
    server.on(ONE, build("failed", failure=described))
    with pytest.raises(SandboxError, match="ended with 3") as caught:
        client.templates.build("tool", image="a")
    assert (caught.value.code, caught.value.details["line"]) == ("step-failed", 3)
    assert caught.value.details["build_id"] == BUILD
    server.on(ONE, build("failed", failure={**described, "kind": "Forbidden", "code": "registry-not-trusted"}))
    with pytest.raises(Forbidden):
        client.builds.wait(BUILD)
    server.on(ONE, build("cancelled"))
    with pytest.raises(Conflict):
        client.builds.wait(BUILD)


def test_a_build_is_waited_for_no_longer_than_asked(server: ScriptedServer, client: Client) -> None:
    server.on(ONE, build("running"))
    with pytest.raises(OutcomeUnknown) as caught:
        client.builds.wait(BUILD, timeout_s=0.2)
    assert caught.value.code == "still-running"
    server.on(ONE, build("running"), build("succeeded"))
    assert client.builds.wait(Build.parse(build())).digest == DIGEST


def test_builds_are_listed_and_cancelled(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/builds", {"items": [build()], "next_cursor": None})
    server.on(f"POST /v1/builds/{BUILD}/cancel", build("running", cancelling=True))
    (found,) = client.builds.list(name="tool", state="pending")
    assert {"name": "tool", "state": "pending"}.items() <= server.seen[-1].query.items()
    assert client.builds.cancel(found).state == "running"


# Logs


def test_a_log_that_breaks_off_is_gone_on_with_where_it_was(server: ScriptedServer, client: Client) -> None:
    server.on(LOG, logged(said(0, "a"), said(1, "b")), error(503, "node-unavailable"), logged(said(2, "c"), END))
    assert [line.text for line in client.builds.log(BUILD)] == ["a", "b", "c"]
    asked = [(seen.query["from"], seen.query["follow"]) for seen in server.requests(LOG)]
    assert asked[0] == ("0", "true")
    assert set(asked[1:]) == {("2", "true")}


def test_a_log_may_be_read_from_a_line_and_not_followed(server: ScriptedServer, client: Client) -> None:
    assert [line.at.year for line in client.builds.log(BUILD, start=5, follow=False) if line.at] == [1970]
    assert server.requests(LOG)[0].query == {"from": "5", "follow": "false"}


def test_an_error_in_a_log_is_raised(server: ScriptedServer, client: Client) -> None:
    described = {"code": "node-protocol", "message": "No.", "kind": "HostError", "details": {}}
    server.on(LOG, logged({"type": "error", "error": described}))
    with pytest.raises(SpaceError) as caught:
        list(client.builds.log(BUILD))
    assert caught.value.code == "node-protocol"


# Uploads


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (async_uploads, sync_uploads):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
        monkeypatch.setattr(module, "BUSY_S", 0.0)


@pytest.mark.usefixtures("small_pieces")
def test_an_upload_goes_on_where_it_was_cut_off(server: ScriptedServer, client: Client, tmp_path: Path) -> None:
    data = os.urandom(4500)
    (tmp_path / "root.tar").write_bytes(data)
    kept = bytearray()
    keep_pieces(server, kept)
    (append,) = server.script[f"PUT /v1/uploads/{UPLOAD}"]

    async def half(request: Request) -> Response:
        """Keep half of a piece, and answer as a proxy does whose server was restarted."""
        kept.extend((await request.body())[:500])
        return Response(status_code=502)

    async def unheard(request: Request) -> Response:
        assert callable(append)
        await append(request)
        return error(503, "node-unavailable")

    server.on(f"PUT /v1/uploads/{UPLOAD}", append, error(409, "upload-busy"), unheard, append)
    told: list[tuple[int, int]] = []
    client.builds.start("tool", rootfs=tmp_path / "root.tar", progress=lambda *at: told.append(at))
    assert bytes(kept) == data
    assert server.requests("POST /v1/uploads")[0].json == {"size": 4500}
    assert told[-1] == (4500, 4500)
    kept.clear()
    server.on(f"PUT /v1/uploads/{UPLOAD}", half, half, append)
    client.builds.start("tool", archive=tmp_path / "root.tar")
    assert bytes(kept) == data


@pytest.mark.usefixtures("small_pieces")
def test_an_upload_that_does_not_go_on_is_given_up(server: ScriptedServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(b"x" * 10)
    server.on(f"PUT /v1/uploads/{UPLOAD}", error(409, "upload-busy"))
    server.on(f"GET /v1/uploads/{UPLOAD}", {"id": UPLOAD, "bytes": 0})
    with pytest.raises(Unavailable) as caught:
        client.builds.start("tool", rootfs=tmp_path / "root.tar")
    assert caught.value.code == "upload-stuck"


def test_a_file_that_is_not_there_is_told_as_the_system_does(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        client.builds.start("tool", rootfs=tmp_path / "absent")
    with pytest.raises(InvalidRequest) as caught:
        client.builds.start("tool", dockerfile=tmp_path)
    assert caught.value.code == "no-context"
    assert server.seen == []


# Looking and changing


def test_templates_are_listed_shown_tagged_deleted_and_prepared(server: ScriptedServer, client: Client) -> None:
    server.on("GET /v1/templates", {"items": [template()], "next_cursor": None})
    server.on("GET /v1/templates/tool", template())
    server.on("PUT /v1/templates/other/tags/v1", template(name="other", tag="v1"))
    server.on("PUT /v1/templates/tool/tags/latest", template())
    server.on("DELETE /v1/templates/tool/tags/v1", Response(status_code=204))
    server.on("DELETE /v1/templates/tool:v1", template(deleted_at="2026-01-02T03:04:05Z"))
    server.on(f"DELETE /v1/templates/{DIGEST}", template(deleted_at="2026-01-02T03:04:05Z"))
    server.on("POST /v1/templates/tool/warm", {"digest": DIGEST, "timings": {}})
    moves = [{"number": 1, "tag": "v1", "digest": DIGEST, "previous": None, "build_id": BUILD}]
    server.on("GET /v1/templates/tool/history", {"items": moves, "next_cursor": None})
    audited = {"digest": DIGEST, "tags": ["tool:v1"], "images": ["a", "b"], "untrusted": ["b"]}
    server.on("GET /v1/templates/audit", {"trusted": ["a"], "items": [audited]})
    (listed,) = client.templates.list(name="tool", untagged=True)
    assert {"name": "tool", "untagged": "true"}.items() <= server.seen[-1].query.items()
    found = client.templates.get("tool")
    assert (found.packages, found.build_id) == (({"name": "p", "version": "1"},), BUILD)
    assert client.templates.tag(listed, "other:v1").name == "other"
    assert server.seen[-1].json == {"digest": DIGEST}
    client.templates.tag("tool", "tool")
    client.templates.untag("tool:v1")
    assert client.templates.delete("tool:v1").deleted_at is not None
    assert client.templates.delete(found).deleted_at is not None
    client.templates.warm("tool", memory_mib=512)
    assert server.seen[-1].json == {"memory_mib": 512}
    assert [(move.tag, move.digest) for move in client.templates.history("tool")] == [("v1", DIGEST)]
    assert [(one.images, one.untrusted) for one in client.templates.audit()] == [(("a", "b"), ("b",))]


def test_gc_asks_for_what_is_old_only_when_told_to(server: ScriptedServer, client: Client) -> None:
    server.on("POST /v1/gc", {"strays": []})
    client.gc()
    client.gc(dry_run=True, untagged_s=60, cache_age_s=5, cache_bytes_max=0)
    assert [seen.json for seen in server.requests("POST /v1/gc")] == [
        {"dry_run": False},
        {"dry_run": True, "untagged_s": 60, "cache_age_s": 5, "cache_bytes_max": 0},
    ]


async def test_the_asynchronous_form_builds_too(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    kept = bytearray()
    keep_pieces(server, kept)
    async with AsyncClient(server.url, "sk_test") as client:
        heard: list[str] = []
        made = await client.templates.build("tool", on_log=lambda line: heard.append(line.text), dockerfile=tmp_path)
        assert (made.digest, heard) == (DIGEST, ["hello"])
    assert kept


# Contexts


def members(directory: Path, dockerfile: str | None = None) -> dict[str, tarfile.TarInfo]:
    with build_contexts.pack(directory, dockerfile) as file, tarfile.open(fileobj=file) as archive:
        return {member.name: member for member in archive}


def grow(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def test_the_same_content_is_the_same_context_whenever_and_in_whatever_order_it_was_made(tmp_path: Path) -> None:
    digests = set()
    for number, order in enumerate((["b", "a/x", "a.txt", "é"], ["é", "a.txt", "a/x", "b"])):
        directory = tmp_path / str(number)
        grow(directory, *order)
        os.utime(directory / "b", (number + 1, number + 1))
        (directory / "link").symlink_to("a/x")
        (directory / "b").chmod(0o755)
        with build_contexts.pack(directory) as file:
            digests.add(hashlib.sha256(file.read()).hexdigest())
    assert len(digests) == 1
    packed = members(tmp_path / "0")
    assert list(packed) == ["a", "a/x", "a.txt", "b", "link", "é"]
    assert (packed["b"].mode, packed["b"].uid, packed["b"].uname) == (0o755, 0, "")
    assert (packed["link"].type, packed["link"].linkname) == (tarfile.SYMTYPE, "a/x")


def test_a_dockerignore_leaves_out_what_it_says_but_never_itself_or_the_dockerfile(tmp_path: Path) -> None:
    grow(tmp_path, "Dockerfile", "keep", "node_modules/x/y", "a.log", "logs/keep.log", "deep/a/secret", "deep/a/other")
    (tmp_path / ".dockerignore").write_text(
        "# a comment\n*\n!keep\n!logs\nlogs/*\n!logs/keep.log\n!deep\n**/secret\n  \n"
    )
    assert set(members(tmp_path, "Dockerfile")) == {
        "Dockerfile",
        ".dockerignore",
        "keep",
        "logs",
        "logs/keep.log",
        "deep",
        "deep/a",
        "deep/a/other",
    }
    grow(tmp_path, "build/Dockerfile")
    (tmp_path / "build/Dockerfile.dockerignore").write_text("**\n!a.log\n")
    assert set(members(tmp_path, "build/Dockerfile")) == {
        "build",
        "build/Dockerfile",
        "build/Dockerfile.dockerignore",
        "a.log",
    }
    (tmp_path / ".dockerignore").write_text("[a\n")
    with pytest.raises(InvalidRequest, match=r"\.dockerignore"):
        build_contexts.pack(tmp_path, "Dockerfile")


def test_names_that_are_not_utf8_and_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe")).write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / ("long" * 60)).write_text("x")
    (tmp_path / "empty").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        packed = members(tmp_path)
    assert set(packed) == {os.fsdecode(b"\xff\xfe"), "dangling", "long" * 60, "empty"}
    assert packed["dangling"].linkname == "/nowhere"


def test_a_link_out_of_the_context_is_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    grow(tmp_path, "outside/secret", "context/file")
    (tmp_path / "context/out").symlink_to(tmp_path / "outside")
    assert set(members(tmp_path / "context")) == {"file", "out"}
