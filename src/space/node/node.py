"""The node: its parts, put together once, started and closed as one."""

from __future__ import annotations

import asyncio
from typing import Self

from space.listening import Bodies
from space.node.broker import BrokerClient
from space.node.commands import Commands
from space.node.events import Events
from space.node.machines import Machines
from space.node.metrics import Metrics
from space.node.records import CommandRecords, MachineRecords
from space.node.tasks import Tasks
from space.node.tokens import TokenVerifier
from space.settings import Settings

SWEEP_S = 15.0
DRIVER_DEFAULT = "gvisor"
"""The driver for machines whose request and settings name none."""


class Node:
    """Use as an async context manager. Another one on the same directories goes on where this one ended or died."""

    def __init__(self, settings: Settings) -> None:
        settings.node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings = settings
        self.tasks = Tasks()
        self.events = Events()
        self.bodies = Bodies()
        self.broker = BrokerClient(settings.broker_socket)
        self.tokens = TokenVerifier(settings.node_dir / "token.pub")
        self.commands = Commands(CommandRecords(settings.node_dir / "commands"), self.tasks, settings.replay_s)
        self.machines = Machines(
            broker=self.broker,
            channels=settings.channels_dir,
            records=MachineRecords(settings.node_dir / "machines"),
            commands=self.commands,
            tasks=self.tasks,
            events=self.events,
            driver=settings.driver or DRIVER_DEFAULT,
        )
        self.metrics = Metrics(self.commands, self.machines)

    async def __aenter__(self) -> Self:
        self.tasks.spawn(self.machines.adopt(), "adopt")
        self.tasks.spawn(self._sweep(), "sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of everything without ending anything: machines and commands go on."""
        await self.tasks.close()
        self.machines.close()
        await self.broker.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, max(1.0, self.settings.replay_s)))
            self.commands.sweep()
