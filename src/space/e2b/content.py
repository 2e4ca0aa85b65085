"""What is in E2B's volumes, by a token of the volume: each call is carried out in a sandbox that mounts it."""

import asyncio
import json
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from space.control import contents, volumes
from space.control.peers import answer_of
from space.e2b import bodies
from space.e2b import query as queries
from space.e2b.call import Call, ClientGone, CutOff, encoded, while_connected
from space.e2b.uploads import in_pieces
from space.errors import (
    Conflict,
    GuestError,
    InvalidRequest,
    LimitExceeded,
    MachineLost,
    NotFound,
    OutcomeUnknown,
    SandboxError,
    SpaceError,
    Unauthenticated,
    Unavailable,
)
from space.model.sandbox import Sandbox
from space.model.volume import Volume

EXEC_S = 60.0
REMOVE_S = 300.0
GRACE_S = 5.0
"""Until the node has told of a program whose time is over."""
DEPTH_MAX = 64
NUMBER_MAX = 2**32 - 2
PATH_BYTES_MAX = 4096
OWNER = 1000
"""Whose is what is made, where nobody is named: the `user` of templates, in whose name commands run."""
# The runtime that SPACE brings along into each machine: see "Guest runtime and start" in docs/architecture.md.
PYTHON = ("/.space/lib/ld-linux-x86-64.so.2", "--library-path", "/.space/lib", "/.space/bin/python3", "-I", "-S", "-c")
_FULL = {"ENOSPC", "EDQUOT"}
_Result = TypeVar("_Result")


async def stat(call: Call) -> None:
    volume, path = await _asked(call)
    await call.answer(_entry(await _run(call, volume, "stat", path)))


async def change(call: Call) -> None:
    """Change owner and mode."""
    volume, path = await _asked(call)
    body = await bodies.read(call, bodies.VolumeEntryChange)
    await call.answer(_entry(await _run(call, volume, "change", path, **body.model_dump(exclude_none=True))))


async def remove(call: Call) -> None:
    """Remove a file, or a directory with all that is in it."""
    volume, path = await _asked(call)
    if path == "/":
        raise InvalidRequest("The volume itself is not removed like this.")
    try:
        await _in_sandbox(
            call,
            volume,
            lambda sandbox: call.control.node.call("DELETE", _file(sandbox, path, recursive="true"), REMOVE_S),
        )
    except SpaceError as error:
        raise _told(error, path) from error
    await call.answer_empty()


async def list_(call: Call) -> None:
    volume, path = await _asked(call)
    found = await _run(call, volume, "list", path, depth=max(1, min(_number(call, "depth", 1), DEPTH_MAX)))
    if not isinstance(found, list):
        raise _malformed()
    # There may be so many that the others would wait for it.
    await call.answer_encoded(await asyncio.to_thread(lambda: encoded([_entry(one) for one in found])))


async def make_dir(call: Call) -> None:
    volume, path = await _asked(call)
    owner = {name: _number(call, name, OWNER) for name in ("uid", "gid")}
    told = await _run(call, volume, "make", path, force=call.query.get("force") == "true", **owner, **_mode(call))
    await call.answer(_entry(told), 201)


async def read(call: Call) -> None:
    """A file's bytes, as they come."""
    volume, path = await _asked(call)
    await call.body()

    async def pass_on(sandbox: Sandbox) -> None:
        async with call.control.node.pass_on("GET", _file(sandbox, path), {}, None) as response:
            if response.status >= 300:
                await answer_of(call.control.node, response)
            headers = {"content-type": "application/octet-stream", "content-security-policy": "sandbox"}
            kept = (
                {"content-length": response.headers["content-length"]} if "content-length" in response.headers else {}
            )
            await call.begin(200, headers | kept)
            async for chunk in response.content.iter_any():
                await call.write(chunk)
            await call.finish()

    try:
        await while_connected(call, _in_sandbox(call, volume, pass_on))
    except SpaceError as error:
        if call.status:
            raise CutOff from error
        raise _told(error, path) from error


async def write(call: Call) -> None:
    """Write a file as it comes, making the directories above it, and give it its owner and mode."""
    volume, path = await _asked(call)
    uid, gid = (_number(call, name, OWNER) for name in ("uid", "gid"))
    sandbox = await contents.opened(call.control, volume)
    where = _file(sandbox, path, owner=f"{uid}:{gid}", **{name: f"{mode:o}" for name, mode in _mode(call).items()})
    try:
        async with call.control.node.pass_on("PUT", where, {}, in_pieces(call.chunks())) as response:
            await answer_of(call.control.node, response)
    except ClientGone:
        raise
    except SpaceError as error:
        raise _told(error, path) from error
    await call.answer(_entry(await _run(call, volume, "stat", path)), 201)


async def _asked(call: Call) -> tuple[Volume, str]:
    """Return the volume that the request's token is for, and the path in it."""
    volume_id = call.params["volume"]
    scheme, _, token = call.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("A token of the volume is needed.")
    key = await call.control.keyring.unrevoked(call.parts.tokens.check_volume(volume_id, token.strip()))
    return await volumes.by_id(call.control, key.project_id, volume_id), _path(call.query.get("path", "/"))


async def _run(call: Call, volume: Volume, operation: str, path: str, **fields: Any) -> Any:
    """Carry out one operation of the program in the volume's sandbox."""
    told = json.dumps({"root": contents.PLACE, "path": path, **fields})
    argv = [*PYTHON, await asyncio.to_thread(_program), operation, told]
    body = {"argv": argv, "user": "root", "cwd": "/", "timeout_s": EXEC_S}
    try:
        async with contents.looking(call.control, volume):
            done = await _in_sandbox(
                call,
                volume,
                lambda sandbox: call.control.node.call(
                    "POST", f"/v1/sandboxes/{sandbox.id}/exec", EXEC_S + GRACE_S, body
                ),
            )
    except SpaceError as error:
        raise _told(error, path) from error
    if done.get("truncated"):
        raise _too_many()
    try:
        if done["exit"]["kind"] != "exited":
            raise _gone()
        answer: Any = await asyncio.to_thread(json.loads, done["stdout"])
        error = answer.get("error")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as malformed:
        raise _malformed() from malformed
    if error is not None:
        raise _refused(str(error), path)
    return answer.get("ok")


async def _in_sandbox(call: Call, volume: Volume, work: Callable[[Sandbox], Awaitable[_Result]]) -> _Result:
    """Do something in the volume's sandbox: in another one where that, idle for long, went just after it was seen."""
    try:
        return await work(await contents.opened(call.control, volume))
    except (Conflict, NotFound) as error:
        if call.status or not _is_asleep(error):
            raise
    return await work(await contents.opened(call.control, volume))


def _is_asleep(error: SpaceError) -> bool:
    """Whether the volume's sandbox is not there, or does not run."""
    return error.code in {"wrong-state", "sandbox-not-found"}


def _refused(name: str, path: str) -> SpaceError:
    match name:
        case "ENOENT":
            return NotFound(f"path '{path}' does not exist")
        case "EEXIST":
            return Conflict(f"path '{path}' already exists", code="file-exists")
        case "E2BIG":
            return _too_many()
        case _ if name in _FULL:
            return SandboxError("The volume is full.", code="disk-full")
        case _:
            return InvalidRequest(f"path '{path}': {name}")


def _told(error: SpaceError, path: str) -> SpaceError:
    if isinstance(error, NotFound) and error.code == "file-not-found":
        return _refused("ENOENT", path)
    if _is_asleep(error) or isinstance(error, MachineLost | OutcomeUnknown):
        return _gone()
    return InvalidRequest(error.message) if isinstance(error, Conflict) else error


def _gone() -> Unavailable:
    return Unavailable(
        "What reads and writes the volume went away meanwhile, so a write may be done in part. Ask again.",
        code="not-ready",
    )


def _too_many() -> LimitExceeded:
    return LimitExceeded("The directory has too many entries to be listed at once.", code="list-too-long")


def _entry(told: Any) -> dict[str, Any]:
    """Return a ``VolumeEntryStat`` of what the guest told, which may be anything."""
    match told:
        case {
            "name": str(name),
            "type": "unknown" | "file" | "directory" | "symlink" as kind,
            "path": str(path),
            "size": int(size),
            "mode": int(mode),
            "uid": int(uid),
            "gid": int(gid),
            "times": [int(atime), int(mtime), int(ctime)],
        }:
            target: Mapping[str, Any] = {"target": told["target"]} if isinstance(told.get("target"), str) else {}
            times = {"atime": _time(atime), "mtime": _time(mtime), "ctime": _time(ctime)}
            plain = {"name": name, "type": kind, "path": path, "size": size, "mode": mode, "uid": uid, "gid": gid}
            return {**plain, **times, **target}
        case _:
            raise _malformed()


def _time(nanoseconds: int) -> str:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return "1970-01-01T00:00:00Z"  # a time that no calendar has


def _malformed() -> GuestError:
    return GuestError("What was told of the volume makes no sense.", code="bad-answer")


def _path(given: str) -> str:
    if "\0" in given or len(given.encode("utf-8", "surrogateescape")) > PATH_BYTES_MAX:
        raise InvalidRequest(f"A path has at most {PATH_BYTES_MAX} bytes, and no NUL.")
    return "/" + posixpath.normpath("/" + given).lstrip("/")


def _file(sandbox: Sandbox, path: str, **more: str) -> str:
    fields = {"path": contents.PLACE + path, "user": "root", **more}
    return f"/v1/sandboxes/{sandbox.id}/files?{urlencode(fields, errors='surrogateescape')}"


def _mode(call: Call) -> dict[str, int]:
    if "mode" not in call.query:
        return {}
    mode = _number(call, "mode", 0)
    if mode > bodies.MODE_MAX:
        raise InvalidRequest("mode must be permission bits.")
    return {"mode": mode}


def _number(call: Call, name: str, otherwise: int) -> int:
    found = queries.number(call.query, name, digits_max=10)
    if found is not None and found > NUMBER_MAX:
        raise InvalidRequest(f"{name} must be a number up to {NUMBER_MAX}.")
    return otherwise if found is None else found


@cache
def _program() -> str:
    return (Path(__file__).parent / "volume_program.py").read_text()
