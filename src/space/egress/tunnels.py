"""What goes on for long: connections whose bytes are passed on unread (WebSockets, TLS that is not terminated, TCP to
networks), and requests that are under way.

There is no next request in them to be refused. So each is known here, and ended once the policy forbids it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from space.egress.scrub import Scrubber
from space.egress.wire import Wire

if TYPE_CHECKING:
    from space.egress.attachments import Attachment

SILENCE_S = 3600.0
"""Longest time in which neither end may say anything."""
AT_ONCE_S = 0.002
"""For how long one sandbox's are gone through before it is somebody else's turn."""


class _Stepping(Protocol):
    async def step(self) -> None: ...


@dataclass(slots=True)
class Counted:
    """How much went each way."""

    up: int = 0
    down: int = 0


@dataclass(eq=False, slots=True)
class Tunnel:
    """One of them: whether it may go on under a policy, and how it is ended: its ends cut, or who is at it stopped."""

    sandbox: str
    allowed: Callable[[Attachment], bool]
    wires: tuple[Wire, ...] = ()
    task: asyncio.Task[None] | None = None
    judged: Attachment | None = None
    """By which it was last found to be allowed, and when."""
    judged_at: float = field(default_factory=time.time)
    cut: bool = False

    def holds(self, attachment: Attachment, last_expiry: float) -> bool:
        """Whether it may go on, as far as is known without asking."""
        return self.judged is attachment and last_expiry <= self.judged_at

    def end(self) -> None:
        self.cut = True
        for wire in self.wires:
            wire.abort()
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True)
class Tunnels:
    """All that are open."""

    _open: dict[str, set[Tunnel]] = field(default_factory=dict[str, set[Tunnel]])

    def __len__(self) -> int:
        """How many connections there are among them."""
        return sum(bool(one.wires) for of in self._open.values() for one in of)

    def add(self, tunnel: Tunnel) -> None:
        self._open.setdefault(tunnel.sandbox, set()).add(tunnel)

    def remove(self, tunnel: Tunnel) -> None:
        of = self._open.get(tunnel.sandbox, set())
        of.discard(tunnel)
        if not of:
            self._open.pop(tunnel.sandbox, None)

    def sandboxes(self) -> list[str]:
        """Return those that have any."""
        return list(self._open)

    async def review(self, sandbox: str, attachment: Attachment) -> None:
        """End those of a sandbox that may not be any more.

        There may be many, and a policy that takes long to say so: others have their turns meanwhile.
        """
        now = time.time()
        expiries = [grant.expires_at for grant in attachment.grants if grant.expires_at is not None]
        last_expiry = max((at for at in expiries if at <= now), default=0.0)
        began = time.monotonic()
        for tunnel in [one for one in self._open.get(sandbox, ()) if not one.holds(attachment, last_expiry)]:
            if time.monotonic() - began > AT_ONCE_S:
                await asyncio.sleep(0)
                began = time.monotonic()
            if tunnel not in self._open.get(sandbox, ()):
                continue  # it has come to its end meanwhile, and who was at it is at something else
            if tunnel.allowed(attachment):
                tunnel.judged, tunnel.judged_at = attachment, now
            else:
                tunnel.end()


async def join(
    guest: Wire, server: Wire, stepping: _Stepping, counted: Counted, scrubber: Scrubber | None = None
) -> None:
    """Pass bytes on both ways until both ends have said all they have to say, or one breaks: then both are cut.

    With ``scrubber`` what comes from the server goes through it; that a value is held back by it for long is taken care
    of by passing on all that cannot be the beginning of one.
    """

    async def pass_on(source: Wire, target: Wire, *, up: bool) -> None:
        while True:
            passed_on = counted.up + counted.down
            try:
                async with asyncio.timeout(SILENCE_S):
                    data = await source.receive()
            except TimeoutError:
                if counted.up + counted.down == passed_on:
                    raise
                continue  # it listens to the other end
            if not data:
                if not up and scrubber is not None:
                    await target.send(scrubber.end())
                if not target.send_end():
                    await target.close()
                return
            await stepping.step()
            await target.send(data if up or scrubber is None else scrubber.feed(data) + scrubber.prompt())
            if up:
                counted.up += len(data)
            else:
                counted.down += len(data)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(guest, server, up=True))
            group.create_task(pass_on(server, guest, up=False))
    except* (ConnectionError, TimeoutError):
        guest.abort()
        server.abort()
