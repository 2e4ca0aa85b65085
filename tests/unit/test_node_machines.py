"""What becomes of a machine whose guest does not do what it is asked in time."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from space.errors import OutcomeUnknown
from space.model.ids import new_id
from space.node import machines as machines_module
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.events import Events
from space.node.machines import Machines
from space.node.records import READY, CommandRecords, MachineRecords
from space.node.tasks import Tasks
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
    one = Machines(
        broker=client,
        channels=broker.channels,
        records=MachineRecords(tmp_path / "machines"),
        commands=Commands(CommandRecords(tmp_path / "commands"), tasks, 60),
        tasks=tasks,
        events=Events(),
        driver="fake",
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
