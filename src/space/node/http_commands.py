"""Routes of command sessions but for the WebSocket."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from space.errors import InvalidRequest
from space.model.command import CommandState
from space.model.ids import is_id
from space.node.call import Call
from space.node.ndjson import answering
from space.node.parse import parse_command, parse_flag, parse_offset, parse_signal, parse_tty
from space.node.readers import Exited
from space.node.sessions import Session

OUTPUT_STREAMS = ("stdout", "stderr", "tty")


async def create(call: Call) -> None:
    """Reserve a command. Nothing runs before the first attach."""
    spec = parse_command(await call.json())
    sandbox = call.params["sandbox"]
    call.node.machines.known(sandbox)
    command_id = call.header("x-space-command") if call.local else None
    if command_id is not None and not is_id("cmd", command_id):
        raise InvalidRequest("The header X-Space-Command must be a command id.", field="x-space-command")
    session = call.node.commands.create(sandbox, spec, command_id)
    path = f"/v1/commands/{session.id}/attach"
    base = call.node.settings.data_plane_url
    await call.answer({"command": describe(session), "attach": {"url": f"ws{base.removeprefix('http')}{path}"}}, 201)


async def list_commands(call: Call) -> None:
    """The sandbox's commands that are still remembered, the newest first; with ``state`` those in that state alone."""
    state = call.query.get("state")
    found = call.node.commands.of(call.params["sandbox"])
    await call.answer({"items": [describe(s) for s in found if state in {None, s.record.state.value}]})


async def show(call: Call) -> None:
    await call.answer(describe(_session(call)))


async def output(call: Call) -> None:
    """Output as NDJSON: what is kept now, or with ``follow`` until the command has ended. Starts nothing."""
    session = _session(call)
    follow = parse_flag(call.query, "follow")
    reader = session.read_from(start_offsets(call))
    try:
        await call.body(1)
        async with call.while_connected(), answering(call) as lines:
            while True:
                item = await reader.next() if follow else reader.poll()
                if item is None:
                    break
                line = lines.encode(item)
                if line:
                    await call.write(line)
                if isinstance(item, Exited):
                    break
    finally:
        reader.close()


async def signal(call: Call) -> None:
    """Send a signal to everything the command started, or with ``tree: false`` to its first process only."""
    body = await call.json()
    tree = body.get("tree", True)
    if type(tree) is not bool:
        raise InvalidRequest("`tree` must be true or false.", field="tree")
    number = parse_signal(body.get("signal"))
    session = _session(call)
    if session.record.state is CommandState.RUNNING:
        call.node.machines.guest(session.record.sandbox_id)
    await session.signal(number, tree=tree)
    await call.answer_empty()


async def resize(call: Call) -> None:
    """Set the size of the command's terminal."""
    tty = parse_tty(await call.json())
    await _session(call).resize(tty.rows, tty.cols)
    await call.answer_empty()


async def stdin(call: Call) -> None:
    """Feed the raw body to stdin as the command takes it; ``eof=true`` closes stdin behind it.

    With ``offset`` a client may repeat itself: bytes that were accepted before are skipped.
    """
    session = _session(call)
    eof = parse_flag(call.query, "eof")
    offset = parse_offset(call.query, "offset") if "offset" in call.query else None
    accepted = await session.feed(b"", offset)
    async for chunk in call.chunks():
        accepted = await session.feed(chunk, offset)
        offset = offset + len(chunk) if offset is not None else None
    if eof:
        await session.end_stdin()
    await call.answer({"stdin_bytes": accepted})


def describe(session: Session) -> dict[str, Any]:
    """Return a command as it is shown; values of its environment are not."""
    record, spec = session.record, session.record.spec
    end = session.ending()
    return {
        "id": record.id,
        "sandbox_id": record.sandbox_id,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "env_names": sorted(spec.env),
        "user": spec.user,
        "stdin": spec.stdin,
        "tty": {"rows": spec.tty.rows, "cols": spec.tty.cols} if spec.tty else None,
        "timeout_s": spec.timeout_s,
        "output_mib": spec.output_mib,
        "tag": spec.tag,
        "pid": record.pid,
        "state": record.state.value,
        "exit": {"kind": end.exit.kind, "code": end.exit.code, "signal": end.exit.signal} if end else None,
        "produced": session.produced,
        "created_at": _time(record.created_at),
        "started_at": _time(record.started_at),
        "ended_at": _time(record.ended_at),
        **({"forked_from": record.forked_from} if record.forked_from else {}),
    }


def start_offsets(call: Call) -> dict[str, int]:
    """Return where a client wants each stream to go on, from ``stdout_from`` and the like."""
    return {name: parse_offset(call.query, f"{name}_from") for name in OUTPUT_STREAMS}


def _session(call: Call) -> Session:
    return call.node.commands.get(call.params["command"])


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
