"""A machine's link lets nothing through, tried from inside its network namespace as root there: as if the sentry were taken."""

# ruff: noqa: ASYNC220, ASYNC221, ASYNC240 - a test has nothing else to do while a program runs

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from space.broker import links
from space.broker.links import Link, Links, link, netns_name
from space.model.ids import new_id
from tests import installation

PROBE_S = 0.4
# Prints, for each (kind, address, port) asked on stdin, whether an answer came.
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
                one.recv(10)
            print("open")
        except OSError as error:
            print("closed", error.errno)
"""


@dataclass
class Machine:
    id: str
    link: Link
    netns: str

    def ask(self, *targets: tuple[str, str, int]) -> list[bool]:
        words = ["ip", "netns", "exec", self.netns, sys.executable, "-I", "-c", PROBE, str(PROBE_S)]
        done = subprocess.run(words, input=json.dumps(targets), capture_output=True, text=True, check=True)
        return [line.startswith("open") for line in done.stdout.splitlines()]

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", "-n", self.netns, *words], capture_output=True, text=True, check=True).stdout


class Wires:
    """Two machines' links and a listener on every address of the host."""

    def __init__(self, instance: str, links: Links, machines: list[Machine], port: int) -> None:
        self.instance = instance
        self.links = links
        self.machines = machines
        self.port = port


@pytest.fixture
async def wires() -> AsyncIterator[Wires]:
    if reason := installation.unfit():
        pytest.skip(reason)
    instance = "t" + secrets.token_hex(3)
    all_links = Links(instance)
    await all_links.open(set())
    machines: list[Machine] = []
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        try:
            for _ in range(2):
                machine, index = new_id("sbx"), await all_links.reserve()
                machines.append(Machine(machine, link(instance, index), netns_name(instance, machine)))
                await all_links.create(machine, index)
                # The worst machine sends everything to the host.
                for gateway in (machines[-1].link.host_v4, machines[-1].link.host_v6):
                    machines[-1].ip("route", "add", "default", "via", str(gateway))
            yield Wires(instance, all_links, machines, listener.getsockname()[1])
        finally:
            for machine in machines:
                await all_links.delete(machine.id, machine.link.index)
            await all_links.close()
    assert not list(Path("/sys/class/net").glob(f"{instance}-*"))
    assert not list(links.NETNS_DIR.glob(f"{instance}-*"))


def own_addresses() -> list[str]:
    """Addresses of the host that are not those of a link."""
    shown = subprocess.run(
        ["ip", "-j", "address", "show", "scope", "global"], capture_output=True, text=True, check=True
    ).stdout
    found = [info["local"] for item in json.loads(shown) for info in item.get("addr_info", []) if "local" in info]
    return [address for address in found if not address.startswith("198.18.")][:4]


def remove_rules(instance: str) -> None:
    subprocess.run(["nft", "delete", "table", "inet", instance], check=True)


async def test_without_the_rules_the_host_could_be_reached_so_these_tests_can_fail(wires: Wires) -> None:
    remove_rules(wires.instance)
    one = wires.machines[0]
    addresses = [str(one.link.host_v4), str(one.link.host_v6), *own_addresses()]
    assert all(one.ask(*(("tcp", address, wires.port) for address in addresses)))


async def test_a_machine_cannot_reach_its_links_other_end(wires: Wires) -> None:
    one = wires.machines[0]
    assert not any(one.ask(("tcp", str(one.link.host_v4), wires.port), ("tcp", str(one.link.host_v6), wires.port)))


async def test_a_machine_cannot_reach_any_address_of_the_host(wires: Wires) -> None:
    """N16: the host's api, whatever address it is asked by."""
    addresses = own_addresses()
    assert addresses
    assert not any(wires.machines[0].ask(*(("tcp", address, wires.port) for address in addresses)))


async def test_a_machine_cannot_reach_another_machine(wires: Wires) -> None:
    """N16, N3: neither by v4 nor by v6, although the host forwards."""
    one, other = wires.machines
    words = [
        sys.executable,
        "-I",
        "-c",
        "import socket, time\ns = socket.create_server(('::', 7777), family=socket.AF_INET6, dualstack_ipv6=True)\nprint(flush=True)\ntime.sleep(60)",
    ]
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    before = forwarding.read_text()
    server = subprocess.Popen(["ip", "netns", "exec", other.netns, *words], stdout=subprocess.PIPE)
    assert server.stdout
    server.stdout.readline()
    forwarding.write_text("1")
    try:
        assert other.ask(("tcp", "127.0.0.1", 7777)) == [True]
        assert not any(one.ask(("tcp", str(other.link.guest_v4), 7777), ("tcp", str(other.link.guest_v6), 7777)))
    finally:
        forwarding.write_text(before)
        server.kill()
        server.wait()


async def test_a_machine_cannot_reach_the_metadata_address_or_the_world(wires: Wires) -> None:
    """N10."""
    targets = [
        ("tcp", "169.254.169.254", 80),
        ("tcp", "1.1.1.1", 443),
        ("udp", "8.8.8.8", 53),
        ("tcp", "2606:4700::1111", 443),
    ]
    assert not any(wires.machines[0].ask(*targets))


async def test_udp_does_not_get_through_either(wires: Wires) -> None:
    """N3."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.settimeout(PROBE_S)
        target = ("udp", str(wires.machines[0].link.host_v4), listener.getsockname()[1])
        assert wires.machines[0].ask(target) == [False]
        with pytest.raises(TimeoutError):
            listener.recv(10)


async def test_a_foreign_source_address_gets_through_no_more(wires: Wires) -> None:
    """L15, N3: the machine may give itself any address."""
    one = wires.machines[0]
    one.ip("address", "add", "10.9.9.9/32", "dev", "eth0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.settimeout(PROBE_S)
        send = "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('10.9.9.9', 0))\ns.sendto(b'x', (sys.argv[1], int(sys.argv[2])))"
        target = [str(one.link.host_v4), str(listener.getsockname()[1])]
        subprocess.run(["ip", "netns", "exec", one.netns, sys.executable, "-I", "-c", send, *target], check=True)
        with pytest.raises(TimeoutError):
            listener.recv(10)


async def test_the_host_opens_no_connection_into_a_machine(wires: Wires) -> None:
    one = wires.machines[0]
    with (
        pytest.raises(OSError, match=r"timed out|refused|not permitted"),
        socket.create_connection((str(one.link.guest_v4), 7), timeout=PROBE_S),
    ):
        pass


async def test_loopback_inside_works(wires: Wires) -> None:
    one = wires.machines[0]
    assert "LOOPBACK,UP" in one.ip("link", "show", "lo")
    done = subprocess.run(
        [
            "ip",
            "netns",
            "exec",
            one.netns,
            sys.executable,
            "-I",
            "-c",
            "import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname())",
        ],
        check=False,
    )
    assert done.returncode == 0


async def test_the_rules_are_there_before_the_first_link(wires: Wires) -> None:
    fresh = Links(wires.instance + "x")
    assert not await fresh.guarded()
    await fresh.open(set())
    assert await fresh.guarded()
    await fresh.close()


@pytest.mark.parametrize(
    "damage",
    ["flush chain inet {0} input", "flush chain inet {0} output", "delete table inet {0}", "flush table inet {0}"],
)
async def test_damaged_rules_are_noticed_and_repaired_at_the_next_start(wires: Wires, damage: str) -> None:
    subprocess.run(["nft", *damage.format(wires.instance).split()], check=True)
    assert not await wires.links.guarded()
    again = Links(wires.instance)
    await again.open({machine.link.index for machine in wires.machines})
    assert await again.guarded()
    one = wires.machines[0]
    assert one.ask(("tcp", str(one.link.host_v4), wires.port)) == [False]


async def test_an_index_in_use_is_not_given_again_and_a_freed_one_not_at_once(wires: Wires) -> None:
    """L12: no address that another machine has, or had a moment ago."""
    used = {machine.link.index for machine in wires.machines}
    again = Links(wires.instance)
    await again.open(used)
    first = await again.reserve()
    assert first not in used
    again.free(first)
    assert await again.reserve() not in used | {first}


async def test_an_address_that_another_program_on_the_host_has_is_passed_over(wires: Wires) -> None:
    fresh = Links(wires.instance)
    await fresh.open({machine.link.index for machine in wires.machines})
    following = max(machine.link.index for machine in wires.machines) + 1
    taken = str(link(wires.instance, following).host_v4)
    subprocess.run(["ip", "address", "add", f"{taken}/32", "dev", "lo"], check=True)
    try:
        assert await fresh.reserve() == following + 1
    finally:
        subprocess.run(["ip", "address", "del", f"{taken}/32", "dev", "lo"], check=True)


async def test_a_link_made_again_replaces_a_half_made_one(wires: Wires) -> None:
    one = wires.machines[0]
    subprocess.run(["ip", "link", "delete", one.link.interface], check=True)
    await wires.links.create(one.id, one.link.index)
    assert f"{one.link.guest_v4}/31" in one.ip("address", "show", "eth0")


async def test_deleting_again_succeeds_and_a_sweep_leaves_links_in_use(wires: Wires) -> None:
    one, other = wires.machines
    await wires.links.sweep({one.link.index})
    assert not Path("/sys/class/net", other.link.interface).exists()
    assert Path("/sys/class/net", one.link.interface).exists()
    for _ in range(2):
        await wires.links.delete(other.id, other.link.index)
    assert wires.links.known() == {one.id}


async def test_the_hosts_end_believes_no_router_and_answers_for_no_other_address(wires: Wires) -> None:
    name = wires.machines[0].link.interface
    expected = {
        "ipv4/conf/{}/rp_filter": "1",
        "ipv4/conf/{}/arp_ignore": "2",
        "ipv6/conf/{}/accept_ra": "0",
        "ipv6/conf/{}/autoconf": "0",
    }
    for knob, value in expected.items():
        assert Path("/proc/sys/net", knob.format(name)).read_text().strip() == value
