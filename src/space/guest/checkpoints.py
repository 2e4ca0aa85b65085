"""Around a checkpoint: stop and fall silent before it, and go on after it in a world that may have changed.

The guest that goes on may be the one that stopped, one restored from its image much later, or one of several copies of
it. Whichever it is, its user processes go on only once it has the time, the randomness and the names it is to have.
"""

from __future__ import annotations

import os

from space.guest.hooks import POST_WAKE, PRE_SUSPEND, Hooks
from space.guest.identity import adjust
from space.guest.standstill import Standstill
from space.guest.system import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from space.guest.processes import Processes
    from space.protocol.guest import GuestChannel

    Request = tuple[int, str, dict[str, Any]]

_MEANWHILE = {"awaken", "quiesce", "trust", "list", "metrics", "activity", "forget"}
"""What may be asked of a guest that stands still."""


class Checkpoints:
    """Carries out ``quiesce`` and ``awaken``. Both may be repeated."""

    def __init__(
        self,
        channel: GuestChannel,
        processes: Processes,
        hooks: Hooks,
        *,
        limit: Callable[[dict[str, Any]], None],
        carry_out: Callable[[int, str, dict[str, Any]], None],
    ) -> None:
        """``limit`` puts new limits into force; ``carry_out`` takes the requests that had to wait."""
        self._channel = channel
        self._processes = processes
        self._hooks = hooks
        self._limit = limit
        self._carry_out = carry_out
        self._standstill = Standstill()
        self._waiting: list[Request] | None = None
        """Requests for after the checkpoint; None when they are refused."""
        self.hostname = ""

    @property
    def standing(self) -> bool:
        return self._standstill.since is not None

    def greeted(self) -> None:
        """The host (re)connected: whatever it had asked for before, it asks for again."""
        self._hooks.cancel()
        self._waiting = None

    def must_wait(self, number: int, op: str, fields: dict[str, Any]) -> bool:
        """Whether a request is not to be carried out now: it is kept for later, or ``Refused`` is raised."""
        if self._standstill.since is None or op in _MEANWHILE:
            return False
        if self._waiting is None:
            raise Refused("quiesced", "The sandbox stands still for a checkpoint")
        self._waiting.append((number, op, fields))
        return True

    def quiesce(self, number: int, fields: dict[str, Any]) -> None:
        """Everything stops, what is on disk is made safe, and the reply is the last word before the next greeting.

        With an ``event`` hooks run first. For a ``snapshot`` the host may also go on without greeting, by ``awaken``:
        what it asks meanwhile waits.
        """
        event = fields["event"]

        def stop(hooks: list[dict[str, Any]]) -> None:
            self._processes.guard.stand_still()
            self._standstill.begin()
            self._processes.stand_still()
            self._waiting = [] if event == "snapshot" else None
            os.sync()
            self._channel.fall_silent(number, {"hooks": hooks})

        if event is None or self._standstill.since is not None:
            stop([])
        else:
            self._hooks.run(PRE_SUSPEND, self._environment(event), stop)

    def awaken(self, number: int, fields: dict[str, Any]) -> None:
        """Adapt to the world as it is now, then let everything go on. When that fails, everything stays stopped."""
        self._channel.speak()
        self._hooks.cancel()
        result = adjust(fields)
        self.hostname = fields["hostname"] or self.hostname
        if fields["env"] is not None:
            self._processes.defaults.set_env(fields["env"])
        self._limit(fields["limits"])
        if fields["rename"] is not None:
            self._processes.rename(fields["rename"])

        def go_on(hooks: list[dict[str, Any]]) -> None:
            if self._standstill.since is not None:
                self._processes.go_on(self._standstill.end())
            self._channel.reply(number, {**result, "hooks": hooks})
            waiting, self._waiting = self._waiting or [], None
            for request in waiting:
                self._carry_out(*request)

        if self._standstill.since is None:
            go_on([])
        else:
            event = "wake" if fields["machine_id"] is None else "fork"
            self._hooks.run(POST_WAKE, self._environment(event), go_on)

    def _environment(self, event: str) -> dict[str, str]:
        return {"SPACE_EVENT": event, "SPACE_SANDBOX": self.hostname}
