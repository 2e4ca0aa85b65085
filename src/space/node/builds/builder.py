"""The one machine of a build: brought to a disk, worked in, stopped, and its disk kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from space.errors import Conflict, MachineLost, NotFound, RequestError, SandboxError, SpaceError
from space.model.command import CommandSpec, Exit, ExitKind
from space.model.ids import new_id
from space.node.builds.cache import Kept
from space.node.builds.refusals import innermost
from space.node.builds.room import check_room
from space.node.commands import Commands
from space.node.entries import enter
from space.node.guests import Guest
from space.node.machines import Machines
from space.node.readers import Chunk
from space.node.runs import Relay, Run
from space.node.transfers import Download, Upload
from space.protocol.messages import check_file_line, decode_json

if TYPE_CHECKING:
    from space.protocol.messages import FileInfo, StreamPlace

HOSTNAME = "builder"
AGENT = (
    "/.space/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/.space/lib",
    "/.space/bin/python3",
    "-I",
    "-S",
    "/.space/agent.pyz",
)
"""The guest agent as a program of its own: it needs nothing of the disk that it works on."""
ROOT = "0"
"""By number: there may be no file that names users."""
REFUSED = 3
"""With this status `unpack-layer` says why on its standard error."""
COMPLAINT_BYTES_MAX = 64 * 1024
LISTED_MAX = 100_000
_FEED_BYTES = 256 * 1024
_SINK_BYTES = 4096

Sink = Callable[[str, bytes], object]


@dataclass(frozen=True, slots=True)
class Place:
    """A disk to begin with: a template's, or a snapshot's of a machine of that template."""

    template: str
    snapshot: str | None = None


class Builder:
    """``note`` is told the machine's id before it is made, and None once nothing is left of it."""

    def __init__(
        self,
        machines: Machines,
        commands: Commands,
        resources: dict[str, Any],
        note: Callable[[str | None], object],
        agent: Sequence[str] = AGENT,
        machine: str = "",
    ) -> None:
        self._id = machine
        self._machines = machines
        self._commands = commands
        self._resources = resources
        self._note = note
        self._agent = tuple(agent)
        self._place: Place | None = None
        """What its disk is, while it is stopped and nothing has been done to it since that was kept."""
        self.machine: str | None = None

    # --- the machine

    async def at(self, place: Place) -> None:
        """Run, with exactly this disk."""
        if self.machine is not None and self._place == place:
            self._place = None
            await self._machines.start(self.machine, None)
            return
        await self.destroy()
        machine = self._id or new_id("sbx")
        self._note(machine)
        self.machine = machine
        await self._boot(machine, place)

    async def stop(self) -> str:
        """Stop; return the machine's id."""
        machine = self._present()
        await self._machines.stop(machine)
        return machine

    async def keep(self, kept: Kept) -> Place:
        """Stop, and have the disk kept as the snapshot of an entry of the cache."""
        machine = await self.stop()
        answer = await self._machines.snapshot(machine, kept.snapshot, "disk")
        kept.bytes = int(answer.get("bytes") or 0)
        self._place = Place(kept.template, kept.snapshot)
        return self._place

    async def destroy(self) -> None:
        """Leave nothing of the machine."""
        self._place = None
        if self.machine is not None:
            await self._machines.destroy(self.machine)
            self.machine = None
            self._note(None)

    async def _boot(self, machine: str, place: Place) -> None:
        listed = await self._machines.snapshots.list() if place.snapshot is not None else []
        row = next((one for one in listed if one.get("snapshot") == place.snapshot), {})
        full = row.get("kind") == "full"
        resources = dict(self._resources)
        if full:
            resources["memory_mib"] = max(resources["memory_mib"], int(row.get("memory_mib") or 0))
        request = {
            "template": place.template,
            "snapshot": place.snapshot,
            "defaults": {"env": {}, "workdir": "/", "user": ROOT, "entry": None},
            "driver": row.get("driver"),
            "resources": resources,
            "env": {},
            "hostname": HOSTNAME,
            "builder": True,
        }
        await self._machines.boot(machine, request)
        if full:
            # What ran in the snapshot is no part of a template: only its disk is.
            await self._machines.stop(machine)
            await self._machines.start(machine, None)

    def _present(self) -> str:
        if self.machine is None:
            raise MachineLost
        return self.machine

    @property
    def _guest(self) -> Guest:
        return self._machines.guest(self._present())

    # --- programs

    async def run(
        self,
        argv: Sequence[str],
        sink: Sink,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        user: str = ROOT,
        stdin: AsyncIterable[bytes] | None = None,
    ) -> Exit:
        """Run a program to its end, and hand ``sink`` what it writes: ``(stream, data)``."""
        spec = CommandSpec(tuple(argv), dict(env or {}), cwd, user, stdin=stdin is not None, output_mib=1)
        relay = Relay()
        running = _Fed(self._guest, spec, relay.take) if stdin is not None else Run(self._guest, spec, None, relay.take)
        self._commands.add_run(running)
        try:
            await running.start()
            async with asyncio.TaskGroup() as group:
                if isinstance(running, _Fed) and stdin is not None:
                    group.create_task(running.feed_all(stdin))
                end = await _followed(running, relay, sink)
        except BaseExceptionGroup as errors:
            self._commands.give_up_run(running)
            raise innermost(errors) from None
        except BaseException:
            self._commands.give_up_run(running)
            raise
        if end.kind is ExitKind.LOST:
            raise MachineLost("The builder's machine has ended.", code="machine-lost")
        return end

    async def try_entry(self, defaults: dict[str, Any]) -> None:
        """Start, as in a sandbox, what a template starts, and wait until it is up. Raise as ``entries.enter``."""
        await self._machines.trust.tell(self._guest)
        await enter(self._guest, defaults)

    @contextlib.asynccontextmanager
    async def trusting(self) -> AsyncGenerator[None]:
        """While the block lasts programs trust what the gateway shows; afterwards the disk knows nothing of that."""
        await self._machines.trust.tell(self._guest)
        yield
        await self.trust_nobody()

    async def trust_nobody(self) -> None:
        """See to it that the disk knows nothing of that, not even where it was a sandbox's."""
        await self._machines.trust.take_back(self._guest)

    async def unpack(self, chunks: AsyncGenerator[bytes]) -> None:
        """Apply a layer, a plain tar, to the disk. Raises what the guest refuses it with."""
        complaint = bytearray()

        def sink(stream: str, data: bytes) -> None:
            if stream == "stderr":
                complaint.extend(data[: COMPLAINT_BYTES_MAX - len(complaint)])

        async with contextlib.aclosing(chunks):
            end = await self.run([*self._agent, "unpack-layer"], sink, stdin=chunks)
        if (end.kind, end.code) != (ExitKind.EXITED, 0):
            raise _unpack_failure(end, bytes(complaint))

    # --- files

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo | None:
        """Describe a file; None when there is none."""
        try:
            found: Any = await self._guest.request("stat", {"path": path, "user": ROOT, "follow": follow})
        except (NotFound, Conflict) as error:
            if error.code in {"file-not-found", "not-a-directory"}:
                return None
            raise
        return found

    async def names(self, path: str) -> list[str]:
        """Return what is in a directory, sorted; nothing where there is none."""
        if (seen := await self.stat(path)) is None or seen["type"] != "directory":
            return []
        found: list[str] = []
        rest = b""
        async with self._download("list-dir", {"path": path, "user": ROOT, "depth": 1}) as download:
            async for chunk in download.chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                found += [str(check_file_line(decode_json(line))["path"]) for line in lines if line]
                if len(found) > LISTED_MAX:
                    raise RequestError(f"{path} has more than {LISTED_MAX} entries.", code="copy-failed")
        return sorted(found)

    async def read(self, path: str, most: int) -> bytes | None:
        """Return the first bytes of a file; None when there is none."""
        if (seen := await self.stat(path)) is None or seen["type"] != "file":
            return None
        data = bytearray()
        async with self._download("file-read", {"path": path, "user": ROOT, "offset": 0, "length": most}) as download:
            async for chunk in download.chunks():
                data += chunk
        return bytes(data[:most])

    async def write(self, path: str, data: bytes, mode: int) -> None:
        fields = {"path": path, "user": ROOT, "mode": mode, "exclusive": False, "size": len(data)}
        await Upload(self._guest).run("file-write", fields, _pieces(data))

    async def remove(self, path: str) -> None:
        await self._guest.request("remove", {"path": path, "user": ROOT, "recursive": False, "missing_ok": True})

    async def write_archive(self, path: str, chunks: AsyncGenerator[bytes]) -> None:
        """Unpack a tar into a directory that is there."""
        async with contextlib.aclosing(chunks):
            await Upload(self._guest).run("archive-write", {"path": path, "user": ROOT}, chunks)

    async def read_archive(self, path: str, target: Path, most: int) -> int:
        """Write a file, or a directory and all in it, as a tar of at most ``most`` bytes; return how many they are."""
        written = 0
        async with self._download("archive-read", {"path": path, "user": ROOT}) as download:
            with target.open("wb") as file:
                async for chunk in download.chunks():
                    written += len(chunk)
                    check_room(target.parent, len(chunk))
                    if written > most:
                        raise RequestError(f"{path} is larger than {most} bytes.", code="copy-failed")
                    await asyncio.to_thread(file.write, chunk)
        return written

    @contextlib.asynccontextmanager
    async def _download(self, op: str, fields: dict[str, Any]) -> AsyncGenerator[Download]:
        download = Download(self._guest)
        await download.open(op, fields)
        try:
            yield download
        finally:
            download.close()


class _Fed(Run):
    """A run whose standard input comes as it is made."""

    def __init__(self, guest: Guest, spec: CommandSpec, take: Callable[[str, int, bytes], bool]) -> None:
        super().__init__(guest, spec, b"", take)
        self._room = asyncio.Event()
        self._closed = False

    async def feed_all(self, chunks: AsyncIterable[bytes]) -> None:
        """Send everything, then the end; stop when the program reads no more."""
        number = self._numbers["stdin"]
        async for chunk in chunks:
            view = memoryview(chunk)
            while view and not self._closed and self.ended is None:
                self._room.clear()
                if (room := self.guest.room(number)) == 0:
                    await self._room.wait()
                    continue
                self.guest.send(number, bytes(view[:room]))
                view = view[room:]
            if view:
                return
        if not self._closed and self.ended is None:
            self.guest.end(number)

    def resume(self, places: dict[str, StreamPlace]) -> None:
        super().resume(places)
        self._room.set()

    def on_reset(self, number: int, error: SpaceError) -> None:
        if number == self._numbers.get("stdin"):
            self._closed = True
            self._room.set()
        super().on_reset(number, error)

    def _settle(self, end: Exit) -> None:
        super()._settle(end)
        self._room.set()

    def _pump(self) -> None:
        self._room.set()


async def _followed(running: Run, relay: Relay, sink: Sink) -> Exit:
    """Hand on what a run writes, in pieces so small that none holds up the event loop, until it has ended."""
    while isinstance(item := await relay.follow(running), Chunk):
        for start in range(0, len(item.data), _SINK_BYTES):
            sink(item.stream, bytes(item.data[start : start + _SINK_BYTES]))
            await asyncio.sleep(0)
        running.done(item.stream, item.offset + len(item.data))
    return item.exit


async def _pieces(data: bytes) -> AsyncIterable[bytes]:
    for start in range(0, len(data), _FEED_BYTES):
        yield data[start : start + _FEED_BYTES]


def _unpack_failure(end: Exit, complaint: bytes) -> SpaceError:
    told: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(complaint.rstrip(b"\n").rpartition(b"\n")[2])
    if end.code != REFUSED or not isinstance(told, dict):
        kind = end.kind if end.kind is not ExitKind.EXITED else f"status {end.code}"
        return SandboxError(f"Unpacking a layer failed in the builder: {kind}.", code="unpack-failed", kind=str(kind))
    message, code, path = (str(told.get(name) or "")[:1000] for name in ("message", "code", "path"))
    if code == "disk-full":
        return SandboxError("The builder's disk is full: give it more (resources.disk_mib).", code="builder-disk-full")
    return RequestError(f"A layer was refused: {message}", code="layer-refused", reason=code, path=path)
