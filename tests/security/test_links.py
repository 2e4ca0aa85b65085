"""What leaves a machine's link reaches the gateway or nobody, tried from inside its network namespace as root there: as
if the sentry were taken."""

# ruff: noqa: ASYNC221, ASYNC240 - a test has nothing else to do while a program runs

import contextlib
import errno
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from space.broker import conntrack, firewall
from space.broker.links import Links
from tests import brokers, wires
from tests.wires import Machine, Wires, own_addresses

DNS = 53
ETH_P_ALL = 3
REFUSED = str(errno.ECONNREFUSED)
# Sends one packet with any source: family, source, destination, and an IP protocol with its bytes in hex.
RAW = """
import socket, struct, sys
source, target, protocol, body = sys.argv[1], sys.argv[2], int(sys.argv[3]), bytes.fromhex(sys.argv[4])
if ":" in target:
    pack = lambda text: socket.inet_pton(socket.AF_INET6, text)
    packet = struct.pack("!IHBB", 6 << 28, len(body), protocol, 255) + pack(source) + pack(target) + body
else:
    pack = socket.inet_aton
    packet = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0) + pack(source) + pack(target)
    total = sum(struct.unpack("!10H", packet))
    total = (total & 0xFFFF) + (total >> 16)
    packet = packet[:10] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + packet[12:] + body
kind = 0x86DD if ":" in target else 0x0800
mac = open("/sys/class/net/eth0/address").read().strip().replace(":", "")
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
    wire.bind(("eth0", 0))
    wire.send(bytes.fromhex("ffffffffffff" if len(sys.argv) < 6 else sys.argv[5]) + bytes.fromhex(mac) + struct.pack("!H", kind) + packet)
"""
FRAME = """
import socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
    wire.bind(("eth0", 0))
    for frame in sys.argv[1:]:
        wire.send(bytes.fromhex(frame))
"""
HOLD = """
import socket, sys
held = []
for _ in range(int(sys.argv[3])):
    one = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
    one.settimeout(10)
    try:
        one.connect((sys.argv[1], int(sys.argv[2])))
        one.recv(100)
        held.append(one)
    except OSError:
        one.close()
print(len(held), flush=True)
for line in sys.stdin:
    try:
        held[0].send(line.encode())
        print(len(held[0].recv(100)), flush=True)
    except OSError as error:
        print("error", error.errno, flush=True)
"""
UDP_BODY = "d4310035000a0000aabb"  # from port 54321 to 53, no checksum (which v4 allows)
SYN_BODY = "d43100500000000100000000500220000000" + "0000"


@pytest.fixture
async def strung() -> AsyncIterator[Wires]:
    async with wires.stretched() as one:
        yield one


def everywhere(strung: Wires, port: int) -> list[tuple[str, str, int]]:
    """Every address of the host and of the other machine, and some of the world, at one port."""
    one, other = strung.machines
    addresses = [
        *(one.link.host_v4, one.link.host_v6, other.link.host_v4, other.link.host_v6),
        *(other.link.guest_v4, other.link.guest_v6, *own_addresses()),
        *("169.254.169.254", "1.1.1.1", "10.0.0.1", "2606:4700::1111", "fd00:ec2::254"),
    ]
    return [("tcp", str(address), port) for address in addresses]


async def test_without_the_rules_the_host_could_be_reached_so_these_tests_can_fail(strung: Wires) -> None:
    subprocess.run(["nft", "delete", "table", "inet", strung.instance], check=True)
    one = strung.machines[0]
    addresses = [str(one.link.host_v4), str(one.link.host_v6), *own_addresses()]
    answers = one.ask(*(("tcp", address, strung.host.port) for address in addresses))
    assert all(answer.startswith(wires.HOST) for answer in answers)


async def test_a_machine_cannot_reach_any_address_of_the_host(strung: Wires) -> None:
    """N16: whatever it connects to on the host, by v4 or v6, it has reached the gateway, which is told where to."""
    assert own_addresses()
    targets = everywhere(strung, strung.host.port)
    assert strung.machines[0].ask(*targets) == [f"{wires.GATEWAY} {address} {port}" for _, address, port in targets]
    assert strung.host.peers == []


async def test_a_machine_cannot_reach_another_machine(strung: Wires) -> None:
    """N16, N3: neither by v4 nor by v6, although the host forwards and the other listens."""
    one, other = strung.machines
    listening = "import socket\ns = socket.create_server(('::', 7777), family=socket.AF_INET6, dualstack_ipv6=True)\nprint()\nwhile True: s.accept()[0].send(b'other')"
    knobs = [Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding")]
    before = [knob.read_text() for knob in knobs]
    server = other.start(listening)
    assert server.stdout
    server.stdout.readline()
    try:
        for knob in knobs:
            knob.write_text("1")
        assert other.ask(("tcp", "127.0.0.1", 7777)) == ["other"]
        answers = one.ask(("tcp", str(other.link.guest_v4), 7777), ("tcp", str(other.link.guest_v6), 7777))
        assert [answer.split()[0] for answer in answers] == [wires.GATEWAY, wires.GATEWAY]
        assert one.ask(("udp", str(other.link.guest_v4), 7777), wait_s=wires.PROBE_S)[0] not in {"other", wires.NAMES}
    finally:
        for knob, value in zip(knobs, before, strict=True):
            knob.write_text(value)
        server.kill()
        server.wait()


async def test_a_machine_cannot_reach_the_metadata_address_or_the_world(strung: Wires) -> None:
    """N10: nor by any port, among them those of DNS over TLS and HTTPS, and the gateway's own."""
    ports = [80, 443, 853, 22, strung.settings.gateway_port, strung.settings.node_port]
    targets = [target for port in ports for target in everywhere(strung, port)[-5:]]
    assert strung.machines[0].ask(*targets) == [f"{wires.GATEWAY} {address} {port}" for _, address, port in targets]


async def test_questions_for_names_reach_the_gateway_whomever_they_are_sent_to(strung: Wires) -> None:
    """N1: and the answer comes from whom was asked, so a resolver that compares is content."""
    one = strung.machines[0]
    addresses = [str(one.link.host_v4), str(one.link.host_v6), "192.0.2.53", "8.8.8.8", "2001:4860:4860::8888"]
    asked = [(kind, address, DNS) for kind in ("udp", "tcp") for address in addresses]
    answers = one.ask(*asked)
    assert [answer.split()[0] for answer in answers] == [wires.NAMES] * len(asked)
    assert set(strung.names.peers) == {str(one.link.guest_v4), str(one.link.guest_v6)}


async def test_udp_but_for_names_is_refused_at_once(strung: Wires) -> None:
    """N3: QUIC among it."""
    one = strung.machines[0]
    own = [(str(one.link.host_v4), strung.host.port), (str(one.link.host_v6), strung.names.port)]
    targets = [("udp", *where) for where in [*own, ("1.1.1.1", 443), ("2606:4700::1111", 443)]]
    answers = one.ask(*targets)
    assert set(answers) <= {str(number) for number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EACCES)}
    assert one.ask(("udp", "224.0.0.251", 5353), wait_s=wires.PROBE_S) == ["timeout"]
    assert strung.host.peers == strung.names.peers == []


@pytest.mark.parametrize("protocol", [1, 2, 41, 47, 50, 132, 253])
async def test_no_other_protocol_of_ip_arrives(strung: Wires, protocol: int) -> None:
    """N3: ICMP, IGMP, tunnels, SCTP, raw."""
    one = strung.machines[0]
    mac = one.link.host_mac.replace(":", "")
    body = "0800f7ff00000000" if protocol == 1 else "00" * 24
    with contextlib.ExitStack() as seen:
        arriving = [
            seen.enter_context(socket.socket(family, socket.SOCK_RAW, protocol))
            for family in (socket.AF_INET, socket.AF_INET6)
        ]
        one.run(RAW, one.link.guest_v4, one.link.host_v4, protocol, body, mac)
        one.run(RAW, one.link.guest_v6, one.link.host_v6, protocol, body, mac)
        for receiver in arriving:
            receiver.settimeout(wires.PROBE_S)
            deadline = time.monotonic() + wires.PROBE_S
            with contextlib.suppress(TimeoutError):
                while time.monotonic() < deadline:
                    assert receiver.recvfrom(4096)[1][0] not in {str(one.link.guest_v4), str(one.link.guest_v6)}


async def test_a_ping_is_not_answered(strung: Wires) -> None:
    one = strung.machines[0]
    program = "import socket, sys\nfor a in sys.argv[1:]:\n v6 = ':' in a\n s = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_RAW, 58 if v6 else 1)\n s.settimeout(0.4)\n s.sendto(bytes.fromhex('8000000000010001' if v6 else '0800f7fd00010001'), (a, 0))\n try:\n  while True:\n   d = s.recv(200)\n   print(d[0] if v6 else d[20])\n except TimeoutError: pass"
    kinds = one.run(program, one.link.host_v4, one.link.host_v6, "1.1.1.1").split()
    assert not {"0", "129"} & set(kinds)


async def test_a_foreign_source_address_gets_nothing_through_and_leaves_no_trace(strung: Wires) -> None:
    """L15, N3: no connection and no question of one machine can be made in the name of another, by v4 or by v6."""
    one, other = strung.machines
    mac = one.link.host_mac.replace(":", "")
    for source, target in (
        (other.link.guest_v4, one.link.host_v4),
        (other.link.guest_v4, other.link.host_v4),
        (one.link.host_v4, one.link.host_v4),
        ("10.9.9.9", "8.8.8.8"),
        ("127.0.0.1", one.link.host_v4),
        (other.link.guest_v6, one.link.host_v6),
        (one.link.host_v6, one.link.host_v6),
        ("fe80::1", one.link.host_v6),
        ("::1", one.link.host_v6),
    ):
        for protocol, body in ((17, UDP_BODY), (6, SYN_BODY)):
            one.run(RAW, source, target, protocol, body, mac)
    # Its own are let through: the same way of sending, so that the silence above says something.
    one.run(RAW, one.link.guest_v4, one.link.host_v4, 17, UDP_BODY, mac)
    brokers.wait(lambda: bool(strung.names.peers), "the machine's own datagram")
    assert strung.names.peers == [str(one.link.guest_v4)]
    assert strung.gateway.peers == strung.host.peers == []
    assert conntrack.forget(other.link.guest_v4) == conntrack.forget(other.link.guest_v6) == 0


async def test_an_address_that_a_machine_gives_itself_is_of_no_use(strung: Wires) -> None:
    one, other = strung.machines
    for address in (f"{other.link.guest_v4}/32", f"{other.link.guest_v6}/128", "10.9.9.9/32"):
        one.ip("address", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
    program = "import socket, sys\ns = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET)\ns.settimeout(0.4)\ns.bind((sys.argv[1], 0))\ntry:\n s.connect((sys.argv[2], 80))\n print('open')\nexcept OSError: print('closed')"
    for source, target in (
        (other.link.guest_v4, one.link.host_v4),
        (other.link.guest_v6, one.link.host_v6),
        ("10.9.9.9", "1.1.1.1"),
    ):
        assert one.run(program, source, target).split() == ["closed"]
    assert strung.gateway.peers == []


async def test_the_hosts_end_learns_no_neighbour_address_or_route_from_a_machine(strung: Wires) -> None:
    """ARP and ND games: claims, answers that nobody asked for, and a router's advertisement."""
    one, other = strung.machines

    def state() -> str:
        shown = [["neigh", "show", "dev", one.link.interface], ["neigh", "show", "dev", other.link.interface]]
        shown += [["address", "show", "dev", one.link.interface]]
        # Not all that there are: other installations on this host come and go meanwhile.
        of = (["dev", one.link.interface], ["dev", other.link.interface], ["default"])
        shown += [[family, "route", "show", *which] for family in ("-4", "-6") for which in of]
        return "\n".join(
            subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout for words in shown
        )

    before = state()
    assert before.count("PERMANENT") == 4
    evil, everybody = "020000000066", "ffffffffffff"
    v4 = {name: one.link.__getattribute__(name).packed.hex() for name in ("host_v4", "guest_v4")}
    theirs = other.link.guest_v4.packed.hex()
    arp = [
        f"{everybody}{evil}080600010800060400{op}{evil}{sender}000000000000{target}"
        for op in ("01", "02")
        for sender in (v4["guest_v4"], v4["host_v4"], theirs, "0a090909")
        for target in (v4["host_v4"], theirs)
    ]
    one.run(FRAME, *arp)
    router = "fe800000000000000000000000000066"
    advertisement = (
        "8600000040000708" + "0" * 16 + f"0101{evil}" + "030440c00000070800000708" + "0" * 8 + "20010db8" + "0" * 24
    )
    neighbour = "88000000a0000000" + one.link.guest_v6.packed.hex() + f"0201{evil}"
    for source, body in ((router, advertisement), (one.link.guest_v6.packed.hex(), neighbour)):
        text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(source))
        one.run(RAW, text, "ff02::1", 58, body, "333300000001")
        one.run(RAW, text, one.link.host_v6, 58, body, one.link.host_mac.replace(":", ""))
    # Everything has arrived once an answer to what was sent afterwards is there.
    assert one.ask(("tcp", str(one.link.host_v4), 80))[0].startswith(wires.GATEWAY)
    assert state() == before


async def test_the_gateways_ports_can_be_reached_from_links_alone(strung: Wires) -> None:
    for address in ("127.0.0.1", "::1", *own_addresses()):
        for port in (strung.settings.gateway_port, strung.settings.gateway_dns_port):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=wires.ANSWER_S)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(wires.PROBE_S)
        asking.sendto(b"x", ("127.0.0.1", strung.settings.gateway_dns_port))
        with pytest.raises(TimeoutError):
            asking.recv(100)
    assert strung.gateway.peers == strung.names.peers == []


async def test_the_gateways_ports_cannot_be_reached_from_another_network_of_the_host(strung: Wires) -> None:
    """Neither there nor through: a container, say, whose traffic the host forwards."""
    name, port = f"{strung.instance}other", strung.settings.gateway_port
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in (
            ["link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name],
            ["address", "add", "10.99.98.1/24", "dev", name],
            ["link", "set", name, "up"],
            ["-n", name, "address", "add", "10.99.98.2/24", "dev", "eth0"],
            ["-n", name, "link", "set", "eth0", "up"],
            ["-n", name, "route", "add", "default", "via", "10.99.98.1"],
        ):
            subprocess.run(["ip", *words], check=True)
        stranger = Machine("", strung.machines[0].link, name)
        assert stranger.ask(("tcp", "10.99.98.1", strung.host.port))[0].startswith(wires.HOST)
        targets = [("tcp", "10.99.98.1", port), ("tcp", str(strung.machines[0].link.host_v4), port)]
        assert stranger.ask(*targets) == [REFUSED, REFUSED]
        assert stranger.ask(("udp", "10.99.98.1", strung.names.port), wait_s=wires.PROBE_S) == ["timeout"]
        assert strung.gateway.peers == strung.names.peers == []
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
        subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


async def test_without_a_gateway_everything_is_refused_at_once(strung: Wires) -> None:
    strung.gateway.close()
    strung.names.close()
    one = strung.machines[0]
    targets = [("tcp", address, port) for address in ("1.1.1.1", "2606:4700::1111") for port in (443, DNS)]
    targets += [("udp", address, DNS) for address in ("8.8.8.8", "2001:4860:4860::8888")]
    assert one.ask(*targets) == [REFUSED] * len(targets)


async def test_the_host_opens_no_connection_into_a_machine(strung: Wires) -> None:
    one = strung.machines[0]
    for address in (str(one.link.guest_v4), str(one.link.guest_v6)):
        with (
            pytest.raises(OSError, match=r"timed out|refused|not permitted"),
            socket.create_connection((address, 7), timeout=wires.PROBE_S),
        ):
            pass


async def test_nothing_of_the_gateways_goes_elsewhere_once_a_link_is_gone(strung: Wires) -> None:
    """What it had for a machine must not leave by the host's own default route, as by v6 it would."""
    one, elsewhere = strung.machines[0], f"{strung.instance}out"
    client = one.start(HOLD, one.link.host_v6, 80, 1)
    assert client.stdout
    assert client.stdout.readline().strip() == "1"
    address = str(one.link.guest_v6)
    subprocess.run(["ip", "link", "add", elsewhere, "type", "veth", "peer", "name", f"{elsewhere}p"], check=True)
    try:
        for end in (elsewhere, f"{elsewhere}p"):
            subprocess.run(["ip", "link", "set", end, "up"], check=True)
        await strung.links.delete(one.id, one.link.index)
        subprocess.run(["ip", "route", "add", f"{address}/128", "dev", elsewhere], check=True)
        subprocess.run(["ip", "neigh", "add", address, "lladdr", "02:00:00:00:00:01", "dev", elsewhere], check=True)
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        wire.bind((elsewhere, ETH_P_ALL))
        wire.settimeout(wires.PROBE_S)
        strung.gateway.held[-1].send(b"for the machine")
        with wire, contextlib.suppress(TimeoutError):
            while frame := wire.recv(65536):
                assert b"for the machine" not in frame
    finally:
        subprocess.run(["ip", "link", "delete", elsewhere], check=True)
        client.kill()
        client.communicate()


async def test_a_connection_that_the_host_no_longer_knows_is_reset_as_soon_as_it_is_used(strung: Wires) -> None:
    """After a wake, say. It must not hang, nor be taken up in the middle."""
    one = strung.machines[0]
    for address in (one.link.host_v4, one.link.host_v6):
        client = one.start(HOLD, address, 80, 1)
        assert client.stdin
        assert client.stdout
        assert client.stdout.readline().strip() == "1"
        assert conntrack.forget(one.link.guest_v4) + conntrack.forget(one.link.guest_v6) >= 1
        began = time.monotonic()
        client.stdin.write("x\n")
        client.stdin.flush()
        assert client.stdout.readline().split() == ["error", str(errno.ECONNRESET)]
        assert time.monotonic() - began < 2
        client.kill()
        client.communicate()


async def test_the_kernel_forgets_a_links_connections_when_it_goes(strung: Wires) -> None:
    one, other = strung.machines
    for machine in (one, other):
        machine.ask(("tcp", "1.1.1.1", 80), ("tcp", "2606:4700::1111", 80), ("udp", "8.8.8.8", DNS))
    await strung.links.delete(one.id, one.link.index)
    assert conntrack.forget(one.link.guest_v4) == conntrack.forget(one.link.guest_v6) == 0
    assert conntrack.forget(other.link.guest_v4) == 2
    assert conntrack.forget(other.link.guest_v6) == 1


async def test_a_machine_has_so_many_connections_and_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "CONNECTIONS_MAX", 20)
    async with wires.stretched() as strung:
        one, other = strung.machines
        client = one.start(HOLD, one.link.host_v4, 80, 30)
        assert client.stdout
        assert client.stdout.readline().strip() == "20"
        assert one.ask(("tcp", str(one.link.host_v4), 80), ("tcp", "2606:4700::1111", 80)) == [REFUSED, REFUSED]
        assert other.ask(("tcp", str(other.link.host_v4), 80))[0].startswith(wires.GATEWAY)
        client.kill()
        client.communicate()
        for connection in strung.gateway.held:
            connection.close()
        brokers.wait(lambda: one.ask(("tcp", str(one.link.host_v4), 80))[0].startswith(wires.GATEWAY), "room again")


async def test_a_flood_of_beginnings_is_cut_off_before_it_costs_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "BEGINNINGS_S", 1)
    monkeypatch.setattr(firewall, "BEGINNINGS_BURST", 10)
    async with wires.stretched() as strung:
        one, other = strung.machines
        answers = one.ask(*[("tcp", "1.1.1.1", 80)] * 30)
        assert 10 <= sum(answer.startswith(wires.GATEWAY) for answer in answers) <= 15
        assert set(answers) == {f"{wires.GATEWAY} 1.1.1.1 80", REFUSED}
        assert conntrack.forget(one.link.guest_v4) <= 15
        assert other.ask(("tcp", "1.1.1.1", 80))[0].startswith(wires.GATEWAY)


async def test_a_flood_of_questions_is_cut_off_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "QUESTIONS_S", 1)
    monkeypatch.setattr(firewall, "QUESTIONS_BURST", 10)
    flood = "import socket\nfor _ in range(200): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))"
    async with wires.stretched() as strung:
        one, other = strung.machines
        one.run(flood)
        assert other.ask(("udp", "8.8.8.8", DNS)) == [wires.NAMES]
        assert strung.names.peers.count(str(one.link.guest_v4)) <= 15


async def test_loopback_inside_works(strung: Wires) -> None:
    one = strung.machines[0]
    assert "LOOPBACK,UP" in one.ip("link", "show", "lo")
    one.run("import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname())")


async def test_the_rules_are_there_before_the_first_link(strung: Wires) -> None:
    fresh = Links(strung.settings.model_copy(update={"instance": strung.instance + "x"}))
    assert not await fresh.guarded()
    await fresh.open(set())
    assert await fresh.guarded()
    await fresh.close()


@pytest.mark.parametrize(
    "damage",
    [
        *("flush chain inet {0} input", "flush chain inet {0} output", "flush chain inet {0} redirected"),
        *("flush chain inet {0} from_guest", "flush chain inet {0} begun", "flush table inet {0}"),
        *("delete table inet {0}", "insert rule inet {0} from_guest accept", "insert rule inet {0} input accept"),
        "add rule inet {0} redirected ip daddr 1.1.1.1 accept",
        "add chain inet {0} other {{ type filter hook prerouting priority -400 ; }}",
    ],
)
async def test_damaged_rules_are_noticed_and_repaired_at_the_next_start(strung: Wires, damage: str) -> None:
    subprocess.run(["nft", *damage.format(strung.instance).split()], check=True)
    assert not await strung.links.guarded()
    again = Links(strung.settings)
    await again.open({machine.link.index for machine in strung.machines})
    assert await again.guarded()
    answers = strung.machines[0].ask(("tcp", str(strung.machines[0].link.host_v4), strung.host.port))
    assert answers[0].startswith(wires.GATEWAY)


async def test_a_start_lets_through_the_links_that_are_known_and_no_others(strung: Wires) -> None:
    one, other = strung.machines
    subprocess.run(["nft", "flush", "set", "inet", strung.instance, "sources4"], check=True)
    await Links(strung.settings).open({one.link.index})
    assert one.ask(("tcp", "1.1.1.1", 80), ("tcp", "2606:4700::1111", 80))[1].startswith(wires.GATEWAY)
    assert other.ask(("tcp", "1.1.1.1", 80), wait_s=wires.PROBE_S) == ["timeout"]
    assert set(strung.register()) == {str(one.link.guest_v4), str(one.link.guest_v6)}


async def test_a_start_interrupts_no_connection(strung: Wires) -> None:
    one = strung.machines[0]
    client = one.start(HOLD, one.link.host_v4, 80, 1)
    assert client.stdin
    assert client.stdout
    assert client.stdout.readline().strip() == "1"
    subprocess.run(["nft", "flush", "chain", "inet", strung.instance, "output"], check=True)
    await Links(strung.settings).open({machine.link.index for machine in strung.machines})
    client.stdin.write("x\n")
    client.stdin.flush()
    strung.gateway.held[-1].settimeout(5)
    assert strung.gateway.held[-1].recv(10) == b"x\n"
    strung.gateway.held[-1].send(b"abc")
    assert client.stdout.readline().strip() == "3"
    client.kill()
    client.communicate()


async def test_the_register_says_whose_an_address_is_for_as_long_as_the_link_is_there(strung: Wires) -> None:
    one, other = strung.machines
    said = f"{one.id},{one.link.host_v4},{one.link.host_v6}"
    assert {name for name, target in strung.register().items() if target == said} == {
        str(one.link.guest_v4),
        str(one.link.guest_v6),
    }
    strung.links.enter(one.link.index, "sbxclaimed")
    assert strung.register()[str(one.link.guest_v6)] == f"sbxclaimed,{one.link.host_v4},{one.link.host_v6}"
    await strung.links.delete(one.id, one.link.index)
    assert set(strung.register()) == {str(other.link.guest_v4), str(other.link.guest_v6)}
    # Made again it is nobody's until it is entered.
    await strung.links.create(one.id, one.link.index)
    assert str(one.link.guest_v4) not in strung.register()


async def test_the_register_can_be_read_by_everybody_and_written_by_root_alone(strung: Wires) -> None:
    found = strung.settings.links_dir.stat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o755, 0)


async def test_what_a_crash_has_left_in_the_register_is_found(strung: Wires) -> None:
    used = {machine.link.index for machine in strung.machines}
    assert strung.links.others(used) == []
    (strung.settings.links_dir / ".198.18.0.1").symlink_to("half")
    (strung.settings.links_dir / "198.18.9.9").symlink_to("sbxgone,198.18.9.8,fd00::")
    assert strung.links.others(used) == [".198.18.0.1", "198.18.9.9"]
    for name in strung.links.others(used):
        strung.links.strike(name)
    assert len(strung.register()) == 4


async def test_an_index_in_use_is_not_given_again_and_a_freed_one_not_at_once(strung: Wires) -> None:
    """L12: no address that another machine has, or had a moment ago."""
    used = {machine.link.index for machine in strung.machines}
    again = Links(strung.settings)
    await again.open(used)
    first = await again.reserve()
    assert first not in used
    again.free(first)
    assert await again.reserve() not in used | {first}


async def test_an_address_that_another_program_on_the_host_has_is_passed_over(strung: Wires) -> None:
    following = max(machine.link.index for machine in strung.machines) + 1
    taken = str(wires.link(strung.instance, following).host_v4)
    subprocess.run(["ip", "address", "add", f"{taken}/32", "dev", "lo"], check=True)
    try:
        assert await strung.links.reserve() == following + 1
    finally:
        subprocess.run(["ip", "address", "del", f"{taken}/32", "dev", "lo"], check=True)


async def test_a_link_made_again_replaces_a_half_made_one(strung: Wires) -> None:
    one = strung.machines[0]
    subprocess.run(["ip", "link", "delete", one.link.interface], check=True)
    await strung.links.create(one.id, one.link.index)
    assert f"{one.link.guest_v4}/31" in one.ip("address", "show", "eth0")


async def test_deleting_again_succeeds_and_a_sweep_leaves_links_in_use(strung: Wires) -> None:
    one, other = strung.machines
    await strung.links.sweep({one.link.index})
    assert not Path("/sys/class/net", other.link.interface).exists()
    assert Path("/sys/class/net", one.link.interface).exists()
    for _ in range(2):
        await strung.links.delete(other.id, other.link.index)
    assert strung.links.known() == {one.id}


async def test_the_hosts_end_believes_no_router_and_answers_for_no_other_address(strung: Wires) -> None:
    name = strung.machines[0].link.interface
    expected = {
        "ipv4/conf/{}/rp_filter": "1",
        "ipv4/conf/{}/arp_ignore": "2",
        "ipv6/conf/{}/accept_ra": "0",
        "ipv6/conf/{}/autoconf": "0",
    }
    for knob, value in expected.items():
        assert Path("/proc/sys/net", knob.format(name)).read_text().strip() == value
