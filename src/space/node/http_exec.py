"""`exec`: run a program to its end and collect what it wrote, or pass it on as it comes.

Stateless: a run whose client goes away is killed, with all it started.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from space.errors import SpaceError
from space.model.command import CommandSpec, Exit
from space.node.call import JSON_TYPE, MIB, NDJSON_TYPE, BrokenOff, Call, ClientGone
from space.node.guests import Guest
from space.node.ndjson import answering
from space.node.overdue import overdue
from space.node.parse import parse_exec
from space.node.readers import Chunk
from space.node.runs import Capture, Relay, Run

PIECE_CHARS = 256 * 1024
"""Larger answers are put into JSON in pieces, so that none of them holds up the event loop."""


async def run(call: Call) -> None:
    """Answer with JSON when the program has ended, or with NDJSON while it runs where the client asks for that."""
    spec, stdin = parse_exec(await call.json())
    guest = call.node.machines.guest(call.params["sandbox"])
    if NDJSON_TYPE in (call.header("accept") or ""):
        await _stream(call, guest, spec, stdin)
    else:
        await _collect(call, guest, spec, stdin)


async def _collect(call: Call, guest: Guest, spec: CommandSpec, stdin: bytes | None) -> None:
    with Capture(spec.output_mib * MIB, call.node.commands.budget) as capture:
        running = Run(guest, spec, stdin, capture.take)
        await _start(call, running)
        try:
            with _on_time(call, running, spec):
                async with call.while_connected():
                    end = await running.wait()
        except (ClientGone, asyncio.CancelledError):
            running.kill()
            raise
        await _answer(call, running, end, capture)


async def _stream(call: Call, guest: Guest, spec: CommandSpec, stdin: bytes | None) -> None:
    relay = Relay()
    running = Run(guest, spec, stdin, relay.take)
    await _start(call, running)
    try:
        with _on_time(call, running, spec, relay):
            await _relay(call, running, relay)
    except (ClientGone, BrokenOff, SpaceError, asyncio.CancelledError):
        running.kill()
        raise


async def _relay(call: Call, running: Run, relay: Relay) -> None:
    async with call.while_connected(), answering(call) as lines:
        while isinstance(item := await relay.follow(running), Chunk):
            line = lines.encode(item)
            if line:
                await call.write(line)
            running.done(item.stream, item.offset + len(item.data))
        await call.write(lines.encode(item))


def _on_time(call: Call, running: Run, spec: CommandSpec, relay: Relay | None = None) -> AbstractContextManager[None]:
    """Give the run up as lost when its guest does not end it in time. A client that reads slowly is waited for."""
    node, sandbox = call.node, call.params["sandbox"]

    def due() -> bool:
        return node.machines.runs(sandbox) and not (relay is not None and relay.waiting)

    return overdue(spec.timeout_s, due, lambda: node.commands.give_up_run(running))


async def _start(call: Call, running: Run) -> None:
    call.node.commands.add_run(running)
    try:
        await running.start()
    except (SpaceError, asyncio.CancelledError):
        call.node.commands.give_up_run(running)
        raise


async def _answer(call: Call, running: Run, end: Exit, capture: Capture) -> None:
    stdout, stderr = capture.kept["stdout"], capture.kept["stderr"]
    texts, encoding = _texts((stdout, stderr), cut=capture.truncated)
    produced = running.produced
    rest: dict[str, Any] = {
        "exit": {"kind": end.kind, "code": end.code, "signal": end.signal},
        "stdout_bytes": produced["stdout"],
        "stderr_bytes": produced["stderr"],
        "truncated": capture.truncated,
        "encoding": encoding,
        "duration_s": round(running.duration_s, 6),
    }
    if len(texts[0]) + len(texts[1]) <= PIECE_CHARS:
        await call.answer({**rest, "stdout": texts[0], "stderr": texts[1]})
        return
    await call.begin(200, {"content-type": JSON_TYPE})
    async with call.while_connected():
        for piece in _pieces(rest, texts):
            await call.write(piece)
            await asyncio.sleep(0)
    await call.finish()


def _texts(outputs: tuple[bytearray, bytearray], *, cut: bool) -> tuple[tuple[str, str], str]:
    """Return both outputs as text when both are UTF-8 (but for a character cut off at the end), else as base64."""
    try:
        return (_decode(outputs[0], cut=cut), _decode(outputs[1], cut=cut)), "utf-8"
    except UnicodeDecodeError:
        return (base64.b64encode(outputs[0]).decode(), base64.b64encode(outputs[1]).decode()), "base64"


def _decode(data: bytearray, *, cut: bool) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if cut and error.reason == "unexpected end of data" and error.end == len(data):
            return data[: error.start].decode()
        raise


def _pieces(rest: dict[str, Any], texts: tuple[str, str]) -> Iterator[bytes]:
    """Yield the answer's JSON. A long text is escaped piece by piece: escapes never span characters."""
    yield json.dumps(rest, separators=(",", ":"))[:-1].encode()
    for name, text in zip(("stdout", "stderr"), texts, strict=True):
        yield f',"{name}":"'.encode()
        for start in range(0, len(text), PIECE_CHARS):
            yield json.dumps(text[start : start + PIECE_CHARS], ensure_ascii=False)[1:-1].encode()
        yield b'"'
    yield b"}"
