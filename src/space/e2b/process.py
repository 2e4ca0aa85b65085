"""E2B's process RPC: its processes are our commands, known to the clients by their pid in the sandbox."""

import base64
import binascii
import json
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from space.control import commands
from space.control.peers import answer_of
from space.e2b import attached, connect, keys
from space.e2b.attached import Ended, Output, Started
from space.e2b.call import Call, CutOff, stream, while_connected
from space.e2b.environment import variables
from space.e2b.filesystem import default_user, look, named
from space.e2b.pings import with_pings
from space.errors import Conflict, GuestError, InvalidRequest, NotFound, OutcomeUnknown, SpaceError

STREAMS = {"stdout": "stdout", "stderr": "stderr", "tty": "pty"}
SIGNALS = {"SIGNAL_SIGKILL": "KILL", "SIGNAL_SIGTERM": "TERM"}
CALL_S = 30.0
STDIN_S = 300.0
DIE_S = 5.0
"""How long a process that is killed may take to be gone."""
KEPT = timedelta(seconds=30)
"""How long after its end a process can still be connected to."""
TIMEOUT_MS_MAX = 30 * 24 * 3600 * 1000
OFFSET_END = 10**17
SIDE_MAX = 10_000


async def start(call: Call) -> None:
    """Run a program; its output, and how it ends, are the answer. It goes on when the client goes."""
    body = connect.first(await call.body())
    await stream(call, _start(call, body))


async def connect_to(call: Call) -> None:
    """What a process writes from now on."""
    body = connect.first(await call.body())
    await stream(call, _connect(call, body))


async def list_(call: Call) -> None:
    found = await call.control.node.running_commands(call.sandbox.id)
    await call.answer({"processes": [_described(one) for one in found if one.get("pid")]})


async def send_input(call: Call) -> None:
    body = await call.json()
    command = await _find(call, body.get("process"))
    await _feed(call, command, _input(body.get("input")))
    await call.answer({})


async def stream_input(call: Call) -> None:
    """Input as it comes, to the process that the first message names."""
    frames, command = connect.Frames(), None
    async with aclosing(call.chunks()) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            for message in frames.feed(chunk):
                if isinstance(message.get("start"), dict):
                    command = await _find(call, message["start"].get("process"))
                elif isinstance(message.get("data"), dict):
                    if command is None:
                        raise InvalidRequest("The first message must be start.")
                    await _feed(call, command, _input(message["data"].get("input")))
    await call.begin(200, {"content-type": connect.STREAM_TYPE})
    await call.write(connect.message({}) + connect.end())
    await call.finish()


async def close_stdin(call: Call) -> None:
    command = await _find(call, (await call.json()).get("process"))
    await _feed(call, command, b"", eof=True)
    await call.answer({})


async def send_signal(call: Call) -> None:
    """Signal a process and all it has started; one that is killed is gone when this is answered."""
    body = await call.json()
    wanted = SIGNALS.get(str(body.get("signal")))
    if wanted is None:
        raise InvalidRequest("invalid signal: SIGNAL_SIGKILL and SIGNAL_SIGTERM can be sent")
    command = await _find(call, body.get("process"))
    await call.control.node.call("POST", f"/v1/commands/{command}/signal", CALL_S, {"signal": wanted})
    if wanted == "KILL":
        await _wait_gone(call, command)
    await call.answer({})


async def update(call: Call) -> None:
    """Set the size of a process' terminal."""
    body = await call.json()
    command = await _find(call, body.get("process"))
    size = _size(body.get("pty"))
    if size is not None:
        await call.control.node.call("POST", f"/v1/commands/{command}/resize", CALL_S, size)
    await call.answer({})


async def _start(call: Call, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    spec = await _spec(call, body)
    shown, _ = await commands.create(call.control, call.sandbox, json.dumps(spec).encode())
    try:
        async with aclosing(_frames(call, str(shown["id"]), {})) as frames:
            async for frame in frames:
                yield frame
    except InvalidRequest as error:
        raise _refusal(error, spec, call) from error


async def _connect(call: Call, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    wanted = body.get("process")
    try:
        command = await _find(call, wanted)
    except NotFound:
        command = await _find_ended(call, wanted)
    shown = await call.control.node.command(command)
    async with aclosing(_frames(call, command, dict(shown["produced"]))) as frames:
        async for frame in frames:
            yield frame


async def _frames(call: Call, command_id: str, offsets: dict[str, int]) -> AsyncGenerator[bytes]:
    begun = False
    try:
        async with aclosing(with_pings(attached.follow(call.control, command_id, offsets), call.headers)) as all_told:
            async for told in all_told:
                begun = begun or told is not None
                match told:
                    case None:
                        event: dict[str, Any] = {"keepalive": {}}
                    case Started():
                        event = {"start": {"pid": told.pid}}
                    case Output():
                        event = {"data": {STREAMS[told.stream]: base64.b64encode(told.data).decode()}}
                    case Ended():
                        event = {"end": _end(told)}
                yield connect.message({"event": event})
    except SpaceError as error:
        if begun and attached.is_lost(error):
            raise CutOff from error
        raise


def _end(ended: Ended) -> dict[str, Any]:
    if ended.kind == "lost":
        raise CutOff
    if ended.kind == "timed-out":
        raise OutcomeUnknown("the process took longer than it was given", code="timed-out")
    if ended.kind == "exited":
        code = ended.code or 0
        shown: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        return shown | ({"error": f"exit status {code}"} if code else {})
    status = f"signal: {_signal_name(ended.signal)}"
    return {"exitCode": -1, "exited": False, "status": status, "error": status}


def _signal_name(number: int | None) -> str:
    """Return a signal as Go calls it, which is how E2B's clients know it."""
    try:
        described = signal.strsignal(number or signal.SIGKILL)
    except ValueError:
        described = None
    return described.lower() if described else f"signal {number}"


async def _spec(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    process = body.get("process")
    if not isinstance(process, dict) or not isinstance(process.get("cmd"), str) or not process["cmd"]:
        raise InvalidRequest("process.cmd is needed")
    arguments, given = process.get("args") or [], process.get("envs") or {}
    if not isinstance(arguments, list) or not isinstance(given, dict):
        raise InvalidRequest("process.args must be a list, and process.envs an object")
    user = keys.username(call.headers.get("authorization"))
    tty = _size(body.get("pty") or {}) if body.get("pty") is not None else None
    return {
        "argv": [process["cmd"], *arguments],
        "env": {**variables(call.sandbox), **given},
        "cwd": await _directory(call, process.get("cwd"), user),
        "user": user,
        # Where nothing is said of it there is one.
        "stdin": body.get("stdin") is not False,
        "tty": tty,
        "timeout_s": _timeout_s(call.headers.get("connect-timeout-ms")),
        "tag": body.get("tag") or None,
        "wait_output": tty is None,
    }


async def _directory(call: Call, cwd: Any, user: str | None) -> str | None:
    if cwd is None or cwd == "":
        return None
    if not isinstance(cwd, str):
        raise InvalidRequest("process.cwd must be a path")
    if cwd.startswith("/"):
        return cwd
    try:
        return (await look(call, cwd, user or default_user(call.sandbox)))["path"]
    except NotFound as error:
        raise InvalidRequest(f"cwd '{cwd}' does not exist", field="cwd") from error


def _refusal(error: InvalidRequest, spec: dict[str, Any], call: Call) -> SpaceError:
    if error.details.get("field") == "cwd":
        return InvalidRequest(f"cwd '{spec['cwd']}' does not exist")
    return named(error, spec["user"] or default_user(call.sandbox))


def _timeout_s(text: str | None) -> float | None:
    """Return how long the process may live: as long as the client waits for it."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise InvalidRequest("Connect-Timeout-Ms must be a number of milliseconds")
    number = int(text)
    return min(number, TIMEOUT_MS_MAX) / 1000 if number > 0 else None


def _size(pty: Any) -> dict[str, int] | None:
    size = (pty or {}).get("size") if isinstance(pty, dict) else None
    if not isinstance(size, dict):
        return {"rows": 24, "cols": 80} if pty is not None else None
    rows, cols = size.get("rows") or 24, size.get("cols") or 80
    if type(rows) is not int or type(cols) is not int:
        raise InvalidRequest("pty.size must have rows and cols")
    return {"rows": max(1, min(rows, SIDE_MAX)), "cols": max(1, min(cols, SIDE_MAX))}


async def _find(call: Call, selector: Any) -> str:
    """Return the id of the running command that a selector names by pid or tag."""
    wants = _selector(selector)
    found = next((one for one in await call.control.node.running_commands(call.sandbox.id) if wants(one)), None)
    if found is None:
        raise NotFound(f"process with {_named(selector)} not found")
    return str(found["id"])


async def _find_ended(call: Call, selector: Any) -> str:
    """Return the id of a command that has ended just now: whoever comes late is told how."""
    wants, now = _selector(selector), datetime.now(UTC)
    for one in await call.control.node.commands(call.sandbox.id):
        if wants(one) and one.get("ended_at") and now - datetime.fromisoformat(one["ended_at"]) < KEPT:
            return str(one["id"])
    raise NotFound(f"process with {_named(selector)} not found")


def _selector(selector: Any) -> Any:
    if isinstance(selector, dict):
        for name in ("pid", "tag"):
            if (wanted := selector.get(name)) is not None:
                return lambda one, name=name, wanted=wanted: one.get(name) == wanted
    raise InvalidRequest("process must name a pid or a tag")


def _named(selector: Mapping[str, Any]) -> str:
    return f"pid {selector['pid']}" if selector.get("pid") is not None else f"tag {str(selector['tag'])[:64]}"


def _described(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``ProcessInfo``. Values of variables are shown to nobody."""
    program, *arguments = one["argv"]
    config = {"cmd": program, "args": arguments} | ({"cwd": one["cwd"]} if one["cwd"] else {})
    return {"config": config, "pid": one["pid"]} | ({"tag": one["tag"]} if one.get("tag") else {})


def _input(given: Any) -> bytes:
    value = (given or {}).get("stdin", (given or {}).get("pty", "")) if isinstance(given, dict | None) else None
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise InvalidRequest("input must have stdin or pty, in base64") from error


async def _feed(call: Call, command: str, data: bytes, *, eof: bool = False) -> None:
    """Give bytes to a process; returns when it, or what lies before it, has taken them."""
    query = urlencode({"eof": "true"}) if eof else ""
    path = f"/v1/commands/{command}/stdin" + (f"?{query}" if query else "")
    try:
        async with call.control.node.open("POST", path, STDIN_S, data=data) as response:
            await answer_of(call.control.node, response)
    except Conflict as error:
        if error.code == "command-ended":
            raise NotFound("the process has ended") from error
        raise


async def _wait_gone(call: Call, command: str) -> None:
    """Return when a killed process has been reaped; what cannot be killed in time is left to itself."""
    query = urlencode({"follow": "true", **{f"{name}_from": OFFSET_END for name in STREAMS}})

    async def follow() -> None:
        async with call.control.node.open("GET", f"/v1/commands/{command}/output?{query}", DIE_S) as response:
            await response.content.read()

    try:
        await while_connected(call, follow())
    except (OutcomeUnknown, GuestError, TimeoutError):
        return


METHODS = {
    "Start": start,
    "Connect": connect_to,
    "List": list_,
    "SendInput": send_input,
    "StreamInput": stream_input,
    "CloseStdin": close_stdin,
    "SendSignal": send_signal,
    "Update": update,
}
