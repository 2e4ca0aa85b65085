"""`space template` as a process, against a scripted server on loopback."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tests.command_line import SPACE, environment, space
from tests.scripted_server import ScriptedServer, error, snapshot
from tests.unit.test_sdk_templates import (
    BUILD,
    DIGEST,
    END,
    LOG,
    ONE,
    STARTS,
    UPLOAD,
    build,
    keep_pieces,
    logged,
    said,
    template,
)

PASSWORD = "s3cret-of-the-registry"
CANCEL = f"POST /v1/builds/{BUILD}/cancel"
DEADLINE_S = 30


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on(STARTS, build())
        server.on(LOG, logged({**said(0, "FROM base"), "stream": "step"}, said(1, "hel\x1blo"), END))
        server.on(ONE, build("succeeded"))
        server.on("POST /v1/uploads", {"id": UPLOAD, "size": 1, "bytes": 0})
        server.on(f"DELETE /v1/uploads/{UPLOAD}", Response(status_code=204))
        yield server


def asked(server: ScriptedServer) -> dict[str, Any]:
    return server.requests(STARTS)[-1].json


# Building


def test_a_build_shows_its_log_prints_the_digest_and_succeeds(server: ScriptedServer) -> None:
    done = space(server, "template", "build", "tool:v1", "--from-image", "images.example/a:1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"tool:latest {DIGEST}\n"
    assert done.stderr.decode().splitlines() == ["FROM base", "hel�lo"]
    assert asked(server) == {
        "name": "tool",
        "tag": "v1",
        "source": {"kind": "image", "reference": "images.example/a:1"},
    }


def test_for_programs_the_build_is_one_json_document_and_nothing_else(server: ScriptedServer) -> None:
    done = space(server, "template", "build", "tool", "--from-template", "base", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == build("succeeded")
    failure = {"code": "step-failed", "message": "It ended with 3.", "kind": "SandboxError", "details": {"line": 3}}
    server.on(ONE, build("failed", failure=failure))
    done = space(server, "template", "build", "tool", "--from-template", "base", "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    told = json.loads(done.stderr)["error"]
    assert (told["code"], told["details"]["line"], told["details"]["build_id"]) == ("step-failed", 3, BUILD)


def test_a_failed_build_has_status_1_and_says_why(server: ScriptedServer) -> None:
    failure = {"code": "step-failed", "message": "It ended with 3.", "kind": "SandboxError", "details": {}}
    server.on(ONE, build("failed", failure=failure))
    done = space(server, "template", "build", "tool", "--from-template", "base")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"space: It ended with 3." in done.stderr
    assert b"space template logs" in done.stderr


def test_steps_are_carried_out_in_the_order_of_the_command_line(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    kept = bytearray()
    keep_pieces(server, kept)
    words = ["--env", "A=1", "--run", "one", "--copy", "a:/x:y", "--workdir=/w", "--run", "two -e", "-e", "B=2"]
    words += ["--user", "me", "--run", "three", "--context", str(tmp_path)]
    done = space(server, "template", "build", "tool", "--from-template", "base", *words)
    assert done.returncode == 0, done.stderr
    assert asked(server)["steps"] == [
        {"env": {"A": "1"}},
        {"run": "one"},
        {"copy": {"sources": ["a:/x"], "to": "y", "upload": UPLOAD}},
        {"workdir": "/w"},
        {"run": "two -e"},
        {"env": {"B": "2"}},
        {"user": "me"},
        {"run": "three"},
    ]
    assert kept


def test_everything_that_can_be_said_of_a_template_is_sent(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile.dev").write_text("FROM scratch\n")
    (tmp_path / "ca.pem").write_text("PEM")
    keep_pieces(server, bytearray())
    words = ["--dockerfile", str(tmp_path), "-f", "Dockerfile.dev", "--build-arg", "V=1", "--target", "last"]
    words += ["--start", "serve", "--ready", "check", "--cpus", "2", "--memory", "512", "--disk", "2048"]
    words += ["--port", "80", "--port", "443", "--label", "team=a", "--builder", "cpus=4", "--builder", "disk_mib=1000"]
    words += ["--timeout", "60", "--no-cache", "--ca-cert", str(tmp_path / "ca.pem")]
    done = space(server, "template", "build", "tool", *words)
    assert done.returncode == 0, done.stderr
    assert asked(server) == {
        "name": "tool",
        "source": {"kind": "dockerfile", "upload": UPLOAD, "dockerfile": "Dockerfile.dev", "ca_pem": "PEM"},
        "build_args": {"V": "1"},
        "target": "last",
        "defaults": {
            "entry": {"start": "serve", "ready": "check"},
            "resources": {"cpus": 2.0, "memory_mib": 512, "disk_mib": 2048},
            "ports": [80, 443],
            "labels": {"team": "a"},
        },
        "resources": {"cpus": 4.0, "disk_mib": 1000},
        "timeout_s": 60.0,
        "no_cache": True,
    }


def test_archives_root_file_systems_and_snapshots_are_sources(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "file.tar").write_bytes(b"tar")
    server.on("GET /v1/snapshots", {"items": [snapshot(name="ready", kind="disk")], "next_cursor": None})
    for words, source in (
        (["--from-archive", str(tmp_path / "file.tar")], {"kind": "archive", "upload": UPLOAD}),
        (["--from-rootfs", str(tmp_path / "file.tar")], {"kind": "rootfs", "upload": UPLOAD}),
        (["--from-snapshot", "ready"], {"kind": "snapshot", "snapshot": "snpaaaaaaaaaaaaaaaa"}),
    ):
        keep_pieces(server, bytearray())
        done = space(server, "template", "build", "tool", *words)
        assert done.returncode == 0, done.stderr
        assert asked(server)["source"] == source


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--from-image", "a", "--from-template", "b"],
        ["--from-template", "a", "--copy", "nowhere"],
        ["--from-template", "a", "--env", "novalue"],
        ["--from-template", "a", "--builder", "cpus=many"],
        ["--from-image", "a", "--registry-password-stdin"],
        ["--from-rootfs", "/nowhere/at/all"],
    ],
)
def test_a_command_line_that_makes_no_sense_has_status_2_and_sends_nothing(
    server: ScriptedServer, words: list[str]
) -> None:
    done = space(server, "template", "build", "tool", *words)
    assert (done.returncode, done.stdout) == (2, b"")
    assert server.seen == []


def test_a_password_comes_from_stdin_or_a_file_and_is_shown_nowhere(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    image = ["template", "build", "tool", "--from-image", "images.example/a", "--registry-user", "me"]
    auth = {"username": "me", "password": PASSWORD}
    done = space(server, *image, "--registry-password-stdin", stdin=f"{PASSWORD}\n".encode())
    assert done.returncode == 0, done.stderr
    assert asked(server)["source"]["auth"] == auth
    assert PASSWORD.encode() not in done.stdout + done.stderr
    done = space(
        server, *image, "--registry-password-file", str(tmp_path / "password"), "--registry", "images.example:5000"
    )
    assert asked(server)["source"]["auth"] == {**auth, "registry": "images.example:5000"}
    server.on(STARTS, error(422, "invalid-request"))
    done = space(server, *image, "--registry-password-stdin", stdin=PASSWORD.encode())
    assert done.returncode == 1
    assert PASSWORD.encode() not in done.stdout + done.stderr


def test_without_waiting_the_id_is_printed(server: ScriptedServer) -> None:
    done = space(server, "template", "build", "tool", "--from-template", "base", "--no-wait")
    assert done.stdout.decode() == f"{BUILD}\n"
    assert server.requests(LOG) == []


def hang(server: ScriptedServer) -> None:
    """Let the log say one line and then nothing more."""

    async def lines() -> Any:
        yield json.dumps(said(0, "working")).encode() + b"\n"
        await asyncio.Event().wait()

    async def answer(_request: Request) -> Response:
        return StreamingResponse(lines(), media_type="application/x-ndjson")

    server.on(LOG, answer)


def test_ctrl_c_cancels_the_build_and_has_the_status_of_an_interrupted_program(server: ScriptedServer) -> None:
    hang(server)
    server.on(CANCEL, build("running", cancelling=True))
    words = [*SPACE, "template", "build", "tool", "--from-template", "base"]
    with subprocess.Popen(
        words, env=environment(server), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout) == (130, b"")
    assert BUILD.encode() in stderr
    assert b"Traceback" not in stderr
    assert len(server.requests(CANCEL)) == 1


def test_at_a_terminal_the_step_is_shown_below_the_log(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    keep_pieces(server, bytearray())
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [*SPACE, "template", "build", "tool", "--dockerfile", str(tmp_path)],
            env=environment(server),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave,
        )
        os.close(slave)
        shown, ends = b"", time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            try:
                data = os.read(master, 65536)
            except OSError:  # The other end is closed.
                break
            shown += data
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(master)
    assert (process.returncode, stdout.decode()) == (0, f"tool:latest {DIGEST}\n")
    text = shown.decode(errors="replace")
    assert "FROM base" in text
    assert "hel�lo" in text, "what was built cannot move the cursor"


# Looking and changing


def test_templates_are_listed_with_where_they_come_from(server: ScriptedServer) -> None:
    base = template(name="base", builtin=True, source={}, bytes=1 << 20)
    own = template(source={"kind": "image", "reference": "images.example/a:1"})
    loose = template(name=None, tag=None, source={"kind": "rootfs", "upload": "x"})
    server.on("GET /v1/templates", {"items": [base, own, loose], "next_cursor": None})
    done = space(server, "template", "ls")
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert rows[0] == ["TEMPLATE", "DIGEST", "SIZE", "FROM", "CREATED"]
    assert [row[0] for row in rows[1:]] == ["base:latest", "tool:latest", "-"]
    assert rows[1][2:6] == ["1.0", "MiB", "built", "in"]
    assert rows[2][4:6] == ["image", "images.example/a:1"]
    assert json.loads(space(server, "template", "ls", "tool", "--untagged", "--json").stdout) == [base, own, loose]
    assert {"name": "tool", "untagged": "true"}.items() <= server.seen[-1].query.items()


def test_a_template_is_shown_with_its_packages_and_tagged(server: ScriptedServer) -> None:
    packages = [{"name": "curl", "version": "8", "manager": "deb"}]
    server.on("GET /v1/templates/tool", template(packages=packages))
    server.on("PUT /v1/templates/tool/tags/stable", template(tag="stable"))
    done = space(server, "template", "inspect", "tool")
    text = done.stdout.decode()
    assert DIGEST in text
    assert "curl     8        deb" in text
    assert json.loads(space(server, "template", "inspect", "tool", "--json").stdout)["packages"] == packages
    done = space(server, "template", "tag", "tool", "tool:stable", "--json")
    assert json.loads(done.stdout)["tag"] == "stable"
    assert server.seen[-1].json == {"digest": DIGEST}


def test_one_that_cannot_be_deleted_keeps_no_other_from_it(server: ScriptedServer) -> None:
    server.on("DELETE /v1/templates/tool:v1", template(deleted_at="2026-01-02T03:04:05Z"))
    server.on("DELETE /v1/templates/base", error(403, "template-builtin", "It is not the project's."))
    done = space(server, "template", "rm", "base", "tool:v1")
    assert done.returncode == 1
    assert b"not the project's" in done.stderr
    assert len(server.requests("DELETE /v1/templates/tool:v1")) == 1


def test_the_history_of_a_name_is_a_row_for_each_move(server: ScriptedServer) -> None:
    moves = [
        {"number": 2, "tag": "v1", "digest": None, "previous": DIGEST, "build_id": None},
        {"number": 1, "tag": "v1", "digest": DIGEST, "previous": None, "build_id": BUILD},
    ]
    server.on("GET /v1/templates/tool/history", {"items": moves, "next_cursor": None})
    rows = [line.split() for line in space(server, "template", "history", "tool").stdout.decode().splitlines()]
    assert rows[0] == ["WHEN", "TAG", "DIGEST", "BEFORE", "BUILD"]
    assert [row[1:] for row in rows[1:]] == [["v1", "-", DIGEST[:19], "-"], ["v1", DIGEST[:19], "-", BUILD]]
    assert json.loads(space(server, "template", "history", "tool", "--json").stdout) == moves


def test_templates_are_prepared_one_by_one_or_all_of_the_project(server: ScriptedServer) -> None:
    for name in ("tool", DIGEST):
        server.on(f"POST /v1/templates/{name}/warm", {"digest": DIGEST, "timings": {}})
    assert space(server, "template", "warm", "tool", "--memory", "512").returncode == 0
    assert server.seen[-1].json == {"memory_mib": 512}
    listed = [template(builtin=True, digest="sha256:b"), template(), template(tag="v1")]
    server.on("GET /v1/templates", {"items": listed, "next_cursor": None})
    done = space(server, "template", "push-cache")
    assert done.stdout.decode().split() == [DIGEST]
    done = space(server, "template", "push-cache", "absent", "tool")
    assert (done.returncode, done.stdout) == (1, b"tool\n")


def test_an_audit_has_status_1_when_an_image_is_not_trusted(server: ScriptedServer) -> None:
    one = {"digest": DIGEST, "tags": ["tool:v1"], "images": ["a.example/x", "b.example/y"], "untrusted": []}
    server.on("GET /v1/templates/audit", {"trusted": None, "items": [one]})
    assert space(server, "template", "audit").returncode == 0
    server.on("GET /v1/templates/audit", {"trusted": ["a"], "items": [{**one, "untrusted": ["b.example/y"]}]})
    done = space(server, "template", "audit")
    assert done.returncode == 1
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert [row[2:] for row in rows[1:]] == [["a.example/x", "yes"], ["b.example/y", "no"]]


def test_builds_are_listed_followed_and_cancelled(server: ScriptedServer) -> None:
    failure = {"code": "step-failed", "message": "No.", "kind": "SandboxError", "details": {}}
    server.on("GET /v1/builds", {"items": [build("failed", step=2, steps=5, failure=failure)], "next_cursor": None})
    server.on(CANCEL, build("running", cancelling=True))
    rows = [line.split() for line in space(server, "template", "builds", "tool").stdout.decode().splitlines()]
    assert rows[1][:5] == [BUILD, "tool:latest", "failed", "2/5", "step-failed"]
    done = space(server, "template", "logs", BUILD)
    assert done.stdout.decode().splitlines() == ["FROM base", "hel�lo"]
    assert server.requests(LOG)[-1].query["follow"] == "false"
    done = space(server, "template", "logs", BUILD, "--follow", "--json")
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == [0, 1]
    assert server.requests(LOG)[-1].query["follow"] == "true"
    assert space(server, "template", "cancel", BUILD).returncode == 0


def test_gc_removes_what_is_old_only_when_told_to(server: ScriptedServer) -> None:
    server.on("POST /v1/gc", {"strays": []})
    assert space(server, "gc").returncode == 0
    words = ["--dry-run", "--untagged-days", "2", "--cache-days", "0.5", "--cache-mib", "1"]
    assert space(server, "gc", *words).returncode == 0
    assert [seen.json for seen in server.requests("POST /v1/gc")] == [
        {"dry_run": False},
        {"dry_run": True, "untagged_s": 172800.0, "cache_age_s": 43200.0, "cache_bytes_max": 1 << 20},
    ]


def test_the_command_line_starts_without_loading_what_only_builds_need() -> None:
    program = "import sys, space.cli.app; print([m for m in sys.modules if 'dockerfile' in m or m.startswith('rich.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "dockerfile" not in done.stdout
