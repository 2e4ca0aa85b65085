"""The output of one command, from the node: what is produced, and at last how it ended. Survives the node's restart."""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp

from space import error_wire
from space.control.control import Control
from space.errors import NotFound, OutcomeUnknown, SandboxError, SpaceError, Unavailable

HEADER = struct.Struct(">BQ")
NAMES = {1: "stdout", 2: "stderr", 3: "tty"}
AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits before the next attach, when the node went away; after the last of them the command is given up."""


@dataclass(frozen=True, slots=True)
class Started:
    pid: int | None


@dataclass(frozen=True, slots=True)
class Output:
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    kind: str
    code: int | None
    signal: int | None


Told = Started | Output | Ended


async def follow(control: Control, command_id: str, offsets: dict[str, int]) -> AsyncGenerator[Told]:
    """Yield what a command does from these offsets of its output on; a command that has not been started is.

    ``Started`` comes first and once, ``Ended`` last. Raises what it was refused with, or lost by.
    """
    begun, failures = False, 0
    while True:
        try:
            async with aclosing(_attached(control, command_id, offsets)) as coming:
                async for told in coming:
                    failures = 0
                    if isinstance(told, Started):
                        if begun:
                            continue
                        begun = True
                    yield told
                    if isinstance(told, Ended):
                        return
        except (Unavailable, OutcomeUnknown):
            if not begun:
                raise
        if failures >= len(AGAIN_S):
            raise Unavailable("The command cannot be followed any more.", code="node-unavailable")
        await asyncio.sleep(AGAIN_S[failures])
        failures += 1


async def _attached(control: Control, command_id: str, offsets: dict[str, int]) -> AsyncGenerator[Told]:
    """Yield from one attachment, keeping ``offsets`` up to date; ends without ``Ended`` when the connection is lost."""
    async with control.node.attach(command_id, offsets) as attached:
        while True:
            message = await attached.receive()
            if message.type == aiohttp.WSMsgType.BINARY:
                number, offset = HEADER.unpack_from(message.data)
                name, data = NAMES[number], message.data[HEADER.size :]
                offsets[name] = offset + len(data)
                yield Output(name, data)
            elif message.type == aiohttp.WSMsgType.TEXT:
                told = json.loads(message.data)
                if (item := _item(told)) is not None:
                    yield item
            else:
                return


def _item(told: dict[str, Any]) -> Told | None:
    match told.get("type"):
        case "started":
            return Started(told.get("pid"))
        case "exit":
            end = told["exit"]
            return Ended(end["kind"], end["code"], end["signal"])
        case "error":
            raise error_wire.parse(told["error"], SandboxError)
        case _:
            return None  # Output that is no longer kept has no word in E2B; progress of stdin is nobody's business.


def is_lost(error: SpaceError) -> bool:
    """Whether the command was lost with its sandbox."""
    return isinstance(error, NotFound) and error.code in {"sandbox-deleted", "command-not-found"}
