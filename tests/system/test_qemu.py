"""Sandboxes as virtual machines, from outside: all that a sandbox is, with a kernel of its own. Emulated processors."""

import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox as E2BSandbox

from tests import installation as installations
from tests.attached import Attached
from tests.client import WAIT, Api, error_code, wait_until
from tests.driver_bench import unfit_for_virtual_machines
from tests.e2b.conftest import Origin, e2b_key
from tests.installation import Installation
from tests.mirrors import HOST
from tests.reaching import mirrors, reaching
from tests.upstreams import Outside

# An emulated processor is a whole one of the host's.
pytestmark = pytest.mark.alone

SPACE = [sys.executable, "-c", "from space.cli import main; main()"]
POLICY = {"rules": [{"name": "good", "hosts": [HOST]}]}
SMALL = {"memory_mib": 320, "disk_mib": 512}
DRAW = """
import os, socket, time
with open("/dev/shm/drawn", "w") as file:
    while True:
        name = socket.gethostname()
        file.write(f"{name} {os.urandom(16).hex()}\\n")
        file.flush()
        time.sleep(0.01)
"""
HELD = "import os, time\nopen('/dev/shm/kept', 'w').write('{word}')\nwhile True: time.sleep(1)"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    if reason := installations.unfit() or unfit_for_virtual_machines():
        pytest.skip(reason)
    with mirrors(tmp_path_factory.mktemp("outside")) as found:
        yield found


@pytest.fixture(scope="module")
def installation(servers: Outside) -> Iterator[Installation]:
    # Sandboxes that name no driver are others: a virtual machine is asked for.
    with reaching(servers, driver="gvisor", pool_max=0) as one:
        yield one


@pytest.fixture(scope="module")
def machine(installation: Installation) -> Iterator[str]:
    """One for all tests of this module, which leave it running."""
    with Api(installation.url, installation.key) as api:
        sandbox = api.create(driver="qemu", resources=SMALL, policy=POLICY)
        assert api.get(sandbox)["driver"] == "qemu"
        yield sandbox
        api.delete(sandbox)


@contextlib.contextmanager
def full_store(installation: Installation) -> Iterator[None]:
    """Meanwhile the host has no room for what machines write to their disks."""
    filler = installation.settings.broker_dir / "disks/filler"
    with filler.open("wb") as file:
        for size in (1 << 30, 64 << 20, 1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
    try:
        yield
    finally:
        filler.unlink()


def fork(api: Api, sandbox: str, count: int = 1) -> list[str]:
    answer = api.call("POST", f"/v1/sandboxes/{sandbox}/fork", json={"count": count}, headers=WAIT).json()
    api.finished(answer)
    return [one["id"] for one in answer["sandboxes"]]


def vmm(installation: Installation, sandbox: str) -> int:
    """The process id of a sandbox's QEMU."""
    for pid in installation.processes_of(sandbox):
        with contextlib.suppress(OSError):
            if b"qemu-system" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                return pid
    raise AssertionError(f"{sandbox} has no QEMU")


def test_the_command_line_runs_a_program_under_the_guests_own_kernel(installation: Installation) -> None:
    environment = {**os.environ, "SPACE_URL": installation.url, "SPACE_API_KEY": installation.key}
    words = ["run", "--driver", "qemu", "base", "--", "uname", "-r"]
    done = subprocess.run([*SPACE, *words], env=environment, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    kernel = done.stdout.strip()
    assert kernel.startswith(tuple("123456789"))
    assert kernel != os.uname().release


def test_files_go_in_and_out_whole(api: Api, machine: str) -> None:
    data = os.urandom(4 << 20)
    api.write(machine, "/home/user/data", data)
    assert api.output(machine, "sha256sum /home/user/data").split()[0] == hashlib.sha256(data).hexdigest()
    assert api.read(machine, "/home/user/data") == data


def test_a_terminal_has_its_size_and_echoes(api: Api, machine: str) -> None:
    created = api.command(machine, "stty size; read line; echo got $line", tty={"rows": 31, "cols": 97})
    with Attached(f"{created['attach']['url']}?token={created['attach']['token']}") as one:
        one.until_said("tty", b"31 97")
        one.feed(b"typed\n")
        one.finish()
    assert b"got typed" in one.data["tty"]


def test_e2bs_client_has_commands_files_and_their_metadata(api: Api, machine: str, installation: Installation) -> None:
    origin = Origin(f"http://127.0.0.1:{installation.settings.e2b_port}", e2b_key(installation.key))
    one = E2BSandbox.connect(machine, **origin.options)
    assert one.commands.run("uname -r").stdout.strip() != os.uname().release
    one.files.write("tagged", "x", metadata={"kind": "note"})
    found = one.files.get_info("tagged")
    assert (found.path, found.metadata) == ("/home/user/tagged", {"kind": "note"})
    assert api.output(machine, "cat /home/user/tagged") == "x"


def test_limits_are_those_that_were_asked_for(api: Api, machine: str) -> None:
    assert api.output(machine, "nproc").strip() == "1"
    total_kib = int(api.output(machine, "awk '/MemTotal/ {print $2}' /proc/meminfo"))
    assert 240 << 10 < total_kib <= SMALL["memory_mib"] << 10
    # Most of it at one stroke: an emulated processor takes its time to write zeros.
    fill = "fallocate -l 300M /home/user/most && head -c 300M /dev/zero > /home/user/full"
    full = api.exec(machine, fill, timeout_s=60)
    assert full["exit"]["code"] == 1
    assert "No space left" in full["stderr"]
    api.output(machine, "rm /home/user/full /home/user/most && echo fine > /home/user/after")


def test_a_machine_waits_while_the_host_has_no_room_for_its_disk_and_loses_nothing(
    api: Api, machine: str, installation: Installation
) -> None:
    write = "cd /home/user && head -c 16M /dev/urandom > late && sha256sum late > sum && sync"
    log = installation.settings.run_dir / "log/broker.log"
    with full_store(installation):
        done = api.command(machine, write)
        with Attached(f"{done['attach']['url']}?token={done['attach']['token']}") as one:
            one.until(lambda: one.started is not None)
        wait_until(lambda: "machine-stalled" in log.read_text(), 40, "it is seen to stand still")
    ended = f"/v1/commands/{done['command']['id']}"
    wait_until(lambda: api.call("GET", ended).json()["state"] == "ended", 40, "it goes on")
    assert api.call("GET", ended).json()["exit"]["code"] == 0
    api.output(machine, "echo 3 > /proc/sys/vm/drop_caches", user="root")
    api.output(machine, "cd /home/user && sha256sum -c sum && rm late sum")
    assert api.output(machine, "dmesg | grep -ci 'ext4.*error' || true", user="root").strip() == "0"


def test_a_command_without_memory_ends_for_that_and_the_machine_lives(api: Api, machine: str) -> None:
    hog = "kept = []\nwhile True: kept.append(b'x' * (8 << 20))"
    answer = api.exec(machine, ["python3", "-c", hog], timeout_s=60)
    assert answer["exit"]["kind"] == "oom-killed", answer
    assert api.output(machine, "echo lives") == "lives\n"


def test_a_fork_bomb_meets_the_sandboxs_limit_and_ends_with_its_time(api: Api) -> None:
    sandbox = api.create(driver="qemu", resources={**SMALL, "pids": 64})
    try:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: pass"
        assert api.exec(sandbox, ["python3", "-c", bomb], timeout_s=3)["exit"]["kind"] == "timed-out"
        assert int(api.output(sandbox, "ls -d /proc/[0-9]* | wc -l", timeout_s=30)) < 150
    finally:
        api.delete(sandbox)


def test_rules_of_egress_hold(api: Api, machine: str) -> None:
    assert api.output(machine, f"curl -sSf -m 20 https://{HOST}/hello") == "hello"
    assert api.exec(machine, "curl -sS -m 20 https://evil.example")["exit"]["code"] == 6


def test_processes_and_files_live_on_across_pause_and_suspend_and_files_across_stop(api: Api, machine: str) -> None:
    word = secrets.token_hex(8)
    held = api.call(
        "POST", f"/v1/sandboxes/{machine}/commands", json={"argv": ["python3", "-c", HELD.format(word=word)]}
    ).json()
    with Attached(f"{held['attach']['url']}?token={held['attach']['token']}") as one:
        one.until(lambda: one.started is not None)
    wait_until(lambda: api.exec(machine, "cat /dev/shm/kept")["stdout"] == word, what="the program is held")
    boot = api.output(machine, "cat /proc/sys/kernel/random/boot_id; echo disk > /home/user/disk")
    for verbs in (("pause", "resume"), ("suspend", "wake"), ("pause", "suspend", "wake")):
        for verb in verbs:
            api.verb(machine, verb)
        assert api.output(machine, "cat /proc/sys/kernel/random/boot_id") == boot, verbs
        assert api.output(machine, "cat /dev/shm/kept /home/user/disk") == f"{word}disk\n", verbs
        assert api.call("GET", f"/v1/commands/{held['command']['id']}").json()["state"] == "running", verbs
        assert api.output(machine, f"curl -sSf -m 20 https://{HOST}/hello") == "hello", verbs
    api.output(machine, "echo last > /home/user/last")
    api.verb(machine, "pause")
    assert api.verb(machine, "stop")["timings"]["total"] < 10
    api.verb(machine, "start")
    assert api.output(machine, "cat /home/user/disk /home/user/last") == "disk\nlast\n"
    assert api.output(machine, "cat /proc/sys/kernel/random/boot_id") != boot


def test_forks_have_memory_and_disk_of_their_source_and_nothing_in_common_that_one_can_write(
    api: Api, machine: str, installation: Installation
) -> None:
    word = secrets.token_hex(8)
    api.output(machine, f"echo {word} > /dev/shm/word; echo {word} > /home/user/word")
    forks = fork(api, machine, 2)
    try:
        for one in forks:
            assert api.output(one, "cat /dev/shm/word /home/user/word") == f"{word}\n{word}\n"
            api.output(one, f"echo {one} > /home/user/word")
            assert api.output(one, "hostname").strip() == one
        assert [api.output(one, "cat /home/user/word").strip() for one in forks] == forks
        assert api.output(machine, "cat /home/user/word").strip() == word
        seen = [host_sees(vmm(installation, one)) for one in (machine, *forks)]
        for name in ("user", "namespaces", "files", "pages"):
            shared = set[Any].intersection(*map(set, (one[name] for one in seen)))
            pairs = [set(a[name]) & set(b[name]) for a in seen for b in seen if a is not b]
            assert not shared
            assert not any(pairs), (name, pairs)
    finally:
        for one in forks:
            api.delete(one)


def test_forks_are_given_randomness_of_their_own_from_the_first_moment(api: Api, machine: str) -> None:
    """By their kernel, which would by itself give all of them the same for up to a minute."""
    held = api.command(machine, ["python3", "-c", DRAW])
    with Attached(f"{held['attach']['url']}?token={held['attach']['token']}") as one:
        one.until(lambda: one.started is not None)
    wait_until(lambda: drawn(api, machine), what="the program draws")
    forks = fork(api, machine, 2)
    try:
        for one in forks:
            wait_until(lambda one=one: len(drawn(api, one)) > 20, what="the fork's goes on")
        api.call("POST", f"/v1/commands/{held['command']['id']}/signal", json={"signal": "KILL"})
        ours, *theirs = [drawn(api, one) for one in (machine, *forks)]
        assert not theirs[0] & theirs[1]
        assert not ours & (theirs[0] | theirs[1])
    finally:
        for one in forks:
            api.delete(one)


def drawn(api: Api, sandbox: str) -> set[str]:
    """What that program was given as this sandbox."""
    lines = api.output(sandbox, "cat /dev/shm/drawn || true").splitlines()
    return {line.split()[1] for line in lines if line.split()[:1] == [sandbox] and len(line.split()) == 2}


def host_sees(pid: int) -> dict[str, set[Any]]:
    """What a machine's program has that it could write or be taken for: user, namespaces, files, shared pages."""
    process = Path(f"/proc/{pid}")
    status = (process / "status").read_text()
    files = set()
    for descriptor in (process / "fdinfo").iterdir():
        with contextlib.suppress(OSError):
            flags = int(descriptor.read_text().split("flags:")[1].split()[0], 8)
            found = (process / "fd" / descriptor.name).stat()
            path = str((process / "fd" / descriptor.name).readlink())
            if flags & os.O_ACCMODE and path.startswith("/") and not path.startswith("/dev/"):
                files.add((found.st_dev, found.st_ino))
    pages = set()
    for line in (process / "maps").read_text().splitlines():
        _, rights, _, device, inode, *_ = line.split()
        if "w" in rights and "s" in rights and inode != "0":
            pages.add((device, inode))
    return {
        "user": {line.split()[1] for line in status.splitlines() if line.startswith("Uid:")},
        "namespaces": {str((process / "ns" / kind).readlink()) for kind in ("net", "mnt", "ipc", "uts")},
        "files": files,
        "pages": pages,
    }


@pytest.mark.parametrize("kind", ["disk", "full"])
def test_sandboxes_begin_from_a_snapshot_on_the_driver_that_it_was_made_with(api: Api, machine: str, kind: str) -> None:
    api.output(machine, f"echo {kind} | tee /dev/shm/kind > /home/user/kind")
    kept = api.call("POST", f"/v1/sandboxes/{machine}/snapshots", json={"name": kind, "kind": kind}, headers=WAIT)
    snapshot = kept.json()["snapshot"]["id"]
    assert api.call("GET", f"/v1/snapshots/{snapshot}").json()["driver"] == "qemu"
    try:
        refused = api.http.post("/v1/sandboxes", json={"template": f"snapshot:{snapshot}", "driver": "gvisor"})
        assert error_code(refused) == "wrong-driver", refused.text
        sandbox = api.create(template=f"snapshot:{snapshot}")
        try:
            assert api.output(sandbox, "cat /home/user/kind").strip() == kind
            in_memory = api.exec(sandbox, "cat /dev/shm/kind")
            assert in_memory["exit"]["code"] == (0 if kind == "full" else 1)
        finally:
            api.delete(sandbox)
    finally:
        api.call("DELETE", f"/v1/snapshots/{snapshot}")


@pytest.mark.parametrize("phase", ["running", "paused", "suspending", "waking"])
def test_a_killed_qemu_is_noticed_and_nothing_of_it_is_left(
    api: Api, machine: str, installation: Installation, phase: str
) -> None:
    [sandbox] = fork(api, machine)
    try:
        if phase == "paused":
            api.verb(sandbox, "pause")
        pid = vmm(installation, sandbox)
        if phase in {"suspending", "waking"}:
            if phase == "waking":
                api.verb(sandbox, "suspend")
            verb = "suspend" if phase == "suspending" else "wake"
            operation = api.call("POST", f"/v1/sandboxes/{sandbox}/{verb}").json()["operation"]["id"]
            if phase == "waking":
                wait_until(lambda: has_vmm(installation, sandbox), what="the machine is there again")
                pid = vmm(installation, sandbox)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            ended = api.call("GET", f"/v1/operations/{operation}", params={"wait_s": 60}).json()
            assert ended["state"] in {"succeeded", "failed"}, ended
        else:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: api.get(sandbox)["state"] == "failed", what="the end is noticed")
            assert api.get(sandbox)["failure"]["code"] == "machine-exited"
    finally:
        api.delete(sandbox)
    wait_until(lambda: installation.leftovers_of(sandbox) == [], 10, "nothing of it is left")


def has_vmm(installation: Installation, sandbox: str) -> bool:
    try:
        vmm(installation, sandbox)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("verb", ["suspend", "wake"])
def test_a_broker_that_is_killed_meanwhile_loses_no_machine_and_no_byte(
    api: Api, machine: str, installation: Installation, verb: str
) -> None:
    word = secrets.token_hex(8)
    api.output(machine, f"echo {word} | tee /dev/shm/broker > /home/user/broker")
    [sandbox] = fork(api, machine)
    try:
        if verb == "wake":
            api.verb(sandbox, "suspend")
        operation = api.call("POST", f"/v1/sandboxes/{sandbox}/{verb}").json()["operation"]["id"]
        installation.kill("broker")
        installation.wait_ready()
        ended = api.call("GET", f"/v1/operations/{operation}", params={"wait_s": 60}).json()
        assert ended["state"] == "succeeded", ended
        if verb == "suspend":
            api.verb(sandbox, "wake")
        assert api.output(sandbox, "cat /dev/shm/broker /home/user/broker") == f"{word}\n{word}\n"
        assert api.output(sandbox, "sync; dmesg | grep -ci 'ext4.*error' || true", user="root").strip() == "0"
    finally:
        api.delete(sandbox)
