"""The channel of a machine that breaks and is made again: the real relay, the real agent, and between them a stand-in
for Firecracker's vsock that loses whatever is under way.
"""

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from space.drivers import processes
from space.drivers.firecracker import relay
from tests.agent import FIFO_BYTES, Agent, Peer
from tests.driver_bench import wait

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the relay gives up what it has")

USER = 0x6FFF_FFFF
PORT = 1000
SIZE = 6 << 20


class Vsock(threading.Thread):
    """Takes calls as Firecracker does and connects them to the agent's socket, one at a time.

    After `cut_after` bytes either way it breaks the guest's end and leaves the host's open, as it is when a guest's
    memory was written; what it holds then, in its buffers and the sockets', is lost. `on_cut` is called.
    """

    def __init__(self, directory: Path, guest: Path) -> None:
        super().__init__(daemon=True)
        self.calls = 0
        self.cuts = 0
        self.cut_after: int | None = None
        self.on_cut = lambda: None
        self.answers = b""
        """Said to the next callers, who are then hung up on, instead of connecting them."""
        self._guest = guest
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(directory / "vsock.sock"))
        (directory / "vsock.sock").chmod(0o666)
        self._listening.listen()
        self._dead: list[socket.socket] = []
        self._over, self._end = os.pipe()

    def run(self) -> None:
        watched = [self._listening, self._over]
        while self._over not in (ready := select.select(watched, [], [])[0]):
            if ready:
                with contextlib.suppress(OSError):
                    self._serve(self._listening.accept()[0])

    def end(self) -> None:
        os.close(self._end)
        self.join(10)
        for one in (*self._dead, self._listening):
            one.close()
        os.close(self._over)

    def _serve(self, host: socket.socket) -> None:
        host.settimeout(10)
        line = b""
        while not line.endswith(b"\n"):
            line += host.recv(1)
        assert line == b"CONNECT %d\n" % PORT
        self.calls += 1
        if self.answers:
            with host:
                host.sendall(self.answers)
            return
        guest = socket.socket(socket.AF_UNIX)
        try:
            guest.connect(str(self._guest))
        except OSError:
            host.close()
            return
        host.sendall(b"OK 5000\n")
        self._carry(host, guest)

    def _carry(self, host: socket.socket, guest: socket.socket) -> None:
        """Carry bytes until there is nobody to carry them for, or enough were carried."""
        carried = 0
        others = {host: guest, guest: host}
        while True:
            ready = select.select([host, guest, self._over], [], [])[0]
            if self._over in ready:
                break
            for one in (one for one in others if one in ready):
                try:
                    data = one.recv(65536)
                    if not data:
                        raise ConnectionResetError
                    if self.cut_after is not None and carried > self.cut_after:
                        self.cuts += 1
                        guest.close()
                        self._dead.append(host)
                        self.on_cut()
                        return
                    others[one].sendall(data)
                except OSError:
                    host.close()
                    guest.close()
                    return
                carried += len(data)
        host.close()
        guest.close()


class Line:
    """A relay on two FIFOs, for a machine that is any process."""

    def __init__(self, directory: Path) -> None:
        self.jail = directory / "jail"
        self.jail.mkdir()
        self.fifos = directory / "fifos"
        self.fifos.mkdir()
        for name in ("in", "out", "console"):
            os.mkfifo(self.fifos / name)
        self.words = directory / "words"
        self.spec, self.number = directory / "spec.json", directory / "pid"
        self.relay: processes.Process | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start a relay; return the machine."""
        machine = subprocess.Popen(["sleep", "600"])
        found = processes.identify(machine.pid)
        assert found
        spec = {"jail": str(self.jail), "socket": "vsock.sock", "port": PORT, "user": USER}
        spec |= {"pid": found.pid, "start_ticks": found.start_ticks, "pid_file": str(self.number)}
        spec |= {"console": str(self.fifos / "console"), "last_words": str(self.words)}
        self.spec.write_text(json.dumps(spec))
        ends = [os.open(self.fifos / name, os.O_RDWR) for name in ("in", "out")]
        for end in ends:
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, FIFO_BYTES)
        words = ["setpriv", "--no-new-privs", "--", sys.executable, "-I", "-S", relay.__file__, str(self.spec)]
        subprocess.run(words, stdin=ends[0], stdout=ends[1], check=True, timeout=20)
        for end in ends:
            os.close(end)
        self.relay = processes.identify(int(self.number.read_text().split()[0]))
        assert self.relay
        return machine

    def end(self, machine: subprocess.Popen[bytes]) -> None:
        """End the machine, and see that its relay ends with it."""
        machine.kill()
        machine.wait()
        assert self.relay
        relay = self.relay
        wait(lambda: not processes.is_alive(relay), "the relay ends with its machine")

    def call_again(self) -> None:
        assert self.relay
        processes.send(self.relay, signal.SIGHUP)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    one = Line(tmp_path)
    tmp_path.chmod(0o755)
    yield one
    if one.relay:
        processes.send_kill(one.relay)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path / "agent", ("--channel", f"unix:{tmp_path}/guest.sock"))
    yield one
    one.stop()


@pytest.fixture
def vsock(line: Line, tmp_path: Path) -> Iterator[Vsock]:
    one = Vsock(line.jail, tmp_path / "guest.sock")
    one.start()
    yield one
    one.end()


def status(process: processes.Process | None) -> dict[str, list[str]]:
    assert process
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def test_it_is_told_when_the_guest_has_answered(line: Line, vsock: Vsock, tmp_path: Path) -> None:
    machine = line.start()
    wait(lambda: vsock.calls > 1, "nobody answers")
    assert line.number.read_text().isdecimal()
    agent = Agent(tmp_path / "agent", ("--channel", f"unix:{tmp_path}/guest.sock"))
    try:
        wait(lambda: line.number.read_text().endswith(relay.ANSWERED), "it has answered")
    finally:
        agent.stop()
    line.end(machine)


def test_no_byte_is_lost_or_doubled_however_often_the_connection_breaks(line: Line, agent: Agent, vsock: Vsock) -> None:
    machine = line.start()
    peer = Peer(line.fifos)
    peer.greet()
    vsock.on_cut = line.call_again
    vsock.cut_after = 300_000
    data = secrets.token_bytes(SIZE)
    echo = peer.start("cat", stdin=True)
    peer.feed(echo.streams["stdin"], data, end=True)
    result = peer.finish(echo)
    assert result.stdout == data
    assert result.exit["code"] == 0
    assert vsock.cuts > SIZE // 300_000
    assert peer.out_of_step == 0
    peer.close()
    line.end(machine)


def test_a_broken_connection_is_noticed_by_what_the_host_says_next(line: Line, agent: Agent, vsock: Vsock) -> None:
    """Nobody tells the relay: as with a restored guest, whose kernel no longer knows the connection."""
    machine = line.start()
    peer = Peer(line.fifos)
    peer.greet()
    vsock.on_cut = lambda: [one.close() for one in vsock._dead]
    vsock.cut_after = 100
    for _ in range(3):
        assert peer.run("/bin/echo", "hello").stdout == b"hello\n"
    assert vsock.cuts >= 3
    peer.close()
    line.end(machine)


def test_a_restored_guest_meets_a_relay_it_does_not_know_and_is_greeted(line: Line, agent: Agent, vsock: Vsock) -> None:
    machine = line.start()
    peer = Peer(line.fifos)
    peer.greet()
    count = peer.start("/bin/sh", "-c", "echo one; read line; echo $line", stdin=True, id="cmdkept")
    number = count.streams["stdout"]
    peer.until(lambda: bytes(peer.data.get(number, b"")) == b"one\n", "it has begun")
    line.end(machine)
    machine = line.start()
    peer.greet()
    peer.feed(count.streams["stdin"], b"two\n", end=True)
    assert peer.finish(count).stdout == b"one\ntwo\n"
    assert peer.out_of_step == 0
    peer.close()
    line.end(machine)


def test_a_relay_has_no_rights_and_sees_the_machines_jail_alone(line: Line, vsock: Vsock) -> None:
    machine = line.start()
    found = status(line.relay)
    assert set(found["Uid"] + found["Gid"]) == {str(USER)}
    assert found["Groups"] == []
    assert {found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert found["NoNewPrivs"] == ["1"]
    assert line.relay
    assert [path.name for path in Path(f"/proc/{line.relay.pid}/root").iterdir()] == ["vsock.sock"]
    line.end(machine)


def test_the_host_sees_the_end_of_the_channel_when_the_machine_ends(line: Line, agent: Agent, vsock: Vsock) -> None:
    machine = line.start()
    out = os.open(line.fifos / "out", os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(out, select.POLLIN)
        assert not any(event & select.POLLHUP for _, event in poll.poll(0))
        line.end(machine)
        assert any(event & select.POLLHUP for _, event in poll.poll(0))
    finally:
        os.close(out)


def test_what_nobody_read_of_the_serial_line_is_kept_when_the_machine_has_ended(line: Line, vsock: Vsock) -> None:
    machine = line.start()
    console = os.open(line.fifos / "console", os.O_WRONLY | os.O_NONBLOCK)
    said = b"Linux version\n" * 8000
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(console, said[written : written + 4096])
    os.close(console)
    line.end(machine)
    assert line.words.read_bytes() == said[:written]
    assert written >= 60_000


@pytest.mark.parametrize("answers", [b"\n", b"x" * 4096, b"OK 1\n" * 100, b"OK 5000\n" + b"\xff" * 8, b"OK 5000"])
def test_a_guest_that_answers_nonsense_is_called_again(line: Line, agent: Agent, vsock: Vsock, answers: bytes) -> None:
    vsock.answers = answers
    machine = line.start()
    wait(lambda: vsock.calls > 3, "it is called again and again")
    vsock.answers = b""
    peer = Peer(line.fifos)
    peer.greet()
    assert peer.run("/bin/echo", "hello").stdout == b"hello\n"
    peer.close()
    line.end(machine)


def test_output_that_nobody_reads_holds_the_guest_up_and_costs_no_processor(
    line: Line, agent: Agent, vsock: Vsock
) -> None:
    machine = line.start()
    peer = Peer(line.fifos)
    peer.greet()
    flood = peer.start("/bin/sh", "-c", f"head -c {SIZE} /dev/zero")
    wait(lambda: used_s(line) > 0 and used_s(line) == used_s_later(line), "it stands still")
    assert len(peer.finish(flood).stdout) == SIZE
    peer.close()
    line.end(machine)


def used_s(line: Line) -> float:
    assert line.relay
    fields = Path(f"/proc/{line.relay.pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def used_s_later(line: Line) -> float:
    select.select([], [], [], 0.2)
    return used_s(line)
