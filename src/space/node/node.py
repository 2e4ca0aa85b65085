"""The node: its parts, put together once, started and closed as one."""

from __future__ import annotations

import asyncio
from typing import Self

import structlog

from space.listening import Bodies
from space.node.adoption import NOTE_S
from space.node.broker import BrokerClient
from space.node.builds.service import Builds, Parts
from space.node.commands import Commands
from space.node.events import Events
from space.node.machines import Machines
from space.node.metrics import Metrics
from space.node.places import Places
from space.node.pool import Pool
from space.node.ports.ports import Ports
from space.node.records import CommandRecords
from space.node.tasks import Tasks
from space.node.tokens import TokenVerifier
from space.node.trust import Trust
from space.settings import Settings

log = structlog.get_logger(__name__)

SWEEP_S = 15.0


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
        trust = Trust.load(settings.gateway_dir / "ca.crt")
        self.pool = Pool(self.broker, settings, self.tasks, trust)
        places = Places.of(settings)
        self.machines = Machines(
            broker=self.broker,
            places=places,
            commands=self.commands,
            tasks=self.tasks,
            events=self.events,
            pool=self.pool,
            trust=trust,
        )
        self.ports = Ports(self.machines, places.machines, self.events)
        self.builds = Builds(Parts(self.broker, self.machines, self.commands, self.tasks), settings)
        self.metrics = Metrics(self.commands, self.machines, self.pool)

    async def __aenter__(self) -> Self:
        self.tasks.spawn(self._begin(), "adopt and fill the pool")
        self.tasks.spawn(self._sweep(), "sweep")
        self.tasks.spawn(self._note_activity(), "note activity")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of everything without ending anything: machines and commands go on."""
        await self.tasks.close()
        self.machines.close()
        await self.broker.close()

    async def _begin(self) -> None:
        await self.machines.adopt()
        self.tasks.spawn(self.builds.recover(), "recover builds")
        await self.pool.start()

    async def _note_activity(self) -> None:
        while True:
            await asyncio.sleep(NOTE_S)
            try:
                self.machines.note_activity()
            except OSError as error:
                log.warning("activity-not-noted", error=error.strerror)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, max(1.0, self.settings.replay_s)))
            self.commands.sweep()
            self.builds.uploads.sweep()
