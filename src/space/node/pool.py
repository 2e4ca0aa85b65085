"""The warm pool: machines that are up before anybody asks for them, as many as are likely to be asked for.

Requests take a spare at once or go without: nobody ever waits for the pool. One task fills and empties it in the
background, one machine at a time, and lets requests that are being served go first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog
from prometheus_client import Histogram

from space.errors import Conflict, HostFull, NotFound, SpaceError, Unavailable
from space.model.sandbox import Resources
from space.node.broker import BrokerClient
from space.node.demand import Demand, Shape, targets
from space.node.drivers import Drivers
from space.node.spares import MEMORY_MIB, Nursery, Spare, reason
from space.node.tasks import Tasks
from space.node.trust import Trust
from space.node.warm import WarmSnapshots
from space.settings import Settings

log = structlog.get_logger(__name__)

ALWAYS = "base"
"""The template that is in demand from the start."""
SHAPES_MAX = 64
LOOK_S = 10.0
LEAVE_S = 60.0
"""How long a template that is dropped is waited for, while a spare of it is being made."""
PREPARE_LOOK_S = 0.02
ASK_S = 30.0
QUIET_S = 0.1
QUIET_S_MAX = 2.0
"""How long the filling lets requests go first, at most."""
RETRY_S_MAX = 60.0
FULL_S = 30.0
"""How long nothing is added after the host was full."""
CLAIM_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.25, 1)


@dataclass(slots=True)
class Stock:
    """What there is of one shape, and what became of those who asked for it."""

    demand: Demand = field(default_factory=Demand)
    idle: deque[Spare] = field(default_factory=deque)
    filling: int = 0
    target: int = 0
    failures: int = 0
    failed: SpaceError | None = None
    """What the last attempt met."""
    not_before: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its template's, as the last request had them: what is started in it is to run in spares, too."""


class Pool:
    """All spares of this node. Nothing happens before ``start``, nor with ``pool_max`` 0."""

    def __init__(self, broker: BrokerClient, settings: Settings, tasks: Tasks, trust: Trust) -> None:
        self.drivers = Drivers(broker, settings.driver)
        self.claim_seconds = Histogram(
            "space_node_pool_claim_seconds", "Time to claim a spare", buckets=CLAIM_BUCKETS_S, registry=None
        )
        self.totals: Counter[str] = Counter(claims=0, restores=0, boots=0)
        self._settings = settings
        self._broker = broker
        self._tasks = tasks
        self._nursery = Nursery(broker, settings.channels_dir, trust)
        self._warm = WarmSnapshots(broker, settings.node_dir / "warm.json", settings.guest_dir)
        self._stocks: dict[Shape, Stock] = {}
        self._changed = asyncio.Event()
        self._templates: set[str] = set()
        self._leaving: set[str] = set()
        """Templates that are just being dropped."""
        self._looked_at = -LOOK_S
        self._full_until = 0.0
        self._foreground = 0
        self._nobody = asyncio.Event()
        self._foreground_at = 0.0
        self._started = False

    async def start(self) -> None:
        """End what a former node had waiting, and begin to fill. Returns only when cancelled."""
        while True:
            if await self._succeeds(self._nursery.end_all_of_before()):
                break
            await asyncio.sleep(1)
        if self._settings.pool_max == 0:
            return
        self._started = True
        while True:
            self._changed.clear()
            try:
                await self._step()
            except Exception:
                # A broker's answer that makes no sense, a full disk: sandboxes come up without spares meanwhile.
                log.exception("pool-broke")
                await asyncio.sleep(LOOK_S)
            try:
                async with asyncio.timeout(self._patience_s()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # --- for requests

    def take(self, shape: Shape, defaults: dict[str, Any]) -> Spare | None:
        """Return a spare that is the caller's from now on, or None when there is none. ``defaults`` are the template's:
        others of this shape will be wanted with them.
        """
        stock = self._stock(shape) if self._started else None
        if stock is None:
            return None
        if shape.template not in self._templates:
            self._looked_at = -LOOK_S  # it may have been built a moment ago
        stock.demand.ask(time.monotonic())
        stock.defaults = defaults
        self._changed.set()
        while stock.idle:
            spare = stock.idle.popleft()
            if spare.guest.connected:
                return spare
        return None

    def warm(self, shape: Shape) -> str | None:
        """Return the snapshot that a machine of this shape is best restored from, if there is one."""
        return self._warm.get(shape.origin) if self._started else None

    def took(self, shape: Shape, way: str, claim_s: float | None = None) -> None:
        """Count how a machine came up: ``claims``, ``restores`` or ``boots``."""
        self.totals[way] += 1
        stock = self._stocks.get(shape)
        if stock is not None:
            stock.counts[way] += 1
        if claim_s is not None:
            self.claim_seconds.observe(claim_s)

    def distrust(self, shape: Shape) -> None:
        """A machine restored from the warm snapshot did not do: it is dropped, with all spares that came from it."""
        self._tasks.spawn(self._distrust(shape), "drop warm snapshot")

    async def prepare(self, shape: Shape, defaults: dict[str, Any], timeout_s: float) -> None:
        """Return once there are a warm snapshot and a spare of this shape, made for this if need be, once for all who
        ask. Raise what making them met.
        """
        if not self._started:
            raise Conflict("This host keeps no machines ready: `pool_max` is 0.", code="pool-off")
        if shape.template not in self._templates:
            await self._look_at_templates()
        stock = self._stock(shape) if shape.template in self._templates else None
        if stock is None:
            raise NotFound("There is no such template on this node.", code="template-not-found")
        stock.demand.ask(time.monotonic())
        stock.defaults, stock.not_before, stock.failed = defaults, 0.0, None
        try:
            async with asyncio.timeout(timeout_s):
                while not stock.idle:
                    self._changed.set()
                    await asyncio.sleep(PREPARE_LOOK_S)
                    if stock.failed is not None:
                        raise stock.failed
        except TimeoutError as error:
            raise Unavailable("The template was not prepared in time; it may be soon.", code="not-prepared") from error

    @asynccontextmanager
    async def without(self, digest: str) -> AsyncGenerator[None]:
        """Leave nothing that was made of a template, and make nothing while the block lasts, in which it is dropped.

        If it stays all the same, it is found again afterwards.
        """
        self._leaving.add(digest)
        self._templates.discard(digest)
        try:
            stocks = [stock for shape, stock in self._stocks.items() if shape.template == digest]
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    while any(stock.filling for stock in stocks):  # noqa: ASYNC110 - as in ``prepare``
                        await asyncio.sleep(PREPARE_LOOK_S)
                    for stock in stocks:
                        while stock.idle:
                            await self._succeeds(self._nursery.end(stock.idle.popleft()))
                    while self._nursery.is_ending(digest):  # noqa: ASYNC110
                        await asyncio.sleep(PREPARE_LOOK_S)
            await self._warm.forget(digest)
            yield
        finally:
            self._leaving.discard(digest)

    async def end(self, spare: Spare) -> None:
        """End a spare that was taken and cannot be had. If the broker does not end it now, it is ended later."""
        await self._nursery.end(spare)

    async def make_way(self) -> bool:
        """The host is full: end all spares. False when that changes nothing."""
        self._full_until = time.monotonic() + FULL_S
        spares = [spare for stock in self._stocks.values() for spare in stock.idle]
        for stock in self._stocks.values():
            stock.idle.clear()
        ended = await asyncio.gather(*(self._succeeds(self._nursery.end(spare)) for spare in spares))
        return any(ended)

    @contextmanager
    def foreground(self) -> Generator[None]:
        """While the block lasts, and a moment longer, the filling of the pool waits."""
        self._foreground += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._foreground -= 1
            self._foreground_at = time.monotonic()
            if not self._foreground:
                self._nobody.set()

    def is_own(self, snapshot: str) -> bool:
        """Whether a snapshot is the pool's, and not for the api to see."""
        return self._warm.is_own(snapshot)

    def report(self) -> dict[str, Any]:
        """Return what there is of each shape."""
        return {
            "memory_mib": sum(spare.memory_mib for stock in self._stocks.values() for spare in stock.idle),
            "memory_max_mib": self._settings.pool_memory_mib,
            "shapes": [
                {
                    "template_digest": shape.template,
                    "driver": shape.driver,
                    "memory_mib": shape.memory_mib,
                    "warm": self.warm(shape) is not None,
                    "idle": len(stock.idle),
                    "filling": stock.filling,
                    "target": stock.target,
                    **{way: stock.counts[way] for way in ("claims", "restores", "boots")},
                }
                for shape, stock in self._stocks.items()
            ],
        }

    # --- filling and emptying

    async def _step(self) -> None:
        """Look once what is there and what should be, and do one thing about it."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S and await self._succeeds(self._look_at_templates()):
            self._looked_at = now
            await self._nursery.end_again()
        self._aim(now)
        surplus = [stock.idle.pop() for stock in self._stocks.values() if len(stock.idle) > stock.target]
        for spare in surplus:
            await self._succeeds(self._nursery.end(spare))
        short = [
            shape
            for shape, stock in self._stocks.items()
            if len(stock.idle) < stock.target and stock.not_before <= now and self._full_until <= now
        ]
        if short:
            # Whoever finds nothing at all waits longest; then what is asked for most.
            short.sort(key=lambda one: (len(self._stocks[one].idle) > 0, -self._stocks[one].demand.score(now)))
            await self._quiet()
            # Others may have been asked for meanwhile: this one is forgotten, its template dropped, or the host full.
            full = self._full_until > time.monotonic()
            if not full and short[0] in self._stocks and short[0].template in self._templates:
                await self._fill(short[0])
        if surplus or short:
            self._changed.set()

    def _aim(self, now: float) -> None:
        settings = self._settings
        idle = [spare for stock in self._stocks.values() for spare in stock.idle]
        each = max(1, sum(spare.memory_mib for spare in idle) // len(idle)) if idle else MEMORY_MIB
        aims = targets(
            {shape: stock.demand for shape, stock in self._stocks.items()},
            now,
            count_min=min(settings.pool_min, settings.pool_max),
            count_max=settings.pool_max,
            count_all=settings.pool_memory_mib // each,
        )
        for shape, stock in list(self._stocks.items()):
            stock.target = aims[shape] if shape.template in self._templates else 0
            if not stock.target and not stock.idle and not stock.demand.always and not stock.counts:
                del self._stocks[shape]

    async def _look_at_templates(self) -> None:
        """Take note of the templates there are now: what came from others is ended, the base is always in demand."""
        rows: list[dict[str, Any]] = await self._broker.call("templates", timeout_s=ASK_S)
        self._templates = {str(row["digest"]) for row in rows} - self._leaving
        base = {str(row["digest"]): row.get("defaults") or {} for row in rows if row.get("name") == ALWAYS}
        driver, usual = await self.drivers.default(), asdict(Resources())
        for shape, stock in self._stocks.items():
            stock.demand.always = stock.demand.always and shape.template in base and shape.driver == driver
        for digest, defaults in base.items():
            stock = self._stock(await self.drivers.shape(digest, driver, usual))
            if stock is not None:
                stock.demand.always, stock.defaults = True, defaults
        await self._warm.keep_only(self._templates)

    async def _fill(self, shape: Shape) -> None:
        """Add one spare. Where there is no warm snapshot yet, one is made first."""
        stock = self._stocks[shape]
        stock.filling += 1
        try:
            if self._warm.get(shape.origin) is None:
                await self._warm.make(shape.origin, lambda new: self._nursery.keep_warm(shape, new, stock.defaults))
            snapshot = self._warm.get(shape.origin)
            spare = await self._nursery.raise_spare(shape, snapshot, self._gone)
            await self._nursery.rest(spare)
            stock.failures = 0
            if spare.guest.connected:
                stock.idle.append(spare)
        except HostFull as full:
            log.info("pool-host-full", template=shape.template)
            stock.failed = full
            await self.make_way()
        except SpaceError as error:
            unable = isinstance(error, Conflict) and error.code == "not-supported"
            stock.failures, stock.failed = stock.failures + 1, error
            stock.not_before = time.monotonic() + (3600 if unable else min(2**stock.failures, RETRY_S_MAX))
            log.warning("spare-failed", template=shape.template, driver=shape.driver, reason=reason(error))
        finally:
            stock.filling -= 1

    async def _quiet(self) -> None:
        """Wait until no request is being served, but not for long: it may be that they never pause."""
        try:
            async with asyncio.timeout(QUIET_S_MAX):
                while (left_s := self._foreground_at + QUIET_S - time.monotonic()) > 0 or self._foreground:
                    await self._nobody.wait()
                    await asyncio.sleep(left_s)
        except TimeoutError:
            return

    def _gone(self, spare: Spare) -> None:
        """A spare died."""
        stock = self._stocks.get(spare.shape)
        if stock is not None and spare in stock.idle:
            stock.idle.remove(spare)
        log.warning("spare-lost", spare=spare.id)
        self._tasks.spawn(self._succeeds(self._nursery.end(spare)), "end spare")
        self._changed.set()

    async def _distrust(self, shape: Shape) -> None:
        await self._warm.distrust(shape.origin)
        for stock in [stock for one, stock in self._stocks.items() if one.origin == shape.origin]:
            while stock.idle:
                await self._succeeds(self._nursery.end(stock.idle.popleft()))
        self._changed.set()

    def _stock(self, shape: Shape) -> Stock | None:
        """Return the stock of a shape; None when there are too many shapes to keep this one, too."""
        stock = self._stocks.get(shape)
        if stock is None and (len(self._stocks) < SHAPES_MAX or self._forget_one()):
            stock = self._stocks[shape] = Stock()
        return stock

    def _forget_one(self) -> bool:
        """Make room for another shape: the one asked for longest ago of which there is nothing goes."""
        free = [shape for shape, stock in self._stocks.items() if not (stock.idle or stock.filling)]
        if free:
            del self._stocks[min(free, key=lambda shape: self._stocks[shape].demand.asked_at)]
        return bool(free)

    def _patience_s(self) -> float:
        now = time.monotonic()
        waits = [stock.not_before - now for stock in self._stocks.values() if stock.not_before > now]
        return max(0.05, min([LOOK_S, *waits, *([self._full_until - now] if self._full_until > now else [])]))

    async def _succeeds(self, work: Any) -> bool:
        try:
            await work
        except SpaceError as error:
            log.warning("pool-failed", reason=reason(error))
            return False
        return True
