"""SIGKILL of the broker at any moment of any verb: machines run on, the next broker tells the host's story, nothing is left."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from space.errors import SpaceError
from space.model.ids import new_id
from space.node.broker import BrokerClient
from tests.brokers import GUEST_PYTHON, RESOURCES, Separate, Site, cleared, started

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
    with started(Separate(tmp_path_factory.mktemp("broker"))) as one:
        yield one


@pytest.fixture
async def site(broker: Separate) -> AsyncIterator[Site]:
    async with cleared(broker) as one:
        yield one


async def ask(site: Site, verb: str, machine: str) -> None:
    if verb == "boot":
        await site.boot(machine)
    else:
        await site.call(verb, machine=machine)


async def cut_short(
    broker: Separate, verb: str, machine: str, after_s: float, asking: Callable[[Site, str, str], Awaitable[Any]] = ask
) -> None:
    """Ask through a connection of its own, and kill the broker while it is at work."""
    client = BrokerClient(broker.settings.broker_socket)
    site = Site(broker.settings, "gvisor", broker.template, client)
    asked = asyncio.ensure_future(asking(site, verb, machine))
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


# --- snapshots, copies, spares

MORE_MOMENTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
MORE_S = {"snapshot": 0.07, "snapshot-suspended": 0.02, "drop": 0.02, "copy": 0.2, "claim": 0.006}


def snapshot_of(machine: str) -> str:
    return "snp" + machine.removeprefix("sbx")


def copy_of(machine: str) -> str:
    return machine[:-1] + ("a" if machine[-1] != "a" else "b")


async def ask_more(site: Site, verb: str, machine: str) -> Any:
    """As `ask`, of what is made from a machine; names follow from the machine's, so that asking again is the same."""
    snapshot, copy = snapshot_of(machine), copy_of(machine)
    fields = {"resources": RESOURCES, "hostname": "guest"}
    match verb:
        case "snapshot" | "snapshot-suspended":
            return await site.call("snapshot", machine=machine, snapshot=snapshot, kind="full")
        case "drop":
            return await site.call("drop-snapshot", snapshot=snapshot)
        case "claim":
            return await site.call("claim", machine=copy, spare=machine, **fields)
        case _:
            return await site.call(
                "boot", machine=copy, snapshot=snapshot, template=site.template, driver="gvisor", **fields
            )


async def reads(site: Site, body: str) -> str:
    with site.peer(body) as peer:
        return peer.run(*GUEST_PYTHON, "print(open('/kept').read(), end='')").stdout.decode()


async def kept(site: Site) -> str:
    """A machine with a file of its own."""
    machine = await site.boot()
    with site.peer(machine) as peer:
        peer.run(*GUEST_PYTHON, f"open('/kept', 'w').write('{machine}')")
    return machine


@pytest.mark.parametrize("moment", MORE_MOMENTS)
@pytest.mark.parametrize("verb", ["snapshot", "snapshot-suspended"])
async def test_a_snapshot_cut_short_is_whole_or_nothing_and_its_machine_as_before(
    broker: Separate, site: Site, verb: str, moment: float
) -> None:
    """L12, F10."""
    machine = await kept(site)
    state = "running"
    if verb == "snapshot-suspended":
        await site.call("suspend", machine=machine)
        state = "suspended"
    await cut_short(broker, verb, machine, MORE_S[verb] * moment, ask_more)
    broker.start()
    assert await site.state(machine) == state, broker.log()
    names = [one["snapshot"] for one in await site.call("snapshots")]
    if not names:
        assert [path.name for path in broker.settings.broker_dir.rglob("snp*")] == []
    await ask_more(site, verb, machine)
    await ask_more(site, "copy", machine)
    assert await reads(site, copy_of(machine)) == machine
    if state == "suspended":
        await site.call("wake", machine=machine)
    assert await reads(site, machine) == machine


@pytest.mark.parametrize("moment", MORE_MOMENTS)
async def test_a_dropped_snapshot_is_there_or_gone(broker: Separate, site: Site, moment: float) -> None:
    """L12."""
    machine = await kept(site)
    await ask_more(site, "snapshot", machine)
    await cut_short(broker, "drop", machine, MORE_S["drop"] * moment, ask_more)
    broker.start()
    if await site.call("snapshots"):
        await ask_more(site, "copy", machine)
        assert await reads(site, copy_of(machine)) == machine
    else:
        assert [path.name for path in broker.settings.broker_dir.rglob("snp*")] == []
    await ask_more(site, "drop", machine)


@pytest.mark.parametrize("moment", MORE_MOMENTS)
async def test_a_copy_cut_short_is_there_or_not_and_can_be_asked_again(
    broker: Separate, site: Site, moment: float
) -> None:
    """L12."""
    machine = await kept(site)
    await ask_more(site, "snapshot", machine)
    await cut_short(broker, "copy", machine, MORE_S["copy"] * moment, ask_more)
    broker.start()
    copy = copy_of(machine)
    assert await site.state(copy) in {"absent", "running"}, broker.log()
    assert (await ask_more(site, "copy", machine))["restored"] is True
    assert await reads(site, copy) == machine
    await site.call("destroy", machine=copy)
    assert await reads(site, machine) == machine


@pytest.mark.parametrize("moment", MORE_MOMENTS)
async def test_a_claim_cut_short_leaves_one_owner_and_can_be_asked_again(
    broker: Separate, site: Site, moment: float
) -> None:
    """L12."""
    spare = new_id("sbx")
    fields = {"template": broker.template, "driver": "gvisor", "resources": RESOURCES, "hostname": "guest"}
    await site.call("boot", machine=spare, spare=True, **fields)
    pid = (await site.call("inspect", machine=spare))["pid"]
    await cut_short(broker, "claim", spare, MORE_S["claim"] * moment, ask_more)
    broker.start()
    found = await site.call("machines")
    assert [(one["body"], one["pid"]) for one in found] == [(spare, pid)]
    assert (found[0]["machine"], found[0]["spare"]) in {(spare, True), (copy_of(spare), False)}
    assert (await ask_more(site, "claim", spare))["body"] == spare
    assert [one["machine"] for one in await site.call("machines")] == [copy_of(spare)]
    with site.peer(spare) as peer:
        assert peer.run(*GUEST_PYTHON, "print('here')").stdout == b"here\n"


# --- templates


def made(broker: Separate) -> tuple[set[str], set[str]]:
    """Records of templates, and trees that are templates or were to be."""
    directory = broker.settings.broker_dir
    trees = {path.name for path in (directory / "disks/templates").iterdir()}
    return {path.stem for path in (directory / "templates").glob("*.json")}, trees


@pytest.fixture
async def templates(broker: Separate, site: Site) -> AsyncIterator[Site]:
    """A site on which nothing of templates may be left once those without a name are dropped."""
    yield site
    for machine in await site.call("machines"):
        await site.call("destroy", machine=machine["machine"])
    for row in await site.call("templates"):
        if "name" not in row:
            await site.call("drop-template", template=row["digest"])
    records, trees = made(broker)
    assert records == trees
    assert len(records) == 2
    assert [path.name for path in (broker.settings.broker_dir / "templates").glob("*.tmp")] == []


async def boot_of(site: Site, template: str) -> str:
    machine = new_id("sbx")
    fields = {"driver": "gvisor", "resources": RESOURCES, "hostname": "guest"}
    await site.call("boot", machine=machine, template=template, **fields)
    return machine


async def ask_templates(site: Site, verb: str, what: str) -> Any:
    if verb == "publish":
        return await site.call("publish", machine=what, defaults={})
    return await site.call("drop-template", template=what)


async def stopped(site: Site) -> str:
    machine = await kept(site)
    await site.call("stop", machine=machine)
    return machine


@pytest.mark.parametrize("moment", [*MORE_MOMENTS, 1.1])
async def test_a_publication_cut_short_leaves_a_whole_template_or_nothing_and_can_be_asked_again(
    broker: Separate, templates: Site, moment: float
) -> None:
    """L12: killed while the disk is copied, while its files are read, while it gets its name."""
    site, machine = templates, await stopped(templates)
    usual_s = sum((await ask_templates(site, "publish", await stopped(site)))["timings"].values())
    await cut_short(broker, "publish", machine, usual_s * moment, ask_templates)
    broker.start()
    assert await site.state(machine) == "stopped", broker.log()
    records, trees = made(broker)
    assert records == trees
    digest = (await ask_templates(site, "publish", machine))["digest"]
    assert await reads(site, await boot_of(site, digest)) == machine
    await site.call("start", machine=machine)
    assert await reads(site, machine) == machine


@pytest.mark.parametrize("moment", MORE_MOMENTS)
async def test_a_dropped_template_is_whole_or_gone(broker: Separate, templates: Site, moment: float) -> None:
    """L12."""
    site, machine = templates, await stopped(templates)
    digest = (await ask_templates(site, "publish", machine))["digest"]
    await cut_short(broker, "drop-template", digest, MORE_S["drop"] * moment, ask_templates)
    broker.start()
    records, trees = made(broker)
    assert records == trees
    if digest in {row["digest"] for row in await site.call("templates")}:
        other = await boot_of(site, digest)
        assert await reads(site, other) == machine
        await site.call("destroy", machine=other)
    await ask_templates(site, "drop-template", digest)
    assert digest not in {row["digest"] for row in await site.call("templates")}


async def test_a_broker_killed_again_and_again_while_four_publish_leaves_four_templates(
    broker: Separate, templates: Site
) -> None:
    """L10, L12: each request is asked again until it is answered, as the node does."""
    site = templates
    machines = [await stopped(site) for _ in range(4)]

    async def insist(machine: str) -> Any:
        client = BrokerClient(broker.settings.broker_socket)
        answer = await client.call("publish", machine=machine, defaults={}, timeout_s=100)
        await client.close()
        return answer

    asked = [asyncio.ensure_future(insist(machine)) for machine in machines]
    for _ in range(6):
        await asyncio.wait(asked, timeout=0.12)
        broker.kill()
        broker.start()
    digests = [answer["digest"] for answer in await asyncio.gather(*asked)]
    assert len(set(digests)) == 4
    for machine, digest in zip(machines, digests, strict=True):
        assert await reads(site, await boot_of(site, digest)) == machine


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
