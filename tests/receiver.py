"""A receiver of webhooks: a real HTTP server on loopback that keeps what it is sent and answers as a test says."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Receiver:
    """``answers`` are given first, one each; after them ``status``."""

    url: str = ""
    status: int = 204
    answers: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.hold is not None:
            await self.hold.wait()
        self.received.append((dict(request.headers), body))
        return web.Response(status=self.answers.pop(0) if self.answers else self.status, headers=self.headers)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.received]

    @property
    def states(self) -> list[str]:
        """The states that were told, in order."""
        return [message["data"].get("state", message["type"]) for message in self.messages]


@asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        if receiver.hold is not None:
            receiver.hold.set()
        await runner.cleanup()
