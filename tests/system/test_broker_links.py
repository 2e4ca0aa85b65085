"""Guests on gVisor behind their links: they reach the gateway and nothing else hangs, whatever happens to machine and broker.

In the gateway's place a listener says where what reached it was sent to. No node, no api; guests are not quiesced here.
"""

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from space.broker import conntrack
from space.broker.addressing import Link, link
from space.model.ids import new_id
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site, cleared, started, until
from tests.wires import GATEWAY, NAMES, PROBE, Listener

WORLD = [("tcp", "1.1.1.1", 443), ("tcp", "2606:4700::1111", 443), ("udp", "192.0.2.53", 53), ("tcp", "8.8.8.8", 53)]
# Holds connections and says, in a file, how the wait for more of each has ended and after how long.
HOLD = """
import os, socket, threading, time
def hold(number, address):
    one = socket.create_connection((address, 80), 20)
    one.settimeout(None)
    one.recv(100)
    open(f'/held{number}', 'w').close()
    try:
        told = repr(one.recv(100))
    except OSError as error:
        told = type(error).__name__
    with open(f'/.ended{number}', 'w') as file:
        file.write(told)
    os.rename(f'/.ended{number}', f'/ended{number}')
for number, address in enumerate(['1.1.1.1', '2606:4700::1111']):
    threading.Thread(target=hold, args=(number, address)).start()
"""
INSIST = """
import socket, time
first = True
while True:
    for kind, address, port in ((socket.AF_INET, '1.1.1.1', 443), (socket.AF_INET6, '2606:4700::1111', 443)):
        with socket.socket(kind) as one:
            try:
                one.connect((address, port))
            except OSError:
                pass
    if first:
        open('/insists', 'w').close()
        first = False
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one
    assert list(broker.settings.links_dir.iterdir()) == []


@pytest.fixture
def gateway(broker: Separate) -> Iterator[Listener]:
    listeners = [Listener(GATEWAY, broker.settings.gateway_port), Listener(NAMES, broker.settings.gateway_dns_port)]
    yield listeners[0]
    for listener in listeners:
        listener.close()


def run(site: Site, body: str, code: str, *words: str) -> str:
    with site.peer(body) as peer:
        done = peer.run(*GUEST_PYTHON, code, *words)
    assert done.exit["code"] == 0, done.stderr
    return done.stdout.decode()


def ask(site: Site, body: str, *targets: tuple[str, str, int]) -> list[str]:
    asked = PROBE.replace("json.load(sys.stdin)", "json.loads(sys.argv[2])")
    return run(site, body, asked, "3", json.dumps(targets)).splitlines()


def start(site: Site, body: str, code: str, *signs: str) -> None:
    with site.peer(body) as peer:
        peer.start(*GUEST_PYTHON, code)
        peer.until(lambda: all((disk(site, body) / sign).exists() for sign in signs), f"{signs} are there")


def disk(site: Site, body: str) -> Path:
    return site.settings.broker_dir / "disks/machines" / body


def link_of(site: Site, body: str) -> Link:
    journal = site.settings.broker_dir / "machines" / body / "journal.json"
    return link(site.settings.instance, json.loads(journal.read_text())["link"])


def entered(site: Site) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in site.settings.links_dir.iterdir()}


def entry(of: Link, machine: str) -> dict[str, str]:
    target = f"{machine},{of.host_v4},{of.host_v6}"
    return {str(of.guest_v4): target, str(of.guest_v6): target}


async def boot(site: Site, machine: str, **changes: Any) -> None:
    fields = {"template": site.template, "driver": "gvisor", "resources": RESOURCES, "hostname": "guest", **changes}
    await site.call("boot", machine=machine, **fields)


REACHED = [f"{GATEWAY} 1.1.1.1 443", f"{GATEWAY} 2606:4700::1111 443", NAMES, f"{NAMES} 8.8.8.8 53"]


async def test_a_guest_reaches_the_gateway_by_v4_and_v6_and_its_name_server(site: Site, gateway: Listener) -> None:
    machine = await site.boot()
    assert ask(site, machine, *WORLD) == REACHED
    of = link_of(site, machine)
    assert set(gateway.peers) == {str(of.guest_v4), str(of.guest_v6)}
    assert entered(site) == entry(of, machine)


async def test_without_a_gateway_a_guest_is_refused_at_once(site: Site) -> None:
    machine = await site.boot()
    began = time.monotonic()
    assert "timeout" not in ask(site, machine, *WORLD)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("verbs", [("suspend", "wake"), ("stop", "start"), ("pause", "resume")])
async def test_a_machine_that_comes_back_is_somebodys_again(
    site: Site, gateway: Listener, verbs: tuple[str, str]
) -> None:
    machine = await site.boot()
    of = link_of(site, machine)
    await site.call(verbs[0], machine=machine)
    if verbs[0] != "pause":
        await until(lambda: entered(site) == {}, "its addresses are nobody's")
    await site.call(verbs[1], machine=machine)
    assert entered(site) == entry(link_of(site, machine), machine)
    assert ask(site, machine, *WORLD) == REACHED
    assert (link_of(site, machine) == of) == (verbs[0] != "stop")


async def test_a_spare_is_its_sandboxs_once_it_is_claimed_and_a_machine_of_nobody_before(
    site: Site, gateway: Listener
) -> None:
    spare, machine = new_id("sbx"), new_id("sbx")
    await boot(site, spare, spare=True)
    of = link_of(site, spare)
    assert entered(site) == entry(of, spare)
    await site.call("claim", machine=machine, spare=spare, resources=RESOURCES, hostname="guest")
    assert entered(site) == entry(of, machine)
    assert ask(site, spare, *WORLD) == REACHED


async def test_connections_that_are_open_at_a_checkpoint_end_at_once_and_others_can_be_made(
    site: Site, gateway: Listener
) -> None:
    """Neither does a suspend fail for them, nor does a program wait for what will never come."""
    machine = await site.boot()
    start(site, machine, HOLD, "held0", "held1")
    await site.call("suspend", machine=machine)
    await site.call("wake", machine=machine)
    began = time.monotonic()
    with site.peer(machine) as peer:
        peer.until(lambda: all((disk(site, machine) / f"ended{n}").exists() for n in (0, 1)), "both have ended")
    assert time.monotonic() - began < 3
    told = {(disk(site, machine) / f"ended{n}").read_text() for n in (0, 1)}
    assert told <= {"ConnectionAbortedError", "ConnectionResetError"}
    assert ask(site, machine, *WORLD) == REACHED


async def test_the_host_forgets_a_suspended_machines_connections(site: Site, gateway: Listener) -> None:
    machine = await site.boot()
    start(site, machine, HOLD, "held0", "held1")
    of = link_of(site, machine)
    await site.call("suspend", machine=machine)
    await until(lambda: entered(site) == {}, "its link is gone")
    await until(lambda: not Path("/sys/class/net", of.interface).exists(), "its link is gone")
    await site.call("wake", machine=machine)
    assert conntrack.forget(of.guest_v4) == conntrack.forget(of.guest_v6) == 0


@pytest.mark.parametrize("there", [True, False])
async def test_a_guest_that_does_nothing_but_connect_can_be_suspended(
    broker: Separate, site: Site, there: bool
) -> None:
    machine = await site.boot()
    listener = Listener(GATEWAY, broker.settings.gateway_port) if there else None
    try:
        start(site, machine, INSIST, "insists")
        for _ in range(3):
            await site.call("suspend", machine=machine)
            await site.call("wake", machine=machine)
    finally:
        if listener:
            listener.close()


async def test_copies_have_addresses_of_their_own_and_are_themselves(site: Site, gateway: Listener) -> None:
    machine, kept, copies = await site.boot(), new_id("snp"), [new_id("sbx"), new_id("sbx")]
    start(site, machine, HOLD, "held0", "held1")
    await site.call("snapshot", machine=machine, snapshot=kept, kind="full")
    for copy in copies:
        await boot(site, copy, snapshot=kept)
    expected = {}
    for one in (machine, *copies):
        expected |= entry(link_of(site, one), one)
    assert entered(site) == expected
    gateway.peers.clear()
    for copy in copies:
        assert ask(site, copy, *WORLD) == REACHED
    own = [link_of(site, copy) for copy in copies]
    assert set(gateway.peers) == {str(address) for of in own for address in (of.guest_v4, of.guest_v6)}


async def test_a_killed_broker_changes_nothing_for_guests_and_the_next_one_says_what_is_true(
    broker: Separate, gateway: Listener
) -> None:
    async with cleared(broker) as site:
        machine, other = await site.boot(), await site.boot()
        of, gone = link_of(site, machine), link_of(site, other)
        broker.kill()
        assert ask(site, machine, *WORLD) == REACHED
        # What a crash could leave: entries that are not true, half-made ones, and ones of nobody.
        links = broker.settings.links_dir
        (links / str(of.guest_v4)).unlink()
        (links / str(of.guest_v4)).symlink_to(f"{other},{of.host_v4},{of.host_v6}")
        (links / f".{of.guest_v6}").symlink_to("half")
        (links / "198.18.99.1").symlink_to("sbxgone,198.18.99.0,fd00::")
        broker.start()
        assert entered(site) == entry(of, machine) | entry(gone, other)
        assert ask(site, machine, *WORLD) == REACHED
