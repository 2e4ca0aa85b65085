"""What drivers promise of machines restored as others than they were: forks of one image, and what becomes of connections."""

import asyncio
import dataclasses
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from space.drivers.base import Machine, MachineState, Need
from space.drivers.gvisor import control
from space.errors import HostError
from tests.driver_bench import COUNTER, Bench, bench, is_ended, produced, wait

__all__ = ["bench"]

FORKS = 4
# Writes down, again and again, what became of a connection to the host, of one within the machine, and of time.
TALKER = """
import itertools, os, socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
listening = socket.create_server(("127.0.0.1", 0))
near, far = socket.create_connection(listening.getsockname()), listening.accept()[0]
waiting = socket.create_server(("0.0.0.0", 7000))
outer = socket.create_connection((host, port))
outer.settimeout(2)
outside = "alive"
for turn in itertools.count():
    near.sendall(b"x")
    inside = "alive" if far.recv(1) == b"x" else "dead"
    if outside == "alive":
        try:
            outer.sendall(b"%d " % turn)
        except OSError as error:
            outside = type(error).__name__
    with open("/said.new", "w") as file:
        print(turn, inside, outside, file=file)
    os.rename("/said.new", "/said")
    time.sleep(0.02)
"""
DATAGRAMS = """
import socket, time
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
sockets[0].connect(("{host}", 53))
sockets[1].bind(("{own}", 7001))
open("/ready", "w").close()
time.sleep(600)
"""


@pytest.fixture
def linked(bench: Bench) -> Bench:
    if Need.LINK not in bench.driver.capabilities.needs:
        pytest.skip("machines of this driver have no link")
    return bench


@pytest.fixture
def visible(linked: Bench) -> Bench:
    if Need.DISK not in linked.driver.capabilities.needs:
        pytest.skip("disks of this driver's machines cannot be looked into while they run")
    return linked


def fork_of(bench: Bench, machine: Machine) -> Machine:
    """Another machine with a copy of the disk."""
    fork = bench.machine()
    if machine.root and fork.root:
        shutil.rmtree(fork.root)
        shutil.copytree(machine.root, fork.root, symlinks=True)
    if machine.blocks and fork.blocks:
        shutil.copyfile(machine.blocks.layer, fork.blocks.layer)
    return fork


async def test_many_machines_run_side_by_side_from_one_image(bench: Bench) -> None:
    machine = bench.machine()
    first = await bench.start(machine)
    with bench.peer(machine) as peer:
        assert peer.run(*bench.python, "print('before')").stdout == b"before\n"
    image = bench.image()
    await bench.checkpoint(machine, image)
    forks = [fork_of(bench, machine) for _ in range(FORKS)]
    found = await asyncio.gather(*(bench.restore(fork, image) for fork in forks))
    assert len({process.pid for process in [*found, first]}) == FORKS + 1
    shutil.rmtree(image)
    with ExitStack() as peers:
        for number, one in enumerate([machine, *forks]):
            peer = peers.enter_context(bench.peer(one))
            assert peer.run(*bench.python, f"print({number})").stdout == f"{number}\n".encode()
    await bench.driver.destroy(machine.id, first)
    for fork, process in zip(forks, found, strict=True):
        assert (await bench.driver.inspect(fork.id)).process == process


async def test_processes_go_on_in_the_machine_and_in_every_fork_of_it(linked: Bench) -> None:
    machine = linked.machine()
    await linked.start(machine)
    with linked.peer(machine) as peer:
        counter = peer.start(*linked.python, COUNTER, id="cmdcounter")
        peer.until(lambda: len(peer.data.get(counter.streams["stdout"], b"")) > 3, "the counter counts")
    image = linked.image()
    await linked.checkpoint(machine, image)
    forks = [fork_of(linked, machine) for _ in range(2)]
    for fork in forks:
        await linked.restore(fork, image)
    for one in [machine, *forks]:
        with linked.peer(one) as peer:
            before = produced(peer)
            peer.until(lambda peer=peer, before=before: produced(peer) > before, "the counter goes on")


class Host:
    """A server on the host that keeps what each connection brought."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("0.0.0.0", 0))
        self.listening.settimeout(10)
        self.port = self.listening.getsockname()[1]

    def accept(self) -> socket.socket:
        connection = self.listening.accept()[0]
        connection.settimeout(10)
        return connection

    def is_asked(self) -> bool:
        self.listening.settimeout(0)
        try:
            self.listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def host() -> Iterator[Host]:
    one = Host()
    yield one
    one.listening.close()


def said(machine: Machine) -> list[str]:
    assert machine.root is not None
    return (machine.root / "said").read_text().split() if (machine.root / "said").exists() else ["-1", "", ""]


def drain(connection: socket.socket) -> str:
    """Read to the connection's end; say how it ended."""
    try:
        while connection.recv(65536):
            pass
    except OSError as error:
        return type(error).__name__
    return "end"


@pytest.mark.parametrize("as_another", [False, True])
async def test_connections_out_of_a_machine_are_dead_after_a_restore_and_those_within_live(
    visible: Bench, host: Host, as_another: bool
) -> None:
    """L15: a fork, and a wake under the same address."""
    numbers = secrets.SystemRandom().sample(range(120), 2)
    machine = visible.machine()
    address = visible.join(machine, numbers[0])
    await visible.start(machine)
    with visible.peer(machine) as peer:
        peer.start(*visible.python, TALKER, address, str(host.port))
        connection = host.accept()
        wait(lambda: int(said(machine)[0]) > 3, "it talks")
    assert said(machine)[1:] == ["alive", "alive"]
    image = visible.image()
    await visible.checkpoint(machine, image)
    assert await asyncio.to_thread(drain, connection) == "ConnectionResetError"
    if not as_another:
        await visible.driver.destroy(machine.id, None)
        visible.part()
    fork = fork_of(visible, machine)
    assert fork.root
    (fork.root / "said").unlink()
    visible.join(fork, numbers[1] if as_another else numbers[0])
    process = await visible.restore(fork, image)
    wait(lambda: said(fork)[0] != "-1", "it talks again")
    turn = int(said(fork)[0])
    wait(lambda: int(said(fork)[0]) > turn + 3, "it goes on talking")
    assert said(fork)[1:] == ["alive", "ConnectionAbortedError"]
    assert not host.is_asked()
    assert not is_ended(process)
    with visible.peer(fork) as peer:
        again = f"import socket; print(socket.create_connection(('{fork_host(numbers, as_another)}', {host.port}), 5).getsockname()[0])"
        assert peer.run(*visible.python, again).exit["code"] == 0
    assert host.is_asked()


def fork_host(numbers: list[int], as_another: bool) -> str:
    return f"192.0.2.{2 * numbers[1 if as_another else 0]}"


async def test_a_socket_that_has_an_address_of_before_needs_it_to_be_there(visible: Bench) -> None:
    """L15: why a fork may have to be given the addresses of what it was made of, too. If it could do without, it should."""
    numbers = secrets.SystemRandom().sample(range(120), 2)
    machine = visible.machine()
    address = visible.join(machine, numbers[0])
    await visible.start(machine)
    own = f"192.0.2.{2 * numbers[0] + 1}"
    with visible.peer(machine) as peer:
        peer.start(*visible.python, DATAGRAMS.format(host=address, own=own))
        assert machine.root
        ready = machine.root / "ready"
        wait(ready.exists, "the sockets are there")
    image = visible.image()
    await visible.checkpoint(machine, image)
    stranger = fork_of(visible, machine)
    visible.join(stranger, numbers[1])
    with pytest.raises(HostError) as caught:
        await visible.restore(stranger, image)
    assert caught.value.code == "start-failed"
    await visible.driver.destroy(stranger.id, None)
    heir = fork_of(visible, machine)
    visible.join(heir, numbers[1], numbers[0])
    await visible.restore(heir, image)
    with visible.peer(heir) as peer:
        look = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('192.0.2.%d', 9)); print(s.getsockname()[0])"
        seen = peer.run(*visible.python, look % (2 * numbers[1])).stdout.decode().strip()
    assert seen == f"192.0.2.{2 * numbers[1] + 1}"


@pytest.mark.parametrize("proven", [False, True])
async def test_an_image_is_the_same_whether_asked_of_the_sentry_or_of_its_program(
    visible: Bench, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not proven:
        monkeypatch.setattr(control, "PROVEN", frozenset[str]())
    machine = visible.machine()
    await visible.start(machine)
    image = visible.image()
    await visible.checkpoint(machine, image)
    assert {path.name for path in image.iterdir()} == {*control.IMAGE_FILES, "space.json"}
    await visible.driver.destroy(machine.id, None)
    await visible.restore(machine, image)
    with visible.peer(machine) as peer:
        assert peer.run(*visible.python, "print('back')").stdout == b"back\n"


class Sentry:
    """A control socket whose owner answers a request with given bytes and goes."""

    def __init__(self, directory: Path, answer: bytes) -> None:
        self.address = directory / "sentry.sock"
        self._answer = answer
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.address))
        self._listening.listen()

    def serve(self) -> None:
        with self._listening, self._listening.accept()[0] as connection:
            _, files, _, _ = socket.recv_fds(connection, 65536, 3)
            for file in files:
                os.close(file)
            with suppress(BrokenPipeError):
                connection.sendall(self._answer)


@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"null", b"[" * 40000, b'{"success": 1}', b'{"success": false, "err": 7}', b"x" * (1 << 20)],
)
async def test_whatever_a_sentry_answers_is_not_taken_for_success(tmp_path: Path, answer: bytes) -> None:
    sentry = Sentry(tmp_path, answer)
    (tmp_path / "image").mkdir()
    served = asyncio.ensure_future(asyncio.to_thread(sentry.serve))
    with suppress(OSError):
        assert await control.checkpoint(sentry.address, tmp_path / "image", 10) != ""
    await served


async def test_a_sentry_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "sentry.sock"))
    listening.listen()
    (tmp_path / "image").mkdir()
    with listening, pytest.raises(TimeoutError):
        await control.checkpoint(tmp_path / "sentry.sock", tmp_path / "image", 0.05)


async def test_a_checkpoint_of_a_machine_whose_process_has_ended_says_so(linked: Bench) -> None:
    from space.errors import MachineLost

    machine = linked.machine()
    process = await linked.start(machine)
    os.kill(process.pid, 9)
    wait(lambda: is_ended(process), "the process ends")
    with pytest.raises(MachineLost):
        await linked.driver.checkpoint(machine.id, linked.image())
    assert (await linked.driver.inspect(dataclasses.replace(machine).id)).state is MachineState.ABSENT
