"""The part of the gateway that the api speaks to, in this process and for real: its HTTP, what it holds, its records.

Nothing dials out and no guest is there; a test looks at what was told, writes records, and takes the gateway away.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from space.egress.attachments import Attachment, Attachments
from space.egress.audit import Audit, Record
from space.egress.decide import Asked, decide
from space.egress.http_api import build_app
from space.egress.metrics import Metrics

DEADLINE_S = 20


@dataclass
class GatewayHost:
    """``told`` has every change in order, as ``(machine, project)``; an empty project means that it was forgotten."""

    directory: Path
    told: list[tuple[str, str]] = field(default_factory=list)
    attachments: Attachments = field(init=False)
    audit: Audit = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.attachments = Attachments(self._note)
        self.audit = Audit(self.directory)

    async def _note(self, machine: str, attachment: Attachment) -> None:
        self.told.append((machine, attachment.project))

    def knows(self, machine: str) -> bool:
        return bool(self.attachments.of(machine).project)

    def allows(self, machine: str, host: str, method: str = "GET", path: str = "/", port: int = 443) -> bool:
        return decide(self.attachments.of(machine).policy, Asked(host, port, method, path)).allowed

    def values(self, machine: str) -> dict[str, dict[str, str]]:
        """What each secret that a machine was granted is."""
        return {grant.secret: dict(grant.value.fields) for grant in self.attachments.of(machine).grants}

    async def record(self, machine: str, **fields: Any) -> None:
        """Note a request of a machine, as the gateway does."""
        project = self.attachments.of(machine).project
        record = Record(sandbox=machine, project=project, kind="http", **fields)
        self.metrics.count(record)
        await self.audit.add(record)

    @asynccontextmanager
    async def serving(self, socket: Path) -> AsyncGenerator["GatewayHost"]:
        """Answer at the socket while the block lasts. What was told lasts longer: leave it by making another host."""
        socket.parent.mkdir(parents=True, exist_ok=True)
        config = uvicorn.Config(
            build_app(self.attachments, self.audit, self.metrics),
            uds=str(socket),
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        writing = asyncio.create_task(self.audit.run())
        await server.startup()
        serving = asyncio.create_task(server.main_loop())
        try:
            yield self
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, DEADLINE_S)
            await asyncio.wait_for(server.shutdown(), DEADLINE_S)
            writing.cancel()
            await asyncio.wait([writing])
            await asyncio.to_thread(socket.unlink, missing_ok=True)


@asynccontextmanager
async def gateway_at(socket: Path) -> AsyncGenerator[GatewayHost]:
    """A fresh gateway that knows nothing, at that socket."""
    with tempfile.TemporaryDirectory() as directory:
        async with GatewayHost(Path(directory)).serving(socket) as host:
            yield host
