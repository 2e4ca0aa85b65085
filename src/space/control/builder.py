"""Which builds this process follows: those that nobody alive does, by lease.

The node carries builds out by itself, so nothing is lost when this process is killed: the next one looks on.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from sqlalchemy import Connection

from space import tracing
from space.control.building import follow
from space.control.changes import BUILDS
from space.control.control import Control
from space.control.leases import RENEW_S, is_dead
from space.errors import SpaceError
from space.model.build import Build
from space.store import builds

log = structlog.get_logger(__name__)

SEATS = 32
"""Builds that one process follows at once; the node carries out fewer."""
POLL_S = 1.0
DRAIN_S = 5.0


class Builder:
    """Follows builds until it is cancelled. One per process."""

    def __init__(self, control: Control, ended: Callable[[Build], None] = lambda _: None) -> None:
        """``ended`` is told of every build that came to its end here."""
        self._control = control
        self._ended = ended
        self._following: set[str] = set()

    async def run(self) -> None:
        """Run until cancelled; leases still held then are given back."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim_forever(group))
                group.create_task(self._renew_forever())
        finally:
            await self._release()

    async def _claim_forever(self, group: asyncio.TaskGroup) -> None:
        with self._control.changes.watch(BUILDS) as watch:
            while True:
                await _tried("claim", lambda: self._claim(group))
                await watch.wait(POLL_S)

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        """Take on what nobody follows, as far as there are seats, the oldest first."""
        control, owner = self._control, self._control.leases.owner
        limit = SEATS - len(self._following)
        if limit <= 0 or not await control.store.read(builds.count_open):
            return
        known = await control.store.read(builds.owners)
        dead = {one for one in known if one != owner and is_dead(one)}
        besides = set(self._following)
        claimed = await control.store.write(
            lambda connection: builds.claim(
                connection,
                owner,
                now=control.now(),
                until=control.leases.until(),
                dead_owners=dead,
                besides=besides,
                limit=limit,
            )
        )
        for build in claimed:
            self._following.add(build.id)
            group.create_task(self._follow(build))

    async def _follow(self, build: Build) -> None:
        tracing.begin(build=build.id)
        try:
            ended = await follow(self._control, build)
            if ended is not None:
                self._ended(ended)
                code = None if ended.failure is None else ended.failure.code
                log.info("build", state=str(ended.state), code=code)
        except SpaceError as error:
            # The store cannot be reached: the build is taken up again.
            log.warning("build-left", code=error.code)
        except Exception as error:
            log.exception("build-left", error=type(error).__name__)
        finally:
            self._following.discard(build.id)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await _tried("renew", self._renew)

    async def _renew(self) -> None:
        """Keep what is followed, and what waits for a seat and nobody else has the credentials of."""
        control, owner, until = self._control, self._control.leases.owner, self._control.leases.until()
        waiting = set(control.registry_auth)
        mine = self._following | waiting
        if not mine:
            return

        def record(connection: Connection) -> list[str]:
            lost = waiting - builds.renew(connection, owner, mine, until)
            # One that is not there yet is just being accepted.
            return [build_id for build_id in lost if builds.get(connection, build_id) is not None]

        for lost in await control.store.write(record):
            control.registry_auth.pop(lost, None)

    async def _release(self) -> None:
        owner = self._control.leases.owner
        try:
            async with asyncio.timeout(DRAIN_S):
                await asyncio.shield(self._control.store.write(lambda connection: builds.release(connection, owner)))
        except (SpaceError, TimeoutError):
            log.warning("build-leases-not-released")


async def _tried(step: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except SpaceError as error:
        log.warning("builder-step-failed", step=step, code=error.code)
    except Exception as error:
        log.exception("builder-step-broke", step=step, error=type(error).__name__)
