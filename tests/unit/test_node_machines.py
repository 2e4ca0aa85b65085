"""What becomes of a machine whose guest does not do what it is asked in time."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from space.errors import HostError, OutcomeUnknown
from space.model.ids import new_id
from space.node import boots
from space.node import machines as machines_module
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.events import Events
from space.node.machines import Machines
from space.node.places import Places
from space.node.pool import Pool
from space.node.records import READY, CommandRecords, MachineRecords, SnapshotNotes
from space.node.tasks import Tasks
from space.node.trust import Trust
from space.settings import Settings
from tests.node_host import DIGEST, AgentBroker, wait_until

REQUEST = {
    "template": DIGEST,
    "defaults": {"env": {}, "workdir": None, "user": None},
    "driver": None,
    "resources": {},
    "env": {},
    "hostname": "box",
}


@pytest.fixture
def broker(tmp_path: Path):
    one = AgentBroker(tmp_path / "broker.sock", tmp_path / "channels")
    yield one
    one.close()


@pytest_asyncio.fixture
async def machines(tmp_path: Path, broker: AgentBroker) -> AsyncIterator[Machines]:
    tasks, client = Tasks(), BrokerClient(broker.socket_path)
    settings = Settings(data_dir=tmp_path, run_dir=tmp_path, driver="fake")
    settings.node_dir.mkdir()
    one = Machines(
        broker=client,
        places=Places(broker.channels, MachineRecords(tmp_path / "machines"), SnapshotNotes(tmp_path / "snapshots")),
        commands=Commands(CommandRecords(tmp_path / "commands"), tasks, 60),
        tasks=tasks,
        events=Events(),
        pool=Pool(client, settings, tasks, Trust()),
        trust=Trust(),
    )
    yield one
    await tasks.close()
    one.close()
    await client.close()


async def test_a_guest_that_quiesced_too_late_is_spoken_with_again(
    machines: Machines, broker: AgentBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is given up while the guest stands still; what it does of it afterwards must not leave it mute."""
    box = new_id("sbx")
    await machines.boot(box, REQUEST)
    monkeypatch.setattr(machines_module, "QUIESCE_S", 0.2)
    agent = broker.agents[box].process
    agent.send_signal(signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.6, agent.send_signal, signal.SIGCONT)
    with pytest.raises(OutcomeUnknown):
        await machines.suspend(box)
    assert "suspend" not in broker.verbs
    await asyncio.to_thread(wait_until, lambda: machines.runs(box), "the machine to be seen running")
    # Twice: the guest must not only take what it is asked but answer.
    for _ in range(2):
        await machines.guest(box).request("activity", timeout_s=10)
    assert machines._records.phase(box) == READY
    monkeypatch.undo()
    await machines.suspend(box)
    assert broker.states[box] == "suspended"
    await machines.wake(box)
    await machines.guest(box).request("activity", timeout_s=10)


@pytest.mark.parametrize("reason", ["", "This host emulates guests."])
async def test_a_machine_whose_guest_never_answers_is_given_up_with_what_the_broker_knows_of_its_driver(
    machines: Machines, broker: AgentBroker, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(boots, "READY_S", 0)
    broker.driver["reason"] = reason
    box = new_id("sbx")
    with pytest.raises(HostError, match="did not answer in time") as caught:
        await machines.boot(box, REQUEST)
    assert caught.value.code == "guest-not-ready"
    assert caught.value.details["driver"] == "fake"
    assert caught.value.message.endswith(reason or "broker's log.")
    assert box not in broker.states
    assert broker.agents == {}
    monkeypatch.undo()
    await machines.boot(box, REQUEST)
    assert broker.states[box] == "running"
