"""Forks and snapshots on a real installation: what a fork shares with its source, and what it must not."""

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from space import Client, InvalidRequest, Sandbox
from tests.client import Api, error_code, wait_until
from tests.installation import Installation, patient, usual_driver

# Each of them computes all the time, which an emulated processor does with one of the host's.
FORKS = 8 if usual_driver() == "gvisor" else 3
MIB = 1 << 20
DISK_MIB = 256
RANDOM_PROCESS = """
import os, random, signal, time

def reseed(number, frame):
    random.seed(os.urandom(32))

if os.path.exists("/home/user/reseeds"):
    signal.signal(signal.SIGUSR1, reseed)
random.seed(7)
mark = os.urandom(16).hex()
for turn in range(10**9):
    with open("draws.new", "w") as file:
        file.write(f"{mark} {turn} {random.random()}")
    os.replace("draws.new", "draws")
    time.sleep(0.01)
"""
ADDRESS = """python3 -c "
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for index, name in socket.if_nameindex():
        if name != 'lo':
            answer = fcntl.ioctl(s, 0x8915, struct.pack('256s', name.encode()))
            print(socket.inet_ntoa(answer[20:24]))
" """
PAIR = """
import os, socket, threading, time

server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
while True:
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    with open("beats.new", "w") as file:
        file.write(str(time.time()))
    os.replace("beats.new", "beats")
    time.sleep(0.02)
"""
RESEED = "#!/bin/sh\necho $SPACE_EVENT >>/run/events\npkill -USR1 -u user -f random_process.py\n"


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[Client]:
    with Client(installation.url, installation.key) as client:
        yield client


@pytest.fixture
def source(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create("base", client=client, memory_mib=256, metadata={"for": "forks"}) as sandbox:
        yield sandbox


def start_random_process(sandbox: Sandbox) -> None:
    sandbox.files.write("/home/user/random_process.py", RANDOM_PROCESS)
    sandbox.start(["python3", "random_process.py"]).detach()
    wait_until(lambda: sandbox.files.exists("/home/user/draws"), what="the first draw")


def fresh_draw(sandbox: Sandbox) -> tuple[str, int, float]:
    """What the process has drawn after this moment: its mark, the turn, the number."""
    sandbox.run("rm -f draws; until [ -s draws ]; do sleep 0.01; done", check=True, timeout_s=patient(30))
    mark, turn, number = sandbox.files.read_text("/home/user/draws").split()
    return mark, int(turn), float(number)


def expected(turn: int) -> float:
    """What an undisturbed generator with that seed has drawn in that turn."""
    return next(itertools.islice(iter(random.Random(7).random, None), turn, None))


def tokens(api: Api, sandbox: str) -> str:
    return str(api.call("POST", f"/v1/sandboxes/{sandbox}/access").json()["token"])


def link_of(installation: Installation, sandbox: str) -> frozenset[str]:
    """The addresses from which the gateway takes what comes for the sandbox's."""
    register = [(path.name, str(path.readlink())) for path in (installation.settings.run_dir / "links").iterdir()]
    found = frozenset(address for address, whose in register if whose.startswith(f"{sandbox},"))
    assert found, register
    return found


def all_different(values: list[Any]) -> bool:
    return len(set(values)) == len(values)


def test_forks_have_their_own_identity_and_randomness_and_their_sources_memory(
    client: Client, source: Sandbox, api: Api, installation: Installation
) -> None:
    """L15: machine-id, host name, address, token and kernel randomness are pairwise distinct; memory is the source's."""
    start_random_process(source)
    mark, turn, _ = fresh_draw(source)
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in source.fork(FORKS)]
        everyone = [source, *forks]
        assert [fork.info.forked_from for fork in forks] == [source.id] * FORKS
        for what in (
            "head -c 32 /dev/urandom | sha256sum",
            "python3 -c 'import uuid; print(uuid.uuid4())'",
            "cat /etc/machine-id",
            "cat /proc/sys/kernel/hostname",
            # Virtual machines have one address inside, and each another one outside.
            *([ADDRESS] if usual_driver() == "gvisor" else []),
        ):
            seen = [sandbox.run(what, check=True).stdout.strip() for sandbox in everyone]
            assert all(seen), what
            assert all_different(seen), (what, seen)
        assert all_different([link_of(installation, sandbox.id) for sandbox in everyone])
        assert all_different([tokens(api, sandbox.id) for sandbox in everyone])
        draws = [fresh_draw(fork) for fork in forks]
        assert {found for found, _, _ in draws} == {mark}
        assert all(later > turn for _, later, _ in draws)
        assert [number for _, _, number in draws] == [expected(later) for _, later, _ in draws]
        assert source.run("true").ok
    assert source.refresh().state == "running"


def test_a_hook_reseeds_what_only_the_process_itself_can(source: Sandbox) -> None:
    source.files.write("/home/user/reseeds", "")
    source.run("mkdir -p /etc/space/hooks/post-wake.d", user="root", check=True)
    source.files.write("/etc/space/hooks/post-wake.d/50-reseed", RESEED, mode=0o755, user="root")
    start_random_process(source)
    mark, turn, number = fresh_draw(source)
    assert number == expected(turn)
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in source.fork(3)]
        draws = [fresh_draw(fork) for fork in forks]
        assert {found for found, _, _ in draws} == {mark}
        assert all(number != expected(turn) for _, turn, number in draws)
        assert all_different([number for _, _, number in draws])
        assert forks[0].files.read_text("/run/events", user="root") == "fork\n"
    source.suspend()
    source.wake()
    assert "wake\n" in source.files.read_text("/run/events", user="root")


def test_a_hook_that_others_could_have_written_is_not_run(source: Sandbox) -> None:
    source.run("mkdir -p /etc/space/hooks/post-wake.d", user="root", check=True)
    hooks = "/etc/space/hooks/post-wake.d"
    for name, change in (("10-others", "chown user"), ("20-writable", "chmod 777")):
        source.files.write(f"{hooks}/{name}", f"#!/bin/sh\ntouch /run/{name}\n", mode=0o755, user="root")
        source.run(f"{change} {hooks}/{name}", user="root", check=True)
    source.files.write(f"{hooks}/30-good", "#!/bin/sh\ntouch /run/30-good\n", mode=0o755, user="root")
    with source.fork()[0] as fork:
        found = fork.run("cd /run && ls -d 10-others 20-writable 30-good 2>/dev/null", user="root").stdout.split()
        assert found == ["30-good"]


@pytest.mark.long
def test_a_hook_without_end_delays_a_fork_and_does_not_prevent_it(source: Sandbox) -> None:
    source.run("mkdir -p /etc/space/hooks/post-wake.d", user="root", check=True)
    hook = "/etc/space/hooks/post-wake.d/10-endless"
    source.files.write(hook, "#!/bin/sh\nsleep 600 & sleep 600\n", mode=0o755, user="root")
    with source.fork()[0] as fork:
        assert fork.run(["pgrep", "-f", "sleep 600"]).exit.code == 1


def test_what_source_and_forks_write_and_run_concerns_no_other(source: Sandbox) -> None:
    source.files.write("/home/user/file", "before")
    source.run("echo before >/dev/shm/note", check=True)
    with ExitStack() as stack:
        first, second = (stack.enter_context(fork) for fork in source.fork(2))
        for number, sandbox in enumerate((source, first, second)):
            assert sandbox.files.read_text("/home/user/file") == "before"
            assert sandbox.run("cat /dev/shm/note").stdout == "before\n"
            sandbox.files.write("/home/user/file", f"{number}")
            sandbox.run(f"echo {number} >/dev/shm/note", check=True)
        for number, sandbox in enumerate((source, first, second)):
            assert sandbox.files.read_text("/home/user/file") == f"{number}"
            assert sandbox.run("cat /dev/shm/note").stdout == f"{number}\n"


def test_a_running_command_goes_on_in_each_fork_under_its_own_id(source: Sandbox) -> None:
    command = source.start(["sh", "-c", "while read line; do echo got $line; done; exit 5"], stdin=True)
    command.stdin.write("one\n")
    assert command.next_event(timeout_s=patient(20)).data == b"got one\n"
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in source.fork(2)]
        inherited = [fork.command(command.id) for fork in forks]
        assert all_different([command.id, *(one.id for one in inherited)])
        for number, (fork, one) in enumerate(zip(forks, inherited, strict=True)):
            assert [info.id for info in fork.commands() if info.forked_from == command.id] == [one.id]
            one.stdin.write(f"fork {number}\n")
            one.stdin.close()
            output = b"".join(event.data for event in one)
            assert output.endswith(f"got fork {number}\n".encode())
            assert one.wait().code == 5
        command.stdin.write("two\n")
        assert command.next_event(timeout_s=patient(20)).data == b"got two\n"
        command.stdin.close()
        assert command.wait().code == 5


def test_a_connection_within_the_sandbox_goes_on_in_both(source: Sandbox) -> None:
    source.files.write("/home/user/pair.py", PAIR)
    source.start(["python3", "pair.py"]).detach()
    wait_until(lambda: source.files.exists("/home/user/beats"), what="the first beat")
    with source.fork()[0] as fork:
        for sandbox in (source, fork):
            sandbox.run("rm -f beats; until [ -s beats ]; do sleep 0.01; done", check=True, timeout_s=patient(30))


@pytest.mark.parametrize("verb", ["pause", "suspend"])
def test_a_sleeping_sandbox_is_forked_and_sleeps_on(source: Sandbox, verb: str) -> None:
    source.run("echo kept >/dev/shm/note", check=True)
    getattr(source, verb)()
    state = source.state
    with source.fork()[0] as fork:
        assert fork.run("cat /dev/shm/note").stdout == "kept\n"
        assert source.refresh().state == state
        source.wake()
        assert source.run("cat /dev/shm/note").stdout == "kept\n"
        assert all_different([one.run("cat /etc/machine-id").stdout for one in (source, fork)])


def test_a_stopped_sandbox_cannot_be_forked_and_says_so(source: Sandbox, api: Api) -> None:
    source.stop()
    refused = api.http.post(f"/v1/sandboxes/{source.id}/fork", json={"count": 1})
    assert refused.status_code == 409
    assert error_code(refused) == "wrong-state"


@pytest.mark.parametrize("count", [0, 65, "2"])
def test_a_wrong_number_of_forks_is_refused(source: Sandbox, api: Api, count: object) -> None:
    refused = api.http.post(f"/v1/sandboxes/{source.id}/fork", json={"count": count})
    assert refused.status_code == 422
    assert refused.json()["error"]["details"]["field"] == "count"


def test_forks_take_what_is_said_and_the_rest_from_their_source(source: Sandbox) -> None:
    source.update(idle_timeout_s=500, on_idle="stop", timeout_s=900, on_timeout="stop", wake_on_request=True)
    with ExitStack() as stack:
        plain = stack.enter_context(source.fork()[0])
        said = stack.enter_context(
            source.fork(name="said", metadata={"a": "b"}, env={"N": "1"}, timeout_s=None, idle_timeout_s=None)[0]
        )
        assert (plain.name, plain.info.metadata) == (None, {"for": "forks"})
        assert (plain.info.idle_timeout_s, plain.info.on_idle, plain.info.wake_on_request) == (500, "stop", True)
        assert plain.info.deadline_at is not None
        assert source.info.deadline_at is not None
        assert plain.info.deadline_at > source.info.deadline_at
        assert (said.name, said.info.metadata, said.info.deadline_at) == ("said", {"a": "b"}, None)
        assert said.info.idle_timeout_s is None
        assert said.run("echo $N").stdout == "1\n"
        assert plain.info.resources == source.info.resources


def test_forks_live_on_without_their_source_and_leave_nothing(client: Client, installation: Installation) -> None:
    with Sandbox.create("base", client=client) as source:
        source.run("echo kept >/dev/shm/note", check=True)
        forks = source.fork(2)
    wait_until(lambda: installation.leftovers_of(source.id) == [], 5, "clean-up of the source")
    for fork in forks:
        assert fork.run("cat /dev/shm/note").stdout == "kept\n"
        fork.delete()
    for fork in forks:
        wait_until(lambda: installation.leftovers_of(fork.id) == [], 5, "clean-up of a fork")  # noqa: B023


def test_a_forks_host_name_is_its_own_id(source: Sandbox) -> None:
    with source.fork()[0] as fork:
        assert fork.run(["hostname"], check=True).stdout.strip() == fork.id
        assert source.run(["hostname"], check=True).stdout.strip() == source.id


# Snapshots


@pytest.mark.parametrize(("kind", "goes_on"), [("full", True), ("disk", False)])
def test_sandboxes_start_from_a_snapshot_after_its_source_is_gone(client: Client, kind: Any, goes_on: bool) -> None:
    with Sandbox.create("base", client=client) as source:
        source.files.write("/home/user/file", "kept")
        source.run("echo kept >/dev/shm/note", check=True)
        kept = source.snapshot("moment", kind=kind)
        assert (kept.state, kept.kind, kept.name, kept.sandbox_id) == ("ready", kind, "moment", source.id)
        assert kept.bytes is not None
        source.files.write("/home/user/file", "changed")
        assert source.run("cat /dev/shm/note").stdout == "kept\n"
    try:
        with ExitStack() as stack:
            made = [stack.enter_context(Sandbox.create(kept, client=client)) for _ in range(2)]
            for one in made:
                assert one.files.read_text("/home/user/file") == "kept"
                assert one.run("cat /dev/shm/note 2>/dev/null").ok is goes_on
            assert all_different([one.run("cat /etc/machine-id").stdout for one in made])
            made[0].files.write("/home/user/file", "other")
            assert made[1].files.read_text("/home/user/file") == "kept"
    finally:
        client.snapshots.delete(kept)


def test_a_deleted_snapshot_makes_no_sandboxes_and_those_it_made_live_on(client: Client, source: Sandbox) -> None:
    source.files.write("/home/user/file", "kept")
    kept = source.snapshot()
    assert kept.id in [one.id for one in client.snapshots.list()]
    with Sandbox.create(kept, client=client) as made:
        client.snapshots.delete(kept)
        with pytest.raises(InvalidRequest) as caught:
            Sandbox.create(kept, client=client)
        assert caught.value.code == "unknown-snapshot"
        assert client.snapshots.get(kept.id).state == "deleted"
        assert kept.id not in [one.id for one in client.snapshots.list()]
        made.suspend()
        made.wake()
        assert made.files.read_text("/home/user/file") == "kept"


def test_a_stopped_sandbox_has_a_disk_snapshot_and_no_full_one(client: Client, source: Sandbox, api: Api) -> None:
    source.files.write("/home/user/file", "kept")
    source.stop()
    refused = api.http.post(f"/v1/sandboxes/{source.id}/snapshots", json={"kind": "full"})
    assert (refused.status_code, error_code(refused)) == (409, "wrong-state")
    kept = source.snapshot(kind="disk")
    with Sandbox.create(kept, client=client) as made:
        assert made.files.read_text("/home/user/file") == "kept"
    client.snapshots.delete(kept)


@pytest.mark.long
def test_a_chain_of_snapshots_and_forks_holds_no_more_than_one_disk(client: Client) -> None:
    """F10: what the sources wrote counts for those made of them, and does when the sources are gone."""
    with ExitStack() as stack:
        one = stack.enter_context(Sandbox.create("base", client=client, memory_mib=256, disk_mib=DISK_MIB))
        assert written_mib(one, "first", 200) == 200
        kept = one.snapshot(kind="disk")
        assert kept.bytes is not None
        assert 195 <= kept.bytes / MIB <= 225
        one.delete()
        one = stack.enter_context(Sandbox.create(kept, client=client, memory_mib=256, disk_mib=DISK_MIB))
        client.snapshots.delete(kept)
        assert written_mib(one, "second", 20) == 20
        wait_until(lambda: 215 <= disk_mib(one) <= 245, 60, "the use of the disk is told")
        fork = stack.enter_context(one.fork()[0])
        one.delete()
        assert 5 <= written_mib(fork, "third", DISK_MIB) <= 40
        larger = fork.snapshot(kind="disk")
        with Sandbox.create(larger, client=client, memory_mib=256, disk_mib=2 * DISK_MIB) as more:
            assert DISK_MIB * 0.8 <= written_mib(more, "fourth", 2 * DISK_MIB) <= DISK_MIB * 1.2
        client.snapshots.delete(larger)


def written_mib(sandbox: Sandbox, name: str, mib: int) -> int:
    """Write so much, or until it fails; return what was written."""
    sandbox.run(f"head -c {mib}M /dev/urandom >/home/user/{name}; sync", timeout_s=patient(120))
    return int(sandbox.run(f"stat -c %s /home/user/{name}", check=True).stdout) // MIB


def disk_mib(sandbox: Sandbox) -> float:
    return float((sandbox.metrics()["now"] or {"disk_mib": 0})["disk_mib"])


def test_another_project_sees_neither_snapshot_nor_fork(source: Sandbox, client: Client, other_api: Api) -> None:
    kept = source.snapshot(kind="disk")
    assert other_api.http.get(f"/v1/snapshots/{kept.id}").status_code == 404
    assert other_api.http.delete(f"/v1/snapshots/{kept.id}").status_code == 404
    assert other_api.call("GET", "/v1/snapshots").json()["items"] == []
    assert other_api.http.post(f"/v1/sandboxes/{source.id}/fork", json={"count": 1}).status_code == 404
    unknown = other_api.http.post("/v1/sandboxes", json={"template": kept.reference})
    assert error_code(unknown) == "unknown-snapshot"
    client.snapshots.delete(kept)


def test_one_idempotency_key_forks_once(source: Sandbox, api: Api) -> None:
    """L10"""
    headers = {"Idempotency-Key": "fork-once", "Prefer": "wait=60"}
    answers = [api.call("POST", f"/v1/sandboxes/{source.id}/fork", json={"count": 2}, headers=headers) for _ in "ab"]
    first, second = ([made["id"] for made in answer.json()["sandboxes"]] for answer in answers)
    assert first == second
    for made in first:
        api.delete(made)
