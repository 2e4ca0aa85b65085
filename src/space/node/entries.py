"""A template's entry: what is started once in a fresh machine and lives on, and the check that says when it is up.

It is started in the machine that the warm snapshot is made of, so that what is restored from that has it running
already; and in a machine that is booted without one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from space.errors import GuestError, InvalidRequest
from space.node import errands

if TYPE_CHECKING:
    from space.node.guests import Guest

ENTRY_S_MAX = 150.0
"""Longest that a boot waits for an entry, whatever the template allows: within a creation's time."""
CHECK_S = 30.0
CHECK_EVERY_S = 0.1


async def enter(guest: Guest, defaults: dict[str, Any], *, started: bool = False) -> None:
    """Start what the template's defaults say, unless that has been done, and return once it is up. No entry: nothing
    is done.

    Raise ``GuestError`` (``entry-failed``) when it cannot be started or is not up in time.
    """
    entry = defaults.get("entry")
    if not entry:
        return
    timeout_s = min(float(entry.get("timeout_s") or ENTRY_S_MAX), ENTRY_S_MAX)
    try:
        async with asyncio.timeout(timeout_s):
            if not started:
                await errands.leave_running(guest, _program(entry["start"], defaults))
            if entry.get("ready"):
                await _until_ready(guest, _program(entry["ready"], defaults))
    except TimeoutError as error:
        raise GuestError(
            f"The template's start command was not ready within {timeout_s:g} s: its check never ended with status 0.",
            code="entry-failed",
            timeout_s=timeout_s,
        ) from error
    except InvalidRequest as error:
        raise GuestError(
            f"The template's start command or its check cannot be started: {error.message}", code="entry-failed"
        ) from error


async def enter_again(guest: Guest, defaults: dict[str, Any]) -> bool | None:
    """Start it again where its check says that it is not up; return whether that was so, None where there is no check.

    Raise as ``enter``.
    """
    entry = defaults.get("entry")
    if not entry or not entry.get("ready"):
        return None
    try:
        checked = await errands.run(guest, _program(entry["ready"], defaults), CHECK_S)
    except TimeoutError:
        checked = {}
    if checked.get("code") == 0:
        return False
    await enter(guest, defaults)
    return True


async def _until_ready(guest: Guest, program: dict[str, Any]) -> None:
    while True:
        if (await errands.run(guest, program, CHECK_S)).get("code") == 0:
            return
        await asyncio.sleep(CHECK_EVERY_S)


def _program(command: str | list[str], defaults: dict[str, Any]) -> dict[str, Any]:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    return {
        "argv": argv,
        "env": cast("dict[str, str]", defaults.get("env") or {}),
        "cwd": defaults.get("workdir"),
        "user": defaults.get("user"),
    }
