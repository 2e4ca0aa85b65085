"""The SDK against a real installation: what its users rely on, end to end."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from space import (
    AsyncClient,
    AsyncSandbox,
    Client,
    CommandFailed,
    Conflict,
    Exit,
    Forbidden,
    GuestError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Output,
    Sandbox,
    Tty,
    Unauthenticated,
)
from tests.client import wait_until
from tests.installation import Installation, patient

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[Client]:
    with Client(installation.url, installation.key) as client:
        yield client


@pytest.fixture(scope="module")
def sbx(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create("base", client=client) as sandbox:
        yield sandbox


def test_a_block_makes_a_sandbox_and_deletes_it(client: Client) -> None:
    with Sandbox.create("base", client=client, name="block", metadata={"for": "sdk"}, env={"A": "one\ntwo"}) as made:
        assert (made.state, made.info.ready, made.name) == ("running", True, "block")
        assert made.run(["printenv", "A"], check=True).stdout == "one\ntwo\n"
        assert [info.id for info in client.sandboxes(metadata={"for": "sdk"})] == [made.id]
    assert list(client.sandboxes(metadata={"for": "sdk"})) == []
    with pytest.raises(NotFound):
        Sandbox.connect(made.id, client=client)


def test_run_tells_exit_output_and_duration(sbx: Sandbox) -> None:
    """E1 E15"""
    result = sbx.run("printf hello; printf problem >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit) == ("hello", "problem", Exit("exited", 3))
    assert result.duration_s is not None
    assert sbx.run("kill -9 $$").exit.status == 137
    assert sbx.run(["sleep", "60"], timeout_s=0.2).exit.kind == "timed-out"
    with pytest.raises(CommandFailed):
        sbx.run("exit 1", check=True)


def test_run_feeds_text_and_bytes_alike(sbx: Sandbox) -> None:
    """E12"""
    assert sbx.run(["cat"], stdin="text é").stdout == "text é"
    binary = bytes(range(256)) * 4096
    assert sbx.run(["cat"], stdin=binary).stdout_bytes == binary
    assert sbx.run(["cat"]).stdout == ""


def test_a_program_that_is_not_there_is_an_error_and_no_exit(sbx: Sandbox) -> None:
    with pytest.raises((InvalidRequest, GuestError), match="/no/such"):
        sbx.run(["/no/such/program"])


def test_output_comes_live_and_each_stream_apart(sbx: Sandbox) -> None:
    command = sbx.start("echo one; echo err >&2; sleep 30; echo never")
    first = command.next_event(timeout_s=patient(10))
    second = command.next_event(timeout_s=patient(10))
    assert {(first.stream, first.data), (second.stream, second.data)} == {("stdout", b"one\n"), ("stderr", b"err\n")}
    command.kill()
    assert command.wait().signal == 9


def test_a_conversation_with_a_program(sbx: Sandbox) -> None:
    command = sbx.start(["python3", "-i", "-q"], stdin=True)
    for number in (3, 5):
        command.stdin.write(f"print({number} * 7)\n")
        wanted, heard = f"{number * 7}\n".encode(), b""
        while not heard.endswith(wanted):
            event = command.next_event(timeout_s=patient(20))
            heard += event.data if isinstance(event, Output) and event.stream == "stdout" else b""
    command.stdin.close()
    assert command.wait().ok


def test_large_input_is_whole_however_slowly_it_is_taken(sbx: Sandbox) -> None:
    data = os.urandom(5 * MIB)
    result = sbx.start("sleep 0.5; sha256sum", stdin=True).communicate(data)
    import hashlib

    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_reader_and_writer_may_be_two_threads(sbx: Sandbox) -> None:
    command, received = sbx.start(["cat"], stdin=True), bytearray()
    reader = threading.Thread(target=lambda: [received.extend(event.data) for event in command])
    reader.start()
    data = os.urandom(4 * MIB)
    command.stdin.write(data)
    command.stdin.close()
    reader.join(timeout=patient(60))
    assert bytes(received) == data


def test_a_command_outlives_its_handle_and_is_found_again(sbx: Sandbox) -> None:
    with sbx.start("for i in 1 2 3 4 5 6; do echo $i; sleep 0.1; done; exit 5") as command:
        assert next(iter(command)).data.startswith(b"1\n")
    again = sbx.command(command.id)
    assert b"".join(event.data for event in again) == b"1\n2\n3\n4\n5\n6\n"
    assert again.wait().code == 5
    assert b"".join(event.data for event in sbx.command(command.id).replay()) == b"1\n2\n3\n4\n5\n6\n"
    listed = {info.id: info for info in sbx.commands()}
    assert listed[command.id].exit == Exit("exited", 5)


def test_a_lost_connection_goes_on_without_the_reader_noticing(sbx: Sandbox) -> None:
    """E20"""
    enough = "/tmp/cut-often-enough"
    command = sbx.start(f"i=0; until [ -e {enough} ]; do echo $i; i=$((i+1)); sleep 0.005; done; echo end; exit 6")
    received, cuts = b"", [0]
    for event in command:
        received += event.data
        if len(cuts) <= 4 and len(received) >= cuts[-1] + 300:
            cuts.append(len(received))
            command._stream._socket._connection.socket.shutdown(2)
            if len(cuts) > 4:
                sbx.files.write(enough, b"")
    assert len(cuts) > 4
    lines = received.count(b"\n") - 1
    assert received == "".join(f"{i}\n" for i in range(lines)).encode() + b"end\n"
    assert command.wait().code == 6


def test_a_terminal_has_a_size_that_changes(sbx: Sandbox) -> None:
    command = sbx.start(["sh"], tty=Tty(31, 97), env={"PS1": "> "})
    command.stdin.write("stty size\n")
    seen = _until(command, b"31 97")
    command.resize(41, 107)
    command.stdin.write("stty size; exit 4\n")
    seen = _until(command, b"41 107")
    assert b"41 107" in seen
    assert command.wait().code == 4


def _until(command: object, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        event = command.next_event(timeout_s=patient(20))
        assert event is not None, seen
        seen += event.data
    return seen


def test_lifecycle_verbs_bring_it_down_and_back(client: Client) -> None:
    with Sandbox.create("base", client=client) as sandbox:
        sandbox.files.write("/home/user/kept", "kept")
        assert sandbox.pause().state == "succeeded"
        assert sandbox.state == "paused"
        with pytest.raises(Conflict):
            sandbox.run("true")
        sandbox.resume()
        assert sandbox.run("true").ok
        sandbox.suspend()
        assert sandbox.state == "suspended"
        sandbox.wake()
        assert sandbox.files.read_text("/home/user/kept") == "kept"
        sandbox.stop()
        assert sandbox.state == "stopped"
        sandbox.boot()
        assert sandbox.state == "running"
        assert sandbox.files.read_text("/home/user/kept") == "kept"
        assert sandbox.wake().state == "succeeded"


def test_a_sleeping_sandbox_wakes_for_a_request_when_asked_to(client: Client) -> None:
    with Sandbox.create("base", client=client, wake_on_request=True) as sandbox:
        sandbox.run("true", check=True)
        sandbox.suspend()
        assert sandbox.run("echo awake").stdout == "awake\n"
        assert sandbox.refresh().state == "running"


def test_files_of_any_size_and_name(sbx: Sandbox, tmp_path: Path) -> None:
    """F1 F6"""
    data = os.urandom(9 * MIB)
    sbx.files.write("/home/user/🤣 +%20\n.bin", data, mode=0o640)
    assert sbx.files.read("/home/user/🤣 +%20\n.bin") == data
    info = sbx.files.stat("/home/user/🤣 +%20\n.bin")
    assert (info.type, info.size, info.mode, info.user) == ("file", len(data), 0o640, "user")
    assert b"".join(sbx.files.read_stream("/home/user/🤣 +%20\n.bin", start=5, length=7)) == data[5:12]
    sbx.files.write_stream("/home/user/chunks", (bytes([n]) * 1000 for n in range(50)))
    assert sbx.files.stat("/home/user/chunks").size == 50_000
    local = tmp_path / "local"
    local.write_bytes(data)
    local.chmod(0o700)
    sbx.files.upload(local, "/home/user/up")
    assert sbx.files.stat("/home/user/up").mode == 0o700
    sbx.files.download("/home/user/up", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_directories_go_both_ways(sbx: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/f").write_bytes(b"content")
    (tmp_path / "tree/run").write_bytes(b"#!/bin/sh\necho ran\n")
    (tmp_path / "tree/run").chmod(0o755)
    sbx.files.upload(tmp_path / "tree", "/home/user/tree")
    assert sbx.run(["/home/user/tree/run"]).stdout == "ran\n"
    sbx.run("ln -s sub/f /home/user/tree/inner; ln -s /etc/passwd /home/user/tree/outer", check=True)
    left_out = sbx.files.download("/home/user/tree", tmp_path / "back")
    assert [Path(name).name for name in left_out] == ["outer"]
    assert (tmp_path / "back/inner").read_bytes() == b"content"
    assert (tmp_path / "back/run").stat().st_mode & 0o777 == 0o755


def test_directories_are_listed_moved_and_removed(sbx: Sandbox) -> None:
    sbx.files.mkdir("/home/user/d/e")
    sbx.files.write("/home/user/d/f", "x")
    assert [(info.name, info.type) for info in sbx.files.list("/home/user/d")] == [("e", "directory"), ("f", "file")]
    sbx.files.move("/home/user/d/f", "/home/user/d/g")
    assert sbx.files.exists("/home/user/d/g")
    assert not sbx.files.exists("/home/user/d/f")
    sbx.files.remove("/home/user/d", recursive=True)
    assert not sbx.files.exists("/home/user/d")
    with pytest.raises((GuestError, NotFound)):
        sbx.files.read("/home/user/d/g")


def test_operations_keys_and_usage_can_be_looked_at(client: Client, sbx: Sandbox, installation: Installation) -> None:
    created = next(op for op in client.operations.list(sandbox_id=sbx.id) if op.kind == "create")
    assert created.state == "succeeded"
    assert created.timings
    assert sbx.metrics()["now"]["memory_mib"] > 0
    made = client.keys.create("for-a-test")
    assert made.key
    with Client(installation.url, made.key) as other:
        assert other.sandbox_info(sbx.id).id == sbx.id
        client.keys.revoke(made.id)
        with pytest.raises(Unauthenticated):
            other.sandbox_info(sbx.id)


def test_events_tell_every_change(client: Client, installation: Installation) -> None:
    states: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        with Client(installation.url, installation.key) as listener:
            for event in listener.events():
                ready.set()
                if event.type == "sandbox":
                    states.append(f"{event.data['sandbox_id']} {event.data['state']}")
                if states and states[-1].endswith(" deleted"):
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < deadline
        with Sandbox.create("base", client=client) as sandbox:
            pass
        thread.join(timeout=2)
    mine = [state.split()[1] for state in states if state.startswith(sandbox.id)]
    assert mine[-2:] == ["deleting", "deleted"]


def test_a_quota_holds_and_says_which_limit_it_was(client: Client, installation: Installation) -> None:
    project = client.projects.create("quota-of-the-sdk")
    assert client.projects.limit(project.id, sandboxes=2, memory_mib=600).quota.sandboxes == 2
    with Client(installation.url, project.key) as member:
        assert member.projects.own().id == project.id
        with pytest.raises(Forbidden):
            member.projects.limit(project.id, sandboxes=None)
        with Sandbox.create(client=member, memory_mib=256) as first, Sandbox.create(client=member, memory_mib=256):
            used = member.projects.own().used
            assert (used.sandboxes, used.memory_mib) == (2, 512)
            with pytest.raises(LimitExceeded) as caught:
                first.fork()
            assert (caught.value.code, caught.value.details["quota"]) == ("quota-exceeded", "sandboxes")
            assert caught.value.retry_after_s is not None
            client.projects.limit(project.id, sandboxes=None)
            with pytest.raises(LimitExceeded) as caught:
                Sandbox.create(client=member, memory_mib=256)
            assert caught.value.details["quota"] == "memory_mib"
            first.suspend()
            with Sandbox.create(client=member, memory_mib=256), pytest.raises(LimitExceeded):
                first.wake()


def test_another_projects_key_finds_nothing(installation: Installation, sbx: Sandbox) -> None:
    with Client(installation.url, installation.other_key) as other:
        assert sbx.id not in [info.id for info in other.sandboxes()]
        with pytest.raises(NotFound):
            Sandbox.connect(sbx.id, client=other)


def test_a_node_that_is_killed_costs_a_reader_nothing(sbx: Sandbox, installation: Installation) -> None:
    command = sbx.start("i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.01; done")
    received = b""
    for event in command:
        if not received:
            installation.kill("node")
        received += event.data
    assert received == "".join(f"{i}\n" for i in range(300)).encode()
    assert command.wait().ok
    installation.wait_ready()
    wait_until(lambda: sbx.run("true").ok, what="running commands again")


@pytest.fixture
async def asbx(installation: Installation) -> AsyncIterator[AsyncSandbox]:
    async with (
        AsyncClient(installation.url, installation.key) as client,
        await AsyncSandbox.create(client=client) as sandbox,
    ):
        yield sandbox


async def test_the_asynchronous_form_does_many_things_at_once(asbx: AsyncSandbox, tmp_path: Path) -> None:
    async with asyncio.timeout(patient(100)), asyncio.TaskGroup() as group:
        runs = [group.create_task(asbx.run(f"sleep 0.2; echo {n}")) for n in range(20)]
        writes = [group.create_task(asbx.files.write(f"/home/user/f{n}", f"{n}")) for n in range(20)]
    assert [task.result().stdout for task in runs] == [f"{n}\n" for n in range(20)]
    assert all(task.done() for task in writes)
    assert len([info for info in await asbx.files.list("/home/user") if info.name.startswith("f")]) == 20


async def test_the_asynchronous_form_talks_to_a_program_from_two_tasks(asbx: AsyncSandbox) -> None:
    command = await asbx.start(["cat"], stdin=True)
    data = os.urandom(3 * MIB)

    async def write() -> None:
        await command.stdin.write(data)
        await command.stdin.close()

    async with asyncio.timeout(patient(100)), asyncio.TaskGroup() as group:
        group.create_task(write())
        received = b"".join([event.data async for event in command])
    assert received == data
    assert (await command.wait()).ok
