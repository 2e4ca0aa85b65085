"""A command as a handle: live output, stdin, signals. Connections come and go underneath it."""

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import httpx

from space.errors import HostError, Unavailable
from space.sdk._async.dataplane import AsyncDataPlane
from space.sdk._async.stream import AsyncCommandStream
from space.sdk._async.transport import lost
from space.sdk.attach import Attachment, resize_frame
from space.sdk.backends.asyncio import sleep
from space.sdk.requests import Endpoint, Patience, Request
from space.sdk.types import CommandInfo, CommandResult, Exit, Gap, Output, StreamName

COLLECT_BYTES_MAX = 64 * 1024 * 1024


class AsyncCommand:
    """A program in a sandbox, running or ended. Get one from ``sandbox.start(...)`` or ``sandbox.command(id)``.

    Iterating yields `Output` and `Gap` as they come and ends when the command has ended and all its output was seen;
    ``exit`` is set then. A lost connection is made again by itself, and no byte is missed or seen twice. Nothing is
    dropped while nobody reads: the program waits once the buffers on the way are full. Detaching leaves the
    command running.
    """

    def __init__(
        self,
        plane: AsyncDataPlane,
        info: CommandInfo,
        offered: Endpoint | None = None,
        offsets: Mapping[StreamName, int] | None = None,
    ) -> None:
        self.info = info
        self._plane = plane
        self._attachment = Attachment(offsets)
        self._stream = AsyncCommandStream(plane, info.id, self._attachment, offered)
        self.stdin = AsyncStdin(self._stream, self._attachment)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.exit or self.info.state}>"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def exit(self) -> Exit | None:
        """How the command ended, once this handle has seen it."""
        return self._attachment.exit or self.info.exit

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.detach()

    async def __aiter__(self) -> AsyncIterator[Output | Gap]:
        while (event := await self._stream.next_event()) is not None:
            yield event

    async def next_event(self, timeout_s: float | None = None) -> Output | Gap | None:
        """Return the next output or gap, None at the end. Raises ``TimeoutError`` after ``timeout_s`` seconds."""
        return await self._stream.next_event(timeout_s)

    async def connect(self) -> Self:
        """Attach now instead of with the first read. The first attach of a command starts it."""
        await self._stream.connect()
        return self

    async def wait(self) -> Exit:
        """Wait for the end and return how it ended. Output that comes meanwhile is passed over (`replay` has it)."""
        while await self._stream.next_event() is not None:
            pass
        return self._ended()

    async def result(self) -> CommandResult:
        """Wait for the end; return it with all output that was not read yet (of each stream up to 64 MiB)."""
        return await self.communicate(None)

    async def communicate(self, data: bytes | str | None = b"") -> CommandResult:
        """Write ``data`` to stdin and close it, read all output meanwhile, and return the result.

        With None stdin is left as it is.
        """
        collected = _Collected()
        if data is not None:
            rest = data.encode() if isinstance(data, str) else data
            await self._stream.connect()
            while rest and self.exit is None:
                room = self._attachment.stdin_room
                if room:
                    await self._stream.write(rest[:room])
                    rest = rest[room:]
                elif (event := await self._stream.next_event_or_room()) is not None:
                    collected.take(event)
            if self.exit is None:
                await self._stream.close_stdin()
        while (event := await self._stream.next_event()) is not None:
            collected.take(event)
        return collected.result(self._ended(), self._attachment.duration_s)

    async def signal(self, signal: str | int) -> None:
        """Send a signal (``"TERM"``, ``15``) to everything the command started."""
        body = {"signal": signal}
        await self._plane.call(Request(method="POST", path=f"/v1/commands/{self.id}/signal", body=body))

    async def kill(self) -> None:
        """End everything the command started, at once."""
        await self.signal("KILL")

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of the command's terminal."""
        await self._stream.send_control(resize_frame(rows, cols))

    async def refresh(self) -> CommandInfo:
        """Ask the server for the present state."""
        answer = await self._plane.call(Request(method="GET", path=f"/v1/commands/{self.id}"))
        self.info = CommandInfo.parse(answer)
        return self.info

    async def replay(self, *, follow: bool = False) -> AsyncIterator[Output | Gap]:
        """Yield the kept output from its beginning without attaching (a command that never ran stays so).

        Ends with what there is now; with ``follow`` it ends with the command.
        """
        attachment, patience = Attachment(), Patience()
        while attachment.exit is None:
            try:
                async for event in self._replay(attachment, follow=follow):
                    patience.worked()
                    yield event
                if not follow:
                    break
                if attachment.exit is None:
                    patience.failed("the output ended without an exit record")
            except Unavailable as error:
                if not follow:
                    raise
                patience.failed(str(error))
            if attachment.exit is None:
                await sleep(patience.delay_s)
        if attachment.exit is not None:
            self._attachment.exit = attachment.exit

    async def _replay(self, attachment: Attachment, *, follow: bool) -> AsyncIterator[Output | Gap]:
        response = await self._plane.start(self._output_request(attachment, follow=follow))
        try:
            async for line in response.aiter_lines():
                event = attachment.receive(line) if line else None
                if event is not None:
                    yield event
        except httpx.TransportError as error:
            raise lost(self._output_request(attachment, follow=follow), error) from error
        finally:
            await response.aclose()

    def _output_request(self, attachment: Attachment, *, follow: bool) -> Request:
        params = {**attachment.query(), **({"follow": "true"} if follow else {})}
        headers = {"accept": "application/x-ndjson"}
        path = f"/v1/commands/{self.id}/output"
        return Request(method="GET", path=path, params=params, headers=headers, read_s=None if follow else 60.0)

    async def detach(self) -> None:
        """Let go of the connection; the command goes on, and reading again attaches again."""
        await self._stream.close()

    def _ended(self) -> Exit:
        if self._attachment.exit is None:
            raise HostError("The command's output ended without an exit record.", code="protocol")
        return self._attachment.exit


class AsyncStdin:
    """A command's standard input. Open only for commands started with ``stdin=True`` or a terminal."""

    def __init__(self, stream: AsyncCommandStream, attachment: Attachment) -> None:
        self._stream = stream
        self._attachment = attachment

    @property
    def closed(self) -> bool:
        return self._attachment.stdin_closed

    async def write(self, data: bytes | str) -> None:
        """Write; waits while the program is 1 MiB behind. Raises ``InvalidRequest`` after `close` or the end."""
        await self._stream.write(data.encode() if isinstance(data, str) else data)

    async def close(self) -> None:
        """Let the program see the end of its input."""
        await self._stream.close_stdin()


class _Collected:
    """Output put together, within a limit."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._truncated = False

    def take(self, event: Output | Gap) -> None:
        if isinstance(event, Gap):
            self._truncated = True
            return
        name = "stderr" if event.stream == "stderr" else "stdout"
        room = COLLECT_BYTES_MAX - self._sizes[name]
        if len(event.data) > room:
            self._truncated = True
        self._parts[name].append(event.data[:room])
        self._sizes[name] += len(event.data[:room])

    def result(self, ended: Exit, duration_s: float | None) -> CommandResult:
        return CommandResult(
            exit=ended,
            stdout_bytes=b"".join(self._parts["stdout"]),
            stderr_bytes=b"".join(self._parts["stderr"]),
            truncated=self._truncated,
            duration_s=duration_s,
        )
