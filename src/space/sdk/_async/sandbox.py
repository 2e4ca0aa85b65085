"""A sandbox as a handle: commands, files, lifecycle."""

import builtins
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack
from urllib.parse import urlsplit

from space.errors import Conflict, NotFound, OutcomeUnknown, SpaceError
from space.sdk._async.client import AsyncClient
from space.sdk._async.command import AsyncCommand
from space.sdk._async.contexts import AsyncContexts
from space.sdk._async.dataplane import AsyncDataPlane
from space.sdk._async.egress import AsyncEgress
from space.sdk._async.files import AsyncFiles
from space.sdk._async.operations import pages
from space.sdk._async.policies import AsyncSandboxPolicy
from space.sdk._async.ports import AsyncPorts
from space.sdk._async.secrets import AsyncGrants
from space.sdk.backends.asyncio import sleep
from space.sdk.options import (
    CommandOptions,
    ForkOptions,
    SandboxChanges,
    SandboxOptions,
    change_body,
    command_body,
    fork_body,
    sandbox_body,
)
from space.sdk.requests import HELD_S_MAX, READ_TIMEOUT_S, Endpoint, Request, creating, present, waiting
from space.sdk.templates import Template
from space.sdk.types import (
    CommandInfo,
    CommandResult,
    Operation,
    SandboxInfo,
    Snapshot,
    SnapshotKind,
    State,
    StreamName,
    Tty,
)

RESTING: frozenset[State] = frozenset({"paused", "suspended", "stopped", "failed", "deleted"})
Verb = Literal["pause", "resume", "suspend", "wake", "stop", "start"]
POLL_S = 0.05
EXEC_MARGIN_S = 60.0
STDIN_TEXT_BYTES_MAX = 256 * 1024


class AsyncSandbox:
    """One isolated machine. Make one with `create`, find one again with `connect`.

    As a context manager it is deleted at the end, unless ``keep`` was asked for or `detach` called. Every call raises
    the errors of `space.errors`.
    """

    def __init__(
        self, client: AsyncClient, info: SandboxInfo, *, keep: bool = False, owns_client: bool = False
    ) -> None:
        self.client = client
        self.info = info
        self._keep = keep
        self._owns_client = owns_client
        if owns_client:
            client.hold(self)
        self._plane = AsyncDataPlane(client.transport, info.id)
        self.files = AsyncFiles(self._plane, info.id)
        self.ports = AsyncPorts(client.transport, self._plane, info.id)
        self.contexts = AsyncContexts(client.transport, info.id)
        self.policy = AsyncSandboxPolicy(client.transport, info.id)
        self.grants = AsyncGrants(client.transport, info.id)
        self.egress = AsyncEgress(client.transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str | None:
        return self.info.name

    @property
    def state(self) -> State:
        """The state when the server was last asked; `refresh` asks again."""
        return self.info.state

    # Making and finding

    @classmethod
    async def create(
        cls,
        template: str | Snapshot | Template = "base",
        *,
        client: AsyncClient | None = None,
        url: str | None = None,
        api_key: str | None = None,
        keep: bool = False,
        wait_s: float | None = 120.0,
        **options: Unpack[SandboxOptions],
    ) -> Self:
        """Make a sandbox and return it once it is running and ready; with ``wait_s`` None as soon as it is accepted.

        ``template`` is a template (itself, its name, ``name:tag`` or digest) or a snapshot (or ``"snapshot:ID"``).
        ``keep`` leaves it in place at the end of a ``with`` block, and also when it does not become ready. A request
        whose answer is lost is sent again without making a second sandbox. Options: see `SandboxOptions`. Without
        ``client`` the sandbox has connections of its own; share one `AsyncClient` between many sandboxes.
        """
        used = client or AsyncClient(url, api_key)
        try:
            answer = await cls._request_create(used, sandbox_body(template, options), wait_s, keep=keep)
            sandbox = cls(used, SandboxInfo.parse(answer["sandbox"]), keep=keep, owns_client=client is None)
            if wait_s:
                try:
                    await sandbox.wait_ready(timeout_s=wait_s)
                except BaseException:
                    if not keep:
                        await _remove(used, sandbox.id)
                    raise
        except BaseException:
            if client is None:
                await used.close()
            raise
        return sandbox

    @staticmethod
    async def _request_create(
        client: AsyncClient, body: dict[str, Any], wait_s: float | None, *, keep: bool
    ) -> dict[str, Any]:
        held_s = min(wait_s, HELD_S_MAX) if wait_s else None
        headers, read_s = creating(wait_s=held_s), READ_TIMEOUT_S + (held_s or 0)
        request = Request(method="POST", path="/v1/sandboxes", body=body, headers=headers, read_s=read_s)
        try:
            return await client.transport.call(request)
        except SpaceError as error:
            failed = error.details.get("sandbox_id")
            if failed and not keep:
                await _remove(client, str(failed))
            raise

    @classmethod
    async def connect(
        cls, sandbox_id: str, *, client: AsyncClient | None = None, url: str | None = None, api_key: str | None = None
    ) -> Self:
        """Return a handle for a sandbox that exists. Leaving its ``with`` block does not delete it."""
        used = client or AsyncClient(url, api_key)
        try:
            return cls(used, await used.sandbox_info(sandbox_id), keep=True, owns_client=client is None)
        except BaseException:
            if client is None:
                await used.close()
            raise

    @classmethod
    async def list(
        cls,
        *,
        client: AsyncClient | None = None,
        url: str | None = None,
        api_key: str | None = None,
        state: State | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncIterator[SandboxInfo]:
        """Yield the project's sandboxes, page by page, those that match all that is given."""
        used = client or AsyncClient(url, api_key)
        try:
            async for info in used.sandboxes(state=state, name=name, metadata=metadata):
                yield info
        finally:
            if client is None:
                await used.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._keep:
                with suppress(NotFound):
                    await self.delete()
        finally:
            await self.close()

    def detach(self) -> None:
        """Keep the sandbox when the ``with`` block ends."""
        self._keep = True

    async def close(self) -> None:
        """Give back the connections this handle owns; the sandbox stays as it is."""
        if self._owns_client:
            await self.client.let_go(self)

    # Commands

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        check: bool = False,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run a command to its end and return its exit and output.

        Text runs in the sandbox's shell, a sequence is run as it is. ``check`` raises ``CommandFailed`` unless it exits
        with 0. Options: see `CommandOptions`. When the connection is lost meanwhile, ``OutcomeUnknown`` is raised: use
        `start` for a command that must outlive connections.
        """
        text = _as_text(stdin)
        if stdin is not None and text is None:
            async with await self.start(command, stdin=True, **options) as started:
                result = await started.communicate(stdin)
        else:
            limit_s = options.get("timeout_s")
            request = Request(
                method="POST",
                path=f"/v1/sandboxes/{self.id}/exec",
                body={**command_body(command, options), **present(stdin_text=text)},
                read_s=None if limit_s is None else limit_s + EXEC_MARGIN_S,
            )
            result = CommandResult.parse(await self._plane.exec(request))
        return result.check() if check else result

    async def start(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        tty: Tty | None = None,
        **options: Unpack[CommandOptions],
    ) -> AsyncCommand:
        """Start a command and return a handle to it; it goes on whatever happens to the connection.

        With ``tty`` it has a terminal (one stream ``tty``, and stdin); otherwise stdin is closed unless asked for.
        """
        wants_stdin = True if stdin or tty else None
        body = command_body(command, options, stdin=wants_stdin, tty=tty)
        path = f"/v1/sandboxes/{self.id}/commands"
        answer = await self.client.transport.call(Request(method="POST", path=path, body=body, headers=creating()))
        handle = AsyncCommand(self._plane, CommandInfo.parse(answer["command"]), _endpoint(answer.get("attach")))
        return await handle.connect()

    async def command(self, command_id: str, *, tail_bytes: int | None = None) -> AsyncCommand:
        """Return a handle to a command that was created before, here or in the sandbox that this one was forked from.

        Reading it begins with its first byte, or with the last ``tail_bytes`` that each stream has so far.
        """
        info = await self._command_info(command_id)
        if info.sandbox_id not in {None, self.id}:
            info = await self._inherited(command_id)
        offsets: dict[StreamName, int] = {}
        if tail_bytes is not None:
            offsets = {name: max(0, at - tail_bytes) for name, at in info.produced.items()}
        return AsyncCommand(self._plane, info, offsets=offsets)

    async def commands(self) -> AsyncIterator[CommandInfo]:
        """Yield the sandbox's commands, newest first."""
        async for item in pages(self.client.transport, f"/v1/sandboxes/{self.id}/commands", {}):
            yield CommandInfo.parse(item)

    async def _command_info(self, command_id: str) -> CommandInfo:
        return CommandInfo.parse(await self._plane.call(Request(method="GET", path=f"/v1/commands/{command_id}")))

    async def _inherited(self, command_id: str) -> CommandInfo:
        async for info in self.commands():
            if info.forked_from == command_id:
                return await self._command_info(info.id)
        raise NotFound(f"Command {command_id} is none of sandbox {self.id}.", code="command-not-found")

    # Branching

    async def fork(
        self, count: int = 1, *, keep: bool = False, wait_s: float | None = 300.0, **options: Unpack[ForkOptions]
    ) -> builtins.list[Self]:
        """Make ``count`` sandboxes that go on from this one's present state; return them once all run and are ready.

        This one goes on, too, or stays paused or suspended. Each fork is a machine of its own: what it writes, runs and
        remembers from then on concerns no other. ``keep`` and ``wait_s`` are as for `create`. Options: `ForkOptions`.
        """
        held_s = min(wait_s, HELD_S_MAX) if wait_s else None
        request = Request(
            method="POST",
            path=f"/v1/sandboxes/{self.id}/fork",
            body=fork_body(count, options),
            headers=creating(wait_s=held_s),
            read_s=READ_TIMEOUT_S + (held_s or 0),
        )
        deadline = time.monotonic() + (wait_s or 0)
        try:
            answer = await self.client.transport.call(request)
        except SpaceError as error:
            if "operation_id" in error.details and not keep:
                await self._remove_forks(request)
            raise
        infos = [SandboxInfo.parse(made) for made in answer["sandboxes"]]
        forks = [type(self)(self.client, info, keep=keep, owns_client=self._owns_client) for info in infos]
        if not wait_s:
            return forks
        try:
            await self.client.operations.wait(Operation.parse(answer["operation"]), timeout_s=wait_s)
            for fork in forks:
                await fork.wait_ready(timeout_s=deadline - time.monotonic())
        except BaseException:
            for fork in forks:
                if not keep:
                    await _remove(self.client, fork.id)
                await fork.close()
            raise
        return forks

    async def _remove_forks(self, request: Request) -> None:
        """Delete what a fork that has failed made nevertheless; the same key again tells what that is."""
        key = request.headers["idempotency-key"]
        with suppress(SpaceError):
            again = replace(request, headers={"idempotency-key": key})
            for made in (await self.client.transport.call(again))["sandboxes"]:
                await _remove(self.client, made["id"])

    async def snapshot(
        self, name: str | None = None, *, kind: SnapshotKind = "full", wait_s: float | None = 300.0
    ) -> Snapshot:
        """Keep the present state under a new id, to make sandboxes from with `create`; this one goes on.

        ``full`` keeps memory, processes and files, ``disk`` the files alone. Returns when it is kept, with ``wait_s``
        None as soon as the request is accepted.
        """
        return await self.client.snapshots.create(self.id, name=name, kind=kind, wait_s=wait_s)

    # Lifecycle

    async def pause(self, *, wait_s: float | None = 60.0) -> Operation:
        """Stop the machine's CPUs; memory stays.

        As all lifecycle calls it returns when done, with ``wait_s`` None as soon as the request is accepted.
        """
        return await self._change("pause", wait_s)

    async def resume(self, *, wait_s: float | None = 60.0) -> Operation:
        """Let a paused sandbox go on."""
        return await self._change("resume", wait_s)

    async def suspend(self, *, wait_s: float | None = 300.0) -> Operation:
        """Save memory and processes to disk and give the host's memory back."""
        return await self._change("suspend", wait_s)

    async def wake(self, *, wait_s: float | None = 300.0) -> Operation:
        """Make it run again, whether paused, suspended or stopped; nothing happens when it runs already."""
        return await self._change("wake", wait_s)

    async def stop(self, *, wait_s: float | None = 60.0) -> Operation:
        """End all processes; the disk is kept."""
        return await self._change("stop", wait_s)

    async def boot(self, *, wait_s: float | None = 120.0) -> Operation:
        """Start a stopped sandbox afresh on its disk (the API's ``start``; here `start` is for commands)."""
        return await self._change("start", wait_s)

    async def delete(self, *, wait_s: float | None = 60.0) -> Operation:
        """Delete the sandbox and everything of it, in whatever state it is."""
        return await self._lifecycle("DELETE", f"/v1/sandboxes/{self.id}", wait_s, refresh=False)

    async def refresh(self) -> SandboxInfo:
        """Ask the server for the present state."""
        self.info = await self.client.sandbox_info(self.id)
        return self.info

    async def wait_ready(self, *, timeout_s: float = 120.0) -> SandboxInfo:
        """Wait until it runs and its guest has answered.

        Raises what its present operation fails with, and ``OutcomeUnknown`` when ``timeout_s`` seconds were not enough.
        """
        deadline = time.monotonic() + timeout_s
        while not (self.state == "running" and self.info.ready):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise OutcomeUnknown(f"Sandbox {self.id} is not ready yet; it is {self.state}.", code="not-ready")
            if self.info.operation_id is not None and self.state != "running":
                await self.client.operations.wait(self.info.operation_id, timeout_s=left_s)
            await self.refresh()
            if self.state in RESTING:
                raise Conflict(
                    f"Sandbox {self.id} does not run; it is {self.state}.", code="wrong-state", state=self.state
                )
            if not self.info.ready:
                await sleep(POLL_S)
        return self.info

    async def update(self, **changes: Unpack[SandboxChanges]) -> SandboxInfo:
        """Change what is given. A new ``timeout_s`` counts from now. What there is: see `SandboxChanges`."""
        request = Request(method="PATCH", path=f"/v1/sandboxes/{self.id}", body=change_body(changes))
        answer = await self.client.transport.call(request)
        self.info = SandboxInfo.parse(answer.get("sandbox", answer))
        return self.info

    async def metrics(self) -> dict[str, Any]:
        """Return what the sandbox uses ``now`` (None when it has no machine) and a ``history`` of samples."""
        return await self.client.transport.call(Request(method="GET", path=f"/v1/sandboxes/{self.id}/metrics"))

    async def _change(self, verb: Verb, wait_s: float | None) -> Operation:
        return await self._lifecycle("POST", f"/v1/sandboxes/{self.id}/{verb}", wait_s)

    async def _lifecycle(self, method: str, path: str, wait_s: float | None, *, refresh: bool = True) -> Operation:
        held_s = min(wait_s, HELD_S_MAX) if wait_s else None
        headers = waiting(held_s) if held_s else {}
        request = Request(method=method, path=path, headers=headers, read_s=READ_TIMEOUT_S + (held_s or 0))
        answer = await self.client.transport.call(request)
        operation = Operation.parse(answer["operation"])
        self.info = SandboxInfo.parse(answer["sandbox"])
        if not wait_s:
            return operation
        in_time = operation.finished
        operation = await self.client.operations.wait(operation, timeout_s=wait_s)
        if not in_time and refresh:
            await self.refresh()
        return operation


async def _remove(client: AsyncClient, sandbox_id: str) -> None:
    """Delete what nobody will have a handle to; its failure must not hide why."""
    with suppress(SpaceError):
        await client.transport.call(Request(method="DELETE", path=f"/v1/sandboxes/{sandbox_id}"))


def _as_text(stdin: bytes | str | None) -> str | None:
    """Return stdin as text when it can travel in a request's JSON."""
    if isinstance(stdin, bytes) and len(stdin) <= STDIN_TEXT_BYTES_MAX:
        try:
            return stdin.decode()
        except UnicodeDecodeError:
            return None
    return stdin if isinstance(stdin, str) and len(stdin) <= STDIN_TEXT_BYTES_MAX else None


def _endpoint(attach: dict[str, Any] | None) -> Endpoint | None:
    """Return the data plane that an ``attach`` ``{url, token}`` points at."""
    if not attach:
        return None
    parts = urlsplit(attach["url"])
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return Endpoint(f"{scheme}://{parts.netloc}", attach["token"])
