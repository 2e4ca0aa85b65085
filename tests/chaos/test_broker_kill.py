"""SIGKILL of the broker at any moment of any verb: machines run on, the next broker tells the host's story, nothing is left."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from space.errors import SpaceError
from space.model.ids import new_id
from space.node.broker import BrokerClient
from tests import installation
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site

# Verbs that lead up to the one that is cut short, that verb, and the states that may be found afterwards.
CASES = {
    "boot": ((), {"absent", "running"}),
    "pause": (("boot",), {"running", "paused"}),
    "suspend": (("boot",), {"running", "suspended"}),
    "wake": (("boot", "suspend"), {"suspended", "running"}),
    "stop": (("boot",), {"running", "stopped"}),
    "start": (("boot", "stop"), {"stopped", "running"}),
    "destroy": (("boot",), {"absent", "running"}),
}
USUAL_S = {"boot": 0.18, "pause": 0.03, "suspend": 0.13, "wake": 0.2, "stop": 0.05, "start": 0.18, "destroy": 0.05}
MOMENTS = (0.1, 0.5, 0.9)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    if reason := installation.unfit():
        pytest.skip(reason)
    one = Separate(tmp_path_factory.mktemp("broker"))
    try:
        asyncio.run(one.set_up())
        one.start()
        yield one
        one.stop()
    finally:
        one.remove()


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    one = broker.site()
    yield one
    for machine in await one.call("machines"):
        await one.call("destroy", machine=machine["machine"])
    await one.client.close()
    assert one.strays() == []


async def ask(site: Site, verb: str, machine: str) -> None:
    if verb == "boot":
        await site.boot(machine)
    else:
        await site.call(verb, machine=machine)


async def cut_short(broker: Separate, verb: str, machine: str, after_s: float) -> None:
    """Ask through a connection of its own, and kill the broker while it is at work."""
    client = BrokerClient(broker.settings.broker_socket)
    site = Site(broker.settings, "gvisor", broker.template, client)
    asked = asyncio.ensure_future(ask(site, verb, machine))
    await asyncio.wait([asked], timeout=after_s)
    broker.kill()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await client.close()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("verb", CASES)
async def test_a_verb_cut_short_is_finished_or_undone_and_can_be_asked_again(
    broker: Separate, site: Site, verb: str, moment: float
) -> None:
    """L12."""
    before, allowed = CASES[verb]
    machine, bystander = new_id("sbx"), await site.boot()
    for earlier in before:
        await ask(site, earlier, machine)
    if "boot" in before and "stop" not in before and "suspend" not in before:
        with site.peer(machine) as peer:
            peer.run(*GUEST_PYTHON, "open('/kept', 'w').write('kept')")
    kept = machine if before == ("boot",) else None
    await cut_short(broker, verb, machine, USUAL_S[verb] * moment)
    broker.start()
    seen = await site.call("inspect", machine=machine)
    assert seen["state"] in allowed, broker.log()
    assert await site.state(bystander) == "running"
    await ask(site, verb, machine)
    await lively(site, machine, kept, destroyed=verb == "destroy")
    with site.peer(bystander) as peer:
        assert peer.run(*GUEST_PYTHON, "print('here')").stdout == b"here\n"


async def lively(site: Site, machine: str, kept: str | None, *, destroyed: bool) -> None:
    """The machine can be brought to run from wherever it is, with its files."""
    state = await site.state(machine)
    assert (state == "absent") == destroyed
    if destroyed:
        return
    ways = {"paused": "resume", "suspended": "wake", "stopped": "start", "exited": "start"}
    if state in ways:
        await site.call(ways[state], machine=machine)
    with site.peer(machine) as peer:
        look = "import os; print(os.path.exists('/kept'))"
        assert peer.run(*GUEST_PYTHON, look).stdout.decode().strip() == str(kept is not None)


async def test_killed_ten_times_while_many_boot_none_is_lost_or_doubled(broker: Separate, site: Site) -> None:
    """L10, L12: each request is asked again until it is answered, as the node does."""
    machines = [new_id("sbx") for _ in range(10)]

    async def insist(machine: str) -> None:
        client = BrokerClient(broker.settings.broker_socket)
        fields = {"template": broker.template, "driver": "gvisor", "resources": RESOURCES, "hostname": "guest"}
        await client.call("boot", machine=machine, timeout_s=100, **fields)
        await client.close()

    asked = [asyncio.ensure_future(insist(machine)) for machine in machines]
    for _ in range(10):
        await asyncio.wait(asked, timeout=0.15)
        broker.kill()
        broker.start()
    await asyncio.gather(*asked)
    pids = {seen["pid"] for seen in await site.call("machines") if seen["state"] == "running"}
    assert len(pids) == len(machines)
    for machine in machines:
        with site.peer(machine) as peer:
            assert peer.run(*GUEST_PYTHON, "print('up')").stdout == b"up\n"


async def test_a_machine_that_ends_while_no_broker_runs_is_found_exited_and_released(
    broker: Separate, site: Site
) -> None:
    machine = await site.boot()
    with site.peer(machine) as peer:
        pid = (await site.call("inspect", machine=machine))["pid"]
        assert peer.welcome is not None
    broker.kill()

    os.kill(pid, signal.SIGKILL)
    broker.start()
    seen = await site.call("inspect", machine=machine)
    assert (seen["state"], seen["cause"]) == ("exited", "machine-exited")
    assert [stray for stray in site.strays() if not stray.startswith("file ")] == []


async def test_a_broker_told_to_stop_lets_what_is_under_way_end(broker: Separate, site: Site) -> None:
    machine = new_id("sbx")
    asked = asyncio.ensure_future(site.boot(machine))
    deadline = time.monotonic() + 10
    while machine not in {seen["machine"] for seen in await other_view(broker)}:
        assert time.monotonic() < deadline
    await asyncio.to_thread(broker.stop)
    broker.start()
    await asked
    assert await site.state(machine) == "running"


async def other_view(broker: Separate) -> list[dict[str, str]]:
    client = BrokerClient(broker.settings.broker_socket)
    try:
        return await client.call("machines", timeout_s=10)
    except SpaceError:
        return []
    finally:
        await client.close()
