"""What the gateway is told of each sandbox: composed from the store, told in order, and told again after a restart.

The store decides. Whoever tells of a sandbox reads the store while nobody else tells of the same one, so that the last
word is the newest. A gateway that is not there is told everything as soon as it is: until then nothing leaves.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Connection

from space.control.control import Control
from space.control.effective import Chosen, choose, choose_for_build
from space.control.gateways import Attachment
from space.control.keyring import Keys
from space.control.values import placed
from space.errors import SpaceError, Unavailable
from space.model.build import Build
from space.model.policy import render_policy
from space.model.sandbox import State
from space.store import builds, grants, policies
from space.store.grants import GrantRow
from space.store.policies import Followed
from space.store.secrets import Secret

log = structlog.get_logger(__name__)

ATTACHED = frozenset(
    {
        State.CREATING,
        State.RUNNING,
        State.PAUSING,
        State.PAUSED,
        State.RESUMING,
        State.SUSPENDING,
        State.WAKING,
        State.STOPPING,
        State.STARTING,
    }
)
"""Where a sandbox has, or is about to get, a machine."""
GATEWAY = "gateway"
"""A topic of ``Changes``: told when the gateway has been told everything."""
AT_ONCE = 8
RESTART_S = 3.0
"""How long a sandbox that comes up waits for a gateway that was there before."""
AGAIN_S = 1.0
NODE_FIRST_S = 0.001
"""What takes longest is begun first: the node is asked, and while it works the gateway is told."""

Held = list[tuple[GrantRow, Secret]]


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be told of one machine: whose it is, under which id, and what the store says of it."""

    machine: str
    project_id: str
    generation: int
    chosen: Chosen
    held: Held = field(default_factory=Held)


# --- for the lifecycle: never raise, since without the gateway nothing leaves anyway


async def attach(control: Control, sandbox_id: str) -> None:
    """Tell the gateway of a sandbox that comes up; one that is just restarting is waited for a little."""
    with control.changes.watch(GATEWAY) as watch:
        try:
            await _tell(control, sandbox_id)
        except Unavailable:
            control.telling.again.set()
            if control.telling.seen:
                await watch.wait(RESTART_S, RESTART_S)
        except SpaceError as error:
            log.warning("not-attached", sandbox=sandbox_id, code=error.code)
            control.telling.again.set()


async def detach(control: Control, machine: str) -> None:
    """Let the gateway forget a machine that is gone."""
    try:
        async with control.telling.one(machine):
            await control.gateway.remove(machine)
    except SpaceError as error:
        log.info("not-detached", sandbox=machine, code=error.code)
        control.telling.again.set()


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Do ``work`` beside the body, and leave once both are done. A body that fails ends it."""

    async def begin() -> None:
        await asyncio.sleep(NODE_FIRST_S)
        await work

    task = asyncio.get_running_loop().create_task(begin())
    try:
        yield
        await task
    except BaseException:
        task.cancel()
        await asyncio.wait([task])
        raise
    finally:
        work.close()


async def attach_build(control: Control, build: Build) -> None:
    """Tell the gateway of the machine that a build is carried out in."""
    machine = machine_of(build.id)
    try:
        async with control.telling.one(machine):
            told = await control.store.read(lambda connection: _of_build(control, connection, build))
            await control.gateway.put(machine, _rendered(control, None, told))
    except SpaceError as error:
        log.info("build-not-attached", build=build.id, code=error.code)
        control.telling.again.set()


def machine_of(build_id: str) -> str:
    """Return the id of the machine that a build is carried out in: its own, as a sandbox's."""
    return "sbx" + build_id.removeprefix("bld")


# --- for changes: whoever asked for one is told whether it holds


async def confirm(control: Control, sandbox_ids: Collection[str]) -> None:
    """Tell the gateway of what has changed; return when it holds for every request to come.

    Raises ``Unavailable`` when it cannot be told: it is as soon as it is back, and until then nothing leaves.
    """
    seats = asyncio.Semaphore(AT_ONCE)

    async def tell(sandbox_id: str) -> SpaceError | None:
        async with seats:
            try:
                await _tell(control, sandbox_id)
            except SpaceError as error:
                return error
        return None

    failed = [error for error in await asyncio.gather(*map(tell, sandbox_ids)) if error is not None]
    if failed:
        control.telling.again.set()
        log.warning("change-not-confirmed", count=len(failed), code=failed[0].code)
        raise Unavailable(
            "The change is recorded, and holds as soon as the gateway is back; it does not answer now. Nothing leaves "
            "a sandbox while it is away.",
            code="gateway-unavailable",
        )


async def _tell(control: Control, sandbox_id: str) -> None:
    """Tell the gateway what the store says of a sandbox, if it has a machine."""
    async with control.telling.one(sandbox_id):
        told = await control.store.read(lambda connection: _of_sandbox(control, connection, sandbox_id))
        if told is not None:
            keys = await _keys(control, [told])
            await control.gateway.put(sandbox_id, _rendered(control, keys, told))


# --- everything


async def follow(control: Control) -> None:
    """Tell the gateway everything, and again whenever something could not be told; return when it is gone."""
    async with control.gateway.watch() as lines:
        if await anext(lines, None) is None:
            return
        await tell_everything(control)
        control.telling.seen = True
        gone = asyncio.ensure_future(_last(lines))
        again = asyncio.ensure_future(control.telling.again.wait())
        try:
            while not gone.done():
                await asyncio.wait((gone, again), return_when=asyncio.FIRST_COMPLETED)
                if again.done() and not gone.done():
                    await tell_everything(control)
                    await asyncio.wait((gone,), timeout=AGAIN_S)
                    again = asyncio.ensure_future(control.telling.again.wait())
        finally:
            for task in (gone, again):
                task.cancel()
            await asyncio.wait((gone, again))
        log.warning("gateway-gone")


async def tell_everything(control: Control) -> None:
    """Have the gateway know exactly what the store says now."""
    async with control.telling.everything():
        control.telling.again.clear()
        told = await control.store.read(lambda connection: _everything(control, connection))
        keys = await _keys(control, told)
        # One by one: together, what one project may have be told of its sandboxes would be too much for all of them.
        seats = asyncio.Semaphore(AT_ONCE)
        taken = await asyncio.gather(*(_tell_one(control, keys, one, seats) for one in told))
        known = [one.machine for one, is_taken in zip(told, taken, strict=True) if is_taken]
        await control.gateway.keep(known)
    log.info("gateway-told", sandboxes=len(known))
    control.changes.notify(GATEWAY)


async def _tell_one(control: Control, keys: Keys | None, told: Told, seats: asyncio.Semaphore) -> bool:
    """Tell the gateway of one machine; False where it does not take that, so that nothing leaves this one.

    One that takes long is told again later, and keeps nobody from being told.
    """
    try:
        async with seats:
            await control.gateway.put(told.machine, _rendered(control, keys, told))
    except Unavailable:
        control.telling.again.set()
    except SpaceError as error:
        log.error("not-told", sandbox=told.machine, code=error.code)  # noqa: TRY400 - what it says may not be shown
        return False
    return True


async def _last(lines: AsyncGenerator[dict[str, Any]]) -> None:
    """Return when there are no more lines, however they end."""
    with contextlib.suppress(SpaceError):
        async for _ in lines:
            pass


def _everything(control: Control, connection: Connection) -> list[Told]:
    held = grants.all_in_force(connection, control.now())
    found = [
        _told(one, choose(control.settings, connection, one), held.get(one.id, []))
        for one in policies.followers(connection)
        if one.state in ATTACHED
    ]
    return found + [_of_build(control, connection, build) for build in builds.all_open(connection)]


def _of_sandbox(control: Control, connection: Connection, sandbox_id: str) -> Told | None:
    followed = policies.followed_by(connection, sandbox_id)
    if followed is None or followed.state not in ATTACHED:
        return None
    held = grants.in_force(connection, sandbox_id, control.now())
    return _told(followed, choose(control.settings, connection, followed), held)


def _of_build(control: Control, connection: Connection, build: Build) -> Told:
    chosen = choose_for_build(control.settings, connection, build.project_id, build.policy)
    return Told(machine_of(build.id), build.project_id, 1, chosen)


def _told(followed: Followed, chosen: Chosen, held: Held) -> Told:
    return Told(followed.id, followed.project_id, followed.generation, chosen, held)


async def _keys(control: Control, told: list[Told]) -> Keys | None:
    """Return the keys that open what is granted; None when there is nothing to open, or no way to."""
    wanted = {secret.key_id for one in told for _, secret in one.held}
    try:
        for key_id in wanted:
            await control.key_store.opening(key_id)
        return await control.key_store.opening() if wanted else None
    except SpaceError as error:
        log.error("secrets-not-opened", code=error.code)  # noqa: TRY400 - what it says is all there is to say
        return None


def _rendered(control: Control, keys: Keys | None, told: Told) -> Attachment:
    return {
        "project": told.project_id,
        "generation": told.generation,
        "policy": render_policy(told.chosen.policy(control.settings)),
        "grants": [one for grant, secret in told.held if (one := _grant(keys, grant, secret)) is not None],
    }


def _grant(keys: Keys | None, grant: GrantRow, secret: Secret) -> dict[str, Any] | None:
    """Return a grant with its value; None when that cannot be had, and requests go out without it."""
    if keys is None:
        return None
    try:
        value = placed(keys, secret)
    except SpaceError as error:
        log.error("secret-not-opened", secret=secret.id, code=error.code)  # noqa: TRY400
        return None
    if value is None:
        return None
    return {
        "id": grant.id,
        "secret": grant.secret,
        **grant.terms,
        "placeholder": grant.placeholder,
        "expires_at": None if grant.expires_at is None else grant.expires_at.timestamp(),
        "value": value,
    }
