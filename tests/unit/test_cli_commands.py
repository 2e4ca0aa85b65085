"""The command line as a process, against a scripted server on loopback."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.command_line import CMD, FILES, ID, SPACE, ended, environment, out, says, server, space
from tests.scripted_server import ScriptedServer, error, operation, sandbox

__all__ = ["server"]


# Running programs


def test_run_makes_streams_passes_the_status_on_and_deletes(server: ScriptedServer) -> None:
    server.attach = [says(out(0, b"to stdout\xff"), out(0, b"to stderr", 2), ended(code=7))]
    done = space(server, "run", "base", "--", "python3", "-c", "print(1)")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"to stdout\xff", b"to stderr")
    assert server.requests(f"POST /v1/sandboxes/{ID}/commands")[0].json["argv"] == ["python3", "-c", "print(1)"]
    assert server.seen[-1].method == "DELETE"


def test_run_keep_leaves_the_sandbox_and_names_it(server: ScriptedServer) -> None:
    server.attach = [says(ended())]
    done = space(server, "run", "--keep", "--memory", "512", "--name", "demo", "base", "true")
    assert done.returncode == 0
    assert ID.encode() in done.stderr
    assert server.requests("POST /v1/sandboxes")[0].json == {
        "template": "base",
        "name": "demo",
        "resources": {"memory_mib": 512},
    }
    assert not server.requests(f"DELETE /v1/sandboxes/{ID}")


@pytest.mark.parametrize(
    ("exit_record", "status"),
    [
        (ended(code=255), 255),
        (ended("signaled", None, 9), 137),
        (ended("signaled", None, 11), 139),
        (ended("timed-out", None, 9), 124),
        (ended("oom-killed", None, 9), 137),
        (ended("lost", None), 125),
    ],
)
def test_every_kind_of_exit_has_its_status(server: ScriptedServer, exit_record: dict[str, Any], status: int) -> None:
    """E15"""
    server.attach = [says(exit_record)]
    assert space(server, "exec", "demo", "--", "x").returncode == status


def test_exec_finds_the_sandbox_by_name_and_passes_options_on(server: ScriptedServer) -> None:
    server.attach = [says(ended())]
    done = space(server, "exec", "demo", "-e", "A=1", "-u", "root", "-w", "/tmp", "--timeout", "5", "--", "env", "-e")
    assert done.returncode == 0, done.stderr
    assert server.requests(f"POST /v1/sandboxes/{ID}/commands")[0].json == {
        "argv": ["env", "-e"],
        "env": {"A": "1"},
        "user": "root",
        "cwd": "/tmp",
        "timeout_s": 5.0,
        "stdin": True,
    }


def test_a_name_that_two_sandboxes_have_is_refused_with_both_ids(server: ScriptedServer) -> None:
    server.on("GET /v1/sandboxes", {"items": [sandbox(id="sbx1", name="demo"), sandbox(id="sbx2", name="demo")]})
    done = space(server, "exec", "demo", "true")
    assert done.returncode == 125
    assert b"sbx1, sbx2" in done.stderr


def test_piped_input_arrives_and_its_end_too(server: ScriptedServer) -> None:
    """E12"""
    received = bytearray()

    async def cat(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        while (frame := (await websocket.receive()).get("bytes")) is not None:
            received.extend(frame[9:])
            await websocket.send_json({"type": "ack", "stdin": len(received)})
        await websocket.send_bytes(out(0, bytes(received[:1000])))
        await websocket.send_json(ended())
        await websocket.close()

    server.attach = [cat]
    data = os.urandom(3_000_000)
    done = space(server, "exec", ID, "cat", stdin=data)
    assert done.returncode == 0, done.stderr
    assert bytes(received) == data
    assert done.stdout == data[:1000]


def test_ctrl_c_goes_to_the_program_and_its_end_to_us(server: ScriptedServer) -> None:
    signalled = asyncio.Event()

    async def sleeper(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        await websocket.send_bytes(out(0, b"ready\n"))
        await signalled.wait()
        await websocket.send_json(ended("signaled", None, 2))
        await websocket.close()

    async def signal_route(request: Any) -> Response:
        assert (await request.json()) == {"signal": "INT"}
        signalled.set()
        return Response(status_code=204)

    server.attach = [sleeper]
    server.on(f"POST /v1/commands/{CMD}/signal", signal_route)
    process = subprocess.Popen(
        [*SPACE, "run", "base", "sleep"], env=environment(server), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert server.requests(f"DELETE /v1/sandboxes/{ID}")


def test_an_interrupt_before_the_sandbox_is_ready_leaves_no_sandbox(server: ScriptedServer) -> None:
    asked = threading.Event()

    async def never(_request: Any) -> Response:
        asked.set()
        await asyncio.sleep(60)
        return Response(status_code=500)

    server.on(
        "POST /v1/sandboxes", {"sandbox": sandbox(state="creating", ready=False), "operation": operation("pending")}
    )
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", never)
    process = subprocess.Popen(
        [*SPACE, "run", "base", "true"], env=environment(server), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert asked.wait(timeout=30)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert b"Traceback" not in process.stderr.read()
    assert server.requests(f"DELETE /v1/sandboxes/{ID}")


def test_a_reader_that_has_enough_ends_the_program(server: ScriptedServer) -> None:
    async def endless(websocket: WebSocket) -> None:
        await websocket.send_json({"type": "started", "command": CMD, "stdin": 0, "stdin_next": 0})
        at = 0
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                await websocket.send_bytes(out(at, b"y\n" * 10_000))
                at += 20_000

    server.attach = [endless]
    server.on(f"POST /v1/commands/{CMD}/signal", Response(status_code=204))
    process = subprocess.Popen(
        [*SPACE, "exec", ID, "yes"],
        env=environment(server),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(10) == b"y\n" * 5
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    assert server.requests(f"POST /v1/commands/{CMD}/signal")[0].json == {"signal": "PIPE"}


def test_failures_of_the_platform_are_125_and_of_the_program_126_and_127(server: ScriptedServer) -> None:
    server.on(f"POST /v1/sandboxes/{ID}/commands", error(409, "wrong-state", "It is suspended.", state="suspended"))
    done = space(server, "exec", ID, "x")
    assert done.returncode == 125
    assert done.stderr.decode().splitlines() == [
        "space: It is suspended.",
        "       `space wake SANDBOX` makes it run again.",
    ]
    server.on(f"POST /v1/sandboxes/{ID}/commands", error(422, "program-not-found", "No such program: nope"))
    assert space(server, "exec", ID, "nope").returncode == 127
    server.on(
        f"POST /v1/sandboxes/{ID}/commands", error(422, "program-not-executable", "/etc/passwd: Permission denied")
    )
    for words in (["exec", ID], ["run", "base", "--"]):
        assert space(server, *words, "/etc/passwd").returncode == 126


def test_wrong_words_are_a_usage_error(server: ScriptedServer) -> None:
    for words in (
        ["exec", ID],
        ["nonsense"],
        ["ls", "--nonsense"],
        ["cp", "a", "b"],
        ["exec", ID, "-e", "A", "--", "x"],
        ["shell", ID],
    ):
        done = space(server, *words)
        assert done.returncode == 2, words
        assert done.stderr
    assert not server.requests(f"POST /v1/sandboxes/{ID}/commands")


# Looking


def test_lists_are_columns_in_a_pipe_and_json_on_request(server: ScriptedServer) -> None:
    lines = space(server, "ls").stdout.decode().splitlines()
    assert lines[0].split() == ["SANDBOX", "NAME", "STATE", "TEMPLATE", "DRIVER", "CREATED"]
    assert lines[1].split()[:4] == [ID, "demo", "running", "base"]
    assert json.loads(space(server, "ls", "--json").stdout) == [sandbox(name="demo")]
    assert space(server, "ls", "-q").stdout.decode() == f"{ID}\n"
    assert "x 'a b'" in space(server, "ps", "demo").stdout.decode()
    assert json.loads(space(server, "ps", "demo", "--json").stdout)[0]["id"] == CMD


def test_inspect_shows_sandboxes_commands_and_operations(server: ScriptedServer) -> None:
    server.on("GET /v1/operations/opaaaaaaaaaaaaaaaa", operation())
    assert json.loads(space(server, "inspect", "demo", "--json").stdout)["id"] == ID
    assert json.loads(space(server, "inspect", CMD, "--json").stdout)["id"] == CMD
    assert json.loads(space(server, "inspect", "opaaaaaaaaaaaaaaaa", "--json").stdout)["kind"] == "create"
    assert re.search(r"^state +running$", space(server, "inspect", "demo").stdout.decode(), re.MULTILINE)


def test_errors_are_json_when_json_is_asked_for(server: ScriptedServer) -> None:
    done = space(server, "inspect", "sbxbbbbbbbbbbbbbbbb", "--json")
    assert done.returncode == 1
    assert json.loads(done.stderr)["error"]["code"] == "not-found"


def test_lifecycle_verbs_take_many_and_one_that_fails_keeps_no_other(server: ScriptedServer) -> None:
    accepted = {"sandbox": sandbox(), "operation": operation(kind="pause")}
    server.on(f"POST /v1/sandboxes/{ID}/pause", error(409, "wrong-state", state="stopped"), accepted)
    done = space(server, "pause", ID, "demo")
    assert done.returncode == 1
    assert len(server.requests(f"POST /v1/sandboxes/{ID}/pause")) == 2
    server.on(f"POST /v1/sandboxes/{ID}/start", accepted)
    assert space(server, "start", "demo").returncode == 0
    done = space(server, "rm", "demo", "--no-wait")
    assert done.stdout.decode() == "opaaaaaaaaaaaaaaaa\n"


def test_a_result_can_be_had_as_json(server: ScriptedServer) -> None:
    result = {"exit": {"kind": "exited", "code": 3, "signal": None}, "stdout": "o", "stderr": "e", "encoding": "utf-8"}
    server.on(f"POST /v1/sandboxes/{ID}/exec", result)
    done = space(server, "exec", "--json", "demo", "--", "x", "--json", stdin=b"fed")
    assert done.returncode == 3
    shown = json.loads(done.stdout)
    assert (shown["exit"]["code"], shown["stdout"], shown["stderr"]) == (3, "o", "e")
    assert server.requests(f"POST /v1/sandboxes/{ID}/exec")[0].json == {"argv": ["x", "--json"], "stdin_text": "fed"}


def test_create_prints_the_id_alone(server: ScriptedServer) -> None:
    done = space(server, "create", "base", "--name", "demo", "-m", "a=b", "--wake-on-request")
    assert done.stdout.decode() == f"{ID}\n"
    assert server.requests("POST /v1/sandboxes")[0].json == {
        "template": "base",
        "name": "demo",
        "metadata": {"a": "b"},
        "wake_on_request": True,
    }


def test_logs_keep_the_streams_apart(server: ScriptedServer) -> None:
    documents = [
        {"type": "output", "stream": "stdout", "offset": 0, "data": "one", "encoding": "utf-8"},
        {"type": "output", "stream": "stderr", "offset": 0, "data": "two", "encoding": "utf-8"},
        {"type": "gap", "stream": "stdout", "from": 3, "to": 9},
        ended(),
    ]
    server.on(f"GET /v1/commands/{CMD}/output", Response("".join(json.dumps(d) + "\n" for d in documents)))
    done = space(server, "logs", CMD)
    assert done.stdout == b"one"
    assert done.stderr.startswith(b"two")
    assert b"no longer kept" in done.stderr
    kept = [json.loads(line) for line in space(server, "logs", CMD, "--json").stdout.splitlines()]
    assert kept[0] == {"stream": "stdout", "data": "one"}


def test_operations_are_listed_shown_and_waited_for(server: ScriptedServer) -> None:
    server.on("GET /v1/operations", {"items": [operation()], "next_cursor": None})
    server.on("GET /v1/operations/op1", operation("running", id="op1"), operation(id="op1"))
    assert "succeeded" in space(server, "ops").stdout.decode()
    assert json.loads(space(server, "ops", "op1", "--wait", "--json").stdout)["state"] == "succeeded"


def test_keys_are_made_listed_and_revoked(server: ScriptedServer) -> None:
    key = {"id": "key1", "name": "ci", "role": "member", "created_at": "2026-01-02T03:04:05Z", "last_used_at": None}
    server.on("POST /v1/keys", {**key, "key": "sk_new"})
    server.on("GET /v1/keys", {"items": [key], "next_cursor": None})
    server.on("DELETE /v1/keys/key1", Response(status_code=204))
    assert space(server, "keys", "create", "ci").stdout == b"sk_new\n"
    listed = space(server, "keys", "ls").stdout
    assert b"key1" in listed
    assert b"sk_" not in listed
    assert space(server, "keys", "revoke", "key1").returncode == 0


def test_env_is_for_a_shell_to_eval(server: ScriptedServer, tmp_path: Path) -> None:
    credentials = tmp_path / "space/credentials"
    credentials.parent.mkdir()
    credentials.write_text(json.dumps({"url": "http://h:1", "api_key": "sk_'; touch evil"}))
    credentials.chmod(0o600)
    env = {"PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path)}
    printed = subprocess.run([*SPACE, "env"], env=env, capture_output=True, text=True, check=True).stdout
    shell = subprocess.run(
        ["sh", "-c", f'{printed}\nprintf "%s|%s" "$SPACE_URL" "$SPACE_API_KEY"'],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert shell.stdout == "http://h:1|sk_'; touch evil"
    assert not (tmp_path / "evil").exists()


# Copying


def test_files_are_copied_both_ways_and_through_pipes(server: ScriptedServer, tmp_path: Path) -> None:
    stat = {"name": "f", "type": "file", "size": 3, "mode": "0644"}
    server.on(f"PUT {FILES}", {})
    server.on(f"GET {FILES}", Response(b"abc"))
    server.on(f"GET {FILES}/stat", {**stat, "type": "directory"}, {**stat, "type": "directory"}, stat)
    (tmp_path / "local.txt").write_bytes(b"local")
    assert space(server, "cp", str(tmp_path / "local.txt"), "demo:/home/user").returncode == 0
    put = server.requests(f"PUT {FILES}")[0]
    assert (put.query["path"], put.body) == ("/home/user/local.txt", b"local")
    assert space(server, "cp", "demo:/f", str(tmp_path)).returncode == 0
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert space(server, "cp", "demo:/f", "-").stdout == b"abc"
    assert space(server, "cp", "-", "demo:/g", stdin=b"piped").returncode == 0
    assert server.requests(f"PUT {FILES}")[1].body == b"piped"


def test_a_directory_is_copied_under_its_own_name(server: ScriptedServer, tmp_path: Path) -> None:
    server.on(f"PUT {FILES}/archive", {})
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_bytes(b"x")
    assert space(server, "cp", str(tmp_path / "tree"), "demo:/home/user/").returncode == 0
    put = server.requests(f"PUT {FILES}/archive")[0]
    assert put.query["path"] == "/home/user/tree"
    with tarfile.open(fileobj=io.BytesIO(put.body)) as archive:
        assert archive.getnames() == ["f"]
