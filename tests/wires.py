"""Links of two machines without the machines, and in the place of the gateway a listener that says what reached it.

Whatever a machine could send is sent from its network namespace as root there: as if the sentry were taken.
"""

# ruff: noqa: ASYNC240 - a test has nothing else to do while a program runs

import contextlib
import json
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import links
from space.broker.addressing import Link, link, netns_name
from space.broker.links import Links
from space.model.ids import new_id
from space.settings import Settings
from tests import brokers, installation

PROBE_S, ANSWER_S = 0.4, 5.0
"""How long is waited for what must not come, and for what must."""
HOST, GATEWAY, NAMES = "host", "gateway", "names"
# Prints, for each (kind, address, port) asked on stdin, what was answered, or the number of the error.
PROBE = """
import json, socket, sys
for kind, address, port in json.load(sys.stdin):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as one:
        one.settimeout(float(sys.argv[1]))
        try:
            one.connect((address, port))
            if kind == "udp":
                one.send(b"x")
            print(one.recv(1000).decode())
        except TimeoutError:
            print("timeout")
        except OSError as error:
            print(error.errno)
"""
_SO_ORIGINAL_DST = 80


class Listener:
    """Answers every connection and datagram at one port of the host with its name and where that was sent to."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name = name
        self.peers: list[str] = []
        self.held: list[socket.socket] = []
        self._tcp = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._udp.bind(("::", self.port))
        self._threads = [threading.Thread(target=serve, daemon=True) for serve in (self._accept, self._receive)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        # What is only closed goes on waiting.
        for one in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for one in (self._tcp, self._udp, *self.held):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._tcp.accept()
            except OSError:
                return
            self.peers.append(peer[0].removeprefix("::ffff:"))
            self.held.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{self.name} {original(connection)}".encode())

    def _receive(self) -> None:
        while True:
            try:
                data, peer = self._udp.recvfrom(1000)
            except OSError:
                return
            if not data:
                return
            self.peers.append(peer[0].removeprefix("::ffff:"))
            self._udp.sendto(self.name.encode(), peer)


def original(connection: socket.socket) -> str:
    """Where a connection was sent to before it was redirected, as the kernel says."""
    mapped = connection.getpeername()[0].startswith("::ffff:")
    try:
        if mapped:
            port, packed = struct.unpack("!2xH4s8x", connection.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
            return f"{socket.inet_ntop(socket.AF_INET, packed)} {port}"
        port, packed = struct.unpack("!2xH4x16s4x", connection.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28))
        return f"{socket.inet_ntop(socket.AF_INET6, packed)} {port}"
    except OSError:
        return "nowhere else"


class Machine:
    """The far end of a link."""

    def __init__(self, machine: str, of: Link, netns: str) -> None:
        self.id = machine
        self.link = of
        self.netns = netns

    def ask(self, *targets: tuple[str, str, int], wait_s: float = ANSWER_S) -> list[str]:
        """What answers at each of these: a listener's name and where that was sent to, or `timeout`, or an errno."""
        return self.run(PROBE, str(wait_s), given=json.dumps(targets)).splitlines()

    def run(self, program: str, *words: object, given: str = "") -> str:
        """Run a Python program there, as root, and return what it prints."""
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.netns}", sys.executable, "-I", "-c", program, *map(str, words)],
            input=given,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def start(self, program: str, *words: object) -> "subprocess.Popen[str]":
        """Start a Python program there, whose lines can be read and which can be written to."""
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.netns}", sys.executable, "-I", "-u", "-c", program, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", "-n", self.netns, *words], capture_output=True, text=True, check=True).stdout


class Wires:
    """Two machines' links, a listener at the gateway's ports, and one on every address of the host."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.instance = settings.instance
        self.links = Links(settings)
        self.machines: list[Machine] = []
        self.gateway = Listener(GATEWAY, settings.gateway_port)
        self.names = Listener(NAMES, settings.gateway_dns_port)
        self.host = Listener(HOST)

    async def add(self) -> Machine:
        machine, index = new_id("sbx"), await self.links.reserve()
        one = Machine(machine, link(self.instance, index), netns_name(self.instance, machine))
        self.machines.append(one)
        await self.links.create(machine, index)
        self.links.enter(index, machine)
        return one

    def register(self) -> dict[str, str]:
        """What is entered: the target of each address."""
        return {path.name: str(path.readlink()) for path in self.settings.links_dir.iterdir()}

    async def end(self) -> None:
        for machine in self.machines:
            await self.links.delete(machine.id, machine.link.index)
        await self.links.close()
        for listener in (self.gateway, self.names, self.host):
            listener.close()


@contextlib.asynccontextmanager
async def stretched(**changes: Any) -> AsyncIterator[Wires]:
    """Both links, until nothing is left of them; skips where that cannot be."""
    if reason := installation.unfit():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as directory:
        instance = "t" + secrets.token_hex(3)
        wires = Wires(brokers.settings_in(Path(directory), Path(directory) / "run", instance=instance, **changes))
        try:
            await wires.links.open(set())
            for _ in range(2):
                await wires.add()
            yield wires
        finally:
            await wires.end()
        assert wires.register() == {}
    assert not list(Path("/sys/class/net").glob(f"{instance}-*"))
    assert not list(links.NETNS_DIR.glob(f"{instance}-*"))


def own_addresses() -> list[str]:
    """Addresses of the host that are not those of a link."""
    shown = subprocess.run(
        ["ip", "-j", "address", "show", "scope", "global"], capture_output=True, text=True, check=True
    ).stdout
    found = [info["local"] for item in json.loads(shown) for info in item.get("addr_info", []) if "local" in info]
    return [address for address in found if not address.startswith(("198.18.", "198.19.", "fd"))][:4]
