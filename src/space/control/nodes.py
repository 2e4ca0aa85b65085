"""The client of a node's Unix socket: lifecycle calls, the machine events, and requests passed on as they are."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any, cast

import aiohttp

from space.control.peers import CONNECT_TIMEOUT_S, JSON, Peer, answer_of, lines_of
from space.errors import HostError, NotFound, OutcomeUnknown, Unavailable

COMMAND_TIMEOUT_S = 30
ATTACH_PROTOCOL = "space.command.v1"
GC_TIMEOUT_S = 240
BUILD_TIMEOUT_S = 60
VOLUME_TIMEOUT_S = 90
METRICS_TIMEOUT_S = 5
DRIVERS_TIMEOUT_S = 5


class Node(Peer):
    """One node. Every call is bounded; who cannot be reached is ``Unavailable``, a lost answer ``OutcomeUnknown``."""

    name = "node"

    def unreachable(self) -> Unavailable:
        return Unavailable("The node is not reachable.", code="node-unavailable")

    def lost(self) -> OutcomeUnknown:
        return OutcomeUnknown("The node's answer was lost.")

    def malformed(self, what: str) -> HostError:
        return HostError(f"The node's answer {what}.", code="node-protocol")

    async def boot(self, machine: str, wanted: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self.call("PUT", f"/machines/{machine}", timeout_s, wanted)

    async def act(self, machine: str, verb: str, wanted: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Pause, resume, suspend, wake, stop or start a machine; returns ``{timings, ready}`` when that is done."""
        return await self.call("POST", f"/machines/{machine}/{verb}", timeout_s, wanted)

    async def destroy(
        self, machine: str, timeout_s: float, condition: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Leave nothing of a machine. With ``if_idle_s`` in ``condition`` only if it has been idle for so long."""
        return await self.call("DELETE", f"/machines/{machine}", timeout_s, condition or None)

    async def inspect(self, machine: str) -> dict[str, Any]:
        """Return ``{machine, state, cause?, usage?}``; a machine that the node does not know is ``absent``."""
        try:
            return await self.call("GET", f"/machines/{machine}", 10)
        except NotFound:
            return {"machine": machine, "state": "absent"}

    async def machines(self) -> list[dict[str, Any]]:
        return self._objects(await self.call("GET", "/machines", 30), "machines")

    async def activity(self) -> dict[str, dict[str, Any]]:
        """Return ``{state, ready, commands, clients, active_at}`` of every machine, by id; from the node's memory."""
        listed: Any = (await self.call("GET", "/machines/activity", 10)).get("machines")
        if not isinstance(listed, dict):
            raise self.malformed("tells of no machine's activity")
        machines = cast("dict[Any, Any]", listed)
        return {str(machine): shown for machine, shown in machines.items() if isinstance(shown, dict)}

    async def snapshot(self, machine: str, snapshot: str, kind: str, timeout_s: float) -> dict[str, Any]:
        """Keep a snapshot of a machine; returns ``{timings, bytes}``. Asked again with the id, it is the same one."""
        return await self.call("POST", f"/machines/{machine}/snapshots/{snapshot}", timeout_s, {"kind": kind})

    async def drop_snapshot(self, snapshot: str, timeout_s: float) -> None:
        await self.call("DELETE", f"/snapshots/{snapshot}", timeout_s)

    async def snapshots(self) -> list[dict[str, Any]]:
        return self._objects(await self.call("GET", "/snapshots", 30), "snapshots")

    async def make_volume(self, volume: str, size_mib: int) -> None:
        """Make a volume; asked again with the id, it is the same one."""
        await self.call("PUT", f"/volumes/{volume}", VOLUME_TIMEOUT_S, {"size_mib": size_mib})

    async def drop_volume(self, volume: str) -> None:
        """Leave nothing of a volume; ``Conflict`` (``volume-in-use``) while a machine mounts it."""
        await self.call("DELETE", f"/volumes/{volume}", VOLUME_TIMEOUT_S)

    async def volumes(self) -> list[dict[str, Any]]:
        return self._objects(await self.call("GET", "/volumes", 30), "volumes")

    async def pool(self) -> dict[str, Any]:
        return await self.call("GET", "/pool", 10)

    async def gc(self, *, dry_run: bool) -> list[dict[str, Any]]:
        """Have the host look for what belongs to nobody, and remove it unless told not to; returns what it found."""
        return self._objects(await self.call("POST", "/gc", GC_TIMEOUT_S, {"dry_run": dry_run}), "strays")

    async def templates(self) -> list[dict[str, Any]]:
        return self._objects(await self.call("GET", "/templates", 30), "templates")

    async def drop_template(self, digest: str, timeout_s: float) -> None:
        """Leave nothing of a template; ``Conflict`` (``template-in-use``) while something of the host is of it."""
        await self.call("DELETE", f"/templates/{digest}", timeout_s)

    async def warm(self, digest: str, wanted: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Prepare a template for its next starts; returns ``{timings}`` when that is done."""
        return await self.call("POST", f"/templates/{digest}/warm", timeout_s, wanted)

    async def start_build(self, build: str, spec: Mapping[str, Any]) -> None:
        """Tell of a build, which the node carries out by itself. Told again with the id, it is the same one."""
        await self.call("PUT", f"/builds/{build}", BUILD_TIMEOUT_S, spec)

    async def build(self, build: str) -> dict[str, Any]:
        """Return ``{state, step, steps, digest?, defaults?, bytes?, base?, lineage?, packages?, error?, timings}``."""
        return await self.call("GET", f"/builds/{build}", BUILD_TIMEOUT_S)

    async def build_log(self, build: str, start: int, *, follow: bool) -> AsyncGenerator[dict[str, Any]]:
        """Yield the lines ``{n, at, stream, text}`` of a build's log from number ``start`` on.

        With ``follow`` until the build has ended or the connection does; silence is bounded by who reads.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
        path = f"/builds/{build}/log?from={start}" + ("&follow=true" if follow else "")
        async with self.open("GET", path, timeout) as response:
            if response.status != 200:
                await answer_of(self, response)
            async for line in lines_of(self, response.content):
                yield line

    async def cancel_build(self, build: str) -> None:
        await self.call("POST", f"/builds/{build}/cancel", BUILD_TIMEOUT_S)

    async def forget_build(self, build: str) -> None:
        """Leave nothing of a build, its log included; one that goes on is ended first."""
        await self.call("DELETE", f"/builds/{build}", BUILD_TIMEOUT_S)

    async def upload_bytes(self, upload: str) -> int:
        """Return how much of an upload has come."""
        try:
            came: Any = (await self.call("GET", f"/uploads/{upload}", 10)).get("bytes")
        except NotFound:
            return 0
        if not isinstance(came, int) or came < 0:
            raise self.malformed("tells of no bytes")
        return came

    async def drop_upload(self, upload: str) -> None:
        await self.call("DELETE", f"/uploads/{upload}", BUILD_TIMEOUT_S)

    async def build_cache_gc(self, limits: Mapping[str, Any], *, dry_run: bool) -> list[dict[str, Any]]:
        """Remove what is old or too much of the kept steps, unless told not to; return what that is."""
        asked = {**limits, "dry_run": dry_run}
        return self._objects(await self.call("POST", "/build-cache/gc", GC_TIMEOUT_S, asked), "removed")

    async def doctor(self) -> list[dict[str, Any]]:
        return self._objects(await self.call("GET", "/doctor", 60), "checks")

    async def drivers(self) -> dict[str, Any]:
        """Return ``{default, drivers: [{name, usable, reason}]}``."""
        return await self.call("GET", "/drivers", DRIVERS_TIMEOUT_S)

    async def metrics(self) -> bytes:
        """Return the figures of the node and its broker, as Prometheus text."""
        return await self.text("/metrics", METRICS_TIMEOUT_S)

    async def set_token_key(self, pem: bytes) -> None:
        async with self.open("PUT", "/token-key", 10, data=pem) as response:
            await answer_of(self, response)

    async def create_command(self, sandbox_id: str, command_id: str, body: bytes) -> dict[str, Any]:
        """Reserve a command under that id and return its description. Asked again with the id, it is the same one."""
        headers = {**JSON, "X-Space-Command": command_id}
        path = f"/v1/sandboxes/{sandbox_id}/commands"
        async with self.open("POST", path, COMMAND_TIMEOUT_S, data=body, headers=headers) as response:
            answer = await answer_of(self, response)
        shown: Any = answer.get("command", answer)
        if not isinstance(shown, dict):
            raise self.malformed("describes no command")
        return cast("dict[str, Any]", shown)

    async def command(self, command_id: str) -> dict[str, Any]:
        return await self.call("GET", f"/v1/commands/{command_id}", COMMAND_TIMEOUT_S)

    async def commands(self, sandbox_id: str) -> list[dict[str, Any]]:
        """Return the sandbox's commands that the node remembers."""
        return self._objects(await self.call("GET", f"/v1/sandboxes/{sandbox_id}/commands", COMMAND_TIMEOUT_S), "items")

    async def running_commands(self, sandbox_id: str) -> list[dict[str, Any]]:
        """Return the sandbox's commands that run now."""
        path = f"/v1/sandboxes/{sandbox_id}/commands?state=running"
        return self._objects(await self.call("GET", path, COMMAND_TIMEOUT_S), "items")

    @contextlib.asynccontextmanager
    async def attach(
        self, command_id: str, offsets: Mapping[str, int]
    ) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
        """Attach to a command from these offsets of its streams; the first attach starts it."""
        query = "&".join(f"{name}_from={offset}" for name, offset in offsets.items())
        async with self.socket(f"/v1/commands/{command_id}/attach?{query}", ATTACH_PROTOCOL) as attached:
            yield attached

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield what the node reports about its machines until the connection ends."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
        async with self.open("GET", "/machines/events", timeout) as response:
            if response.status != 200:
                await answer_of(self, response)
            async for event in lines_of(self, response.content):
                yield event

    @contextlib.asynccontextmanager
    async def pass_on(
        self,
        method: str,
        path_and_query: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterable[bytes] | None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request as it is and give the response as it comes; neither body is held in memory.

        ``path_and_query`` is sent as it stands: the caller builds the path from parts it has checked.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
        async with self.open(method, path_and_query, timeout, data=body, headers=headers) as response:
            yield response

    def _objects(self, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
        listed: Any = answer.get(name, answer.get(""))
        if not isinstance(listed, list):
            raise self.malformed(f"has no list of {name}")
        return [cast("dict[str, Any]", item) for item in cast("list[Any]", listed) if isinstance(item, dict)]
