"""Making a guest ready: it is greeted, and told what it has not been told yet.

How far that got is on disk, so that a node that died in between says it again; everything said here may be repeated.
What a guest has to hear depends on where it comes from: one that was booted is *configured*; one that stood still for a
checkpoint is *awakened* first, and if it is the copy of another's, as somebody else.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from typing import TYPE_CHECKING, Any

from space.errors import GuestError, HostError, OutcomeUnknown
from space.node.commands import Commands
from space.node.entries import enter
from space.node.guests import GREET_TIMEOUT_S, Guest, GuestOwner
from space.node.machine import Machine, Phases
from space.node.places import Places
from space.node.records import BOOTING, READY, SUSPENDED, SUSPENDING
from space.node.trust import Trust

if TYPE_CHECKING:
    from space.protocol.messages import Welcome

ENTROPY_BYTES = 64
AWAKEN_S = 60.0
"""Hooks in the guest have half of this."""
CONFIGURE_S = 30.0
CLOCK_TRIES = 3
BEGUN, UP = "begun", "up"
"""How far a machine's entry is."""


class Introductions:
    """``make_ready`` a machine's guest. ``owner`` hears of what happens on channels opened here."""

    def __init__(self, owner: GuestOwner, places: Places, commands: Commands, trust: Trust) -> None:
        self._owner = owner
        self._trust = trust
        self._places = places
        self._records = places.machines
        self._commands = commands

    async def make_ready(self, machine: Machine, phases: Phases, answer_s: float = GREET_TIMEOUT_S) -> None:
        """Greet the guest of a machine that runs, unless that is done, and tell it what it has not been told yet. It
        has ``answer_s`` for its answer.
        """
        if machine.spoken_with:
            return
        guest = machine.guest
        suspended = (self._records.load(machine.id) or {}).get("phase") == SUSPENDED
        if suspended and guest is not None and guest.trusted == self._trust.certificate:
            await self._wake(machine, guest, phases, answer_s)
            return
        await self.greet(machine, phases, answer_s)
        known = self._records.load(machine.id) or {}  # Only now: of a copy, what its commands are called was noted.
        phase, standing = known.get("phase"), machine.present_guest().standing
        if not (known.get("request") or {}).get("builder"):
            # What is in a builder goes into a template, which is the same wherever it is built: there, for steps alone.
            await self._trust.tell(machine.present_guest())
        if phase == BOOTING and standing and known["request"].get("snapshot"):
            await self._awaken(machine, phases, as_copy(known))
        elif phase == BOOTING:
            if standing:
                # Restored from its template's warm snapshot: what the template starts is running in it.
                self._records.note(machine.id, entry=UP)
                await self._awaken(machine, phases)
            await configure(machine.present_guest(), known)
            phases.mark("configure")
            if not standing:
                await self._enter(machine, phases, known)
        elif phase in {SUSPENDING, SUSPENDED}:
            await self._awaken(machine, phases)
        elif phase != READY:
            raise HostError("The node does not know what the sandbox's guest was told.", code="machine-unknown")
        self.done(machine)

    async def _enter(self, machine: Machine, phases: Phases, known: dict[str, Any]) -> None:
        """Have what the template starts run in a machine that was booted; once, whoever dies in between."""
        defaults, begun = known["request"]["defaults"], known.get("entry")
        if not defaults.get("entry") or begun == UP:
            return
        self._records.note(machine.id, entry=BEGUN)
        await enter(machine.present_guest(), defaults, started=begun == BEGUN)
        self._records.note(machine.id, entry=UP)
        phases.mark("entry")

    async def _wake(self, machine: Machine, guest: Guest, phases: Phases, answer_s: float) -> None:
        """Greet and awaken, in one breath, a guest that this process has spoken with before it stood still."""
        answers: list[asyncio.Future[dict[str, Any]]] = []
        await guest.greet(answer_s, saying=lambda: answers.append(guest.ask("awaken", present())))
        phases.mark("guest")
        try:
            async with asyncio.timeout(AWAKEN_S):
                phases.heed(await answers[0])
            phases.mark("awaken")
        except (GuestError, OutcomeUnknown, TimeoutError):
            # It had no time for both, or had to be greeted again. Nothing goes on in it until it is awake.
            await self._awaken(machine, phases)
        self.done(machine)

    def done(self, machine: Machine) -> None:
        """The guest knows what it has to."""
        self._records.note(machine.id, phase=READY)
        machine.ready = True

    async def greet(self, machine: Machine, phases: Phases, answer_s: float = GREET_TIMEOUT_S) -> None:
        """Open the machine's channel and greet its guest, unless that is done."""
        if machine.guest is None:
            machine.guest = Guest(machine.id, self._places.channels / machine.body, self._owner)
        if not machine.guest.connected:
            await machine.guest.greet(answer_s)
            phases.mark("guest")

    def on_welcome(self, guest: Guest, welcome: Welcome) -> None:
        """Go on with the guest's commands. Those of a copy get ids of their own, on disk before the guest is told."""
        known = self._records.load(guest.machine) or {}
        copied = welcome["standing"] and known.get("phase") == BOOTING
        guest.names = known.get("rename") or {}
        if copied and not guest.names and (snapshot := known["request"].get("snapshot")):
            guest.names = self._commands.inherit(guest.machine, self._places.snapshots.load(snapshot) or {}, welcome)
            self._records.note(guest.machine, rename=guest.names)
        self._commands.on_welcome(guest, welcome, copied=copied)

    async def awaken(self, machine: Machine, phases: Phases) -> None:
        """Let a guest go on that has quiesced, as the one it was."""
        await self._awaken(machine, phases)
        self.done(machine)

    async def _awaken(self, machine: Machine, phases: Phases, identity: dict[str, Any] | None = None) -> None:
        phases.heed(await awaken(machine.present_guest(), identity))
        phases.mark("awaken")


async def awaken(guest: Guest, identity: dict[str, Any] | None = None) -> dict[str, Any]:
    """Tell a guest that stood still the time, and who it is if it is not who it was. It goes on only afterwards."""
    return await tell_in_time(guest, "awaken", identity or {}, AWAKEN_S)


async def configure(guest: Guest, known: dict[str, Any], timeout_s: float = CONFIGURE_S) -> dict[str, Any]:
    """Tell a guest that knows nothing of its sandbox yet the time, and all it has to know."""
    return await tell_in_time(guest, "configure", configuration(known), timeout_s)


async def tell_in_time(guest: Guest, op: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send what goes with the present time.

    The guest's clock is looked at when the message arrives. Where the kernel does not let it be set, a message that was
    long on its way looks like a clock that is wrong; so that is asked again.
    """
    for left in reversed(range(CLOCK_TRIES)):
        try:
            return await guest.request(op, {**present(), **fields}, timeout_s=timeout_s)
        except GuestError as error:
            if error.code != "clock-not-set" or not left:
                raise
    raise AssertionError("the last try returns or raises")


def present() -> dict[str, Any]:
    """Return the present time, and randomness that no other guest gets."""
    return {"now_ns": time.time_ns(), "entropy": base64.b64encode(os.urandom(ENTROPY_BYTES)).decode()}


def configuration(known: dict[str, Any]) -> dict[str, Any]:
    """Return what a guest is told that knows nothing of its sandbox yet."""
    defaults: dict[str, Any] = known["request"]["defaults"]
    return {**_identity(known), "workdir": defaults["workdir"], "user": defaults["user"]}


def as_copy(known: dict[str, Any]) -> dict[str, Any]:
    """Return who a guest is now that is the copy of another's."""
    return {**_identity(known), "rename": known.get("rename") or {}}


def _identity(known: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = known["request"]
    return {
        "hostname": request["hostname"],
        "machine_id": known.get("machine_id"),
        "env": {**request["defaults"]["env"], **request["env"]},
        "limits": _limits(request["resources"]),
    }


def _limits(resources: dict[str, Any]) -> dict[str, Any]:
    """Return the limits that a guest keeps itself. What the host enforces is only the backstop: it ends machines."""
    pids, memory, cpus = (resources.get(name) for name in ("pids", "memory_mib", "cpus"))
    return {
        "pids": pids if type(pids) is int else None,
        "memory_mib": memory if type(memory) is int else None,
        "cpus": cpus if type(cpus) in (int, float) else None,
    }
