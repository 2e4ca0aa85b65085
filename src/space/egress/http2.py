"""The machinery of HTTP/2 that both sides of the gateway share: streams with credit, on one connection, through h2.

A stream's bytes are acknowledged once they were passed on, so what is held of each is at most its window.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

from space.egress.frames import FRAME_BYTES_MAX, Frames
from space.egress.holding import note
from space.egress.messages import HEAD_BYTES_MAX, Headers
from space.egress.wire import STALLED_S, Wire

STREAMS_MAX = 128
STREAM_WINDOW = 1024 * 1024
CONNECTION_WINDOW = 8 * 1024 * 1024
HEADER_TABLE_BYTES = 4096
IDLE_S = 300.0
UNSENT_BYTES_MAX = 4 * 1024 * 1024
RESETS_MAX, RESETS_PER_S = 200, 20.0
"""How many streams may be given up at once, and how fast that is forgiven (CVE-2023-44487)."""
TOGETHER_BYTES_MAX = 16 * 1024
"""Frames of a byte each are held as one piece of so many: by themselves each would take a hundred times its size."""

Step = Callable[[], Awaitable[None]]
"""Waits for the sandbox's turn."""


def _body_repr(frame: hyperframe.frame.DataFrame) -> str:
    return f"{len(frame.data)} bytes"


# h2 writes down every frame that comes, in hexadecimal, for a log that nobody keeps: a third of the time of a download.
hyperframe.frame.DataFrame._body_repr = _body_repr  # type: ignore[method-assign]  # noqa: SLF001


class StreamReset(ConnectionError):
    """The other end gave up the stream, or the connection is gone."""


class Stream:
    """One stream: what has come on it. ``take`` it in order; ``headers`` are there first."""

    def __init__(self, connection: Http2, number: int) -> None:
        self._connection = connection
        self.number = number
        self.headers: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()
        self.trailers: Headers = []
        self.ended = False
        self.reset: str | None = None
        self._chunks: deque[tuple[bytes | bytearray, int]] = deque()
        self._taken = 0
        self._arrival: asyncio.Future[None] | None = None

    async def take(self) -> bytes:
        """Return the next bytes; ``b""`` at the end. Raises ``StreamReset``.

        Those before count as taken by now, and the other end may send as many again: not sooner, so that what is on its
        way through here is within the connection's window, however many streams it has.
        """
        taken, self._taken = self._taken, 0
        await self._connection.acknowledge(self.number, taken)
        while not self._chunks:
            if self.ended:
                return b""  # whole, even if the other end has given up the other direction
            if self.reset is not None:
                raise StreamReset(self.reset)
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        data, self._taken = self._chunks.popleft()
        return bytes(data)

    # --- for the connection

    def put(self, data: bytes, credit: int) -> None:
        if not credit:
            return  # nothing, and no credit bounds how often that is sent
        last, before = self._chunks[-1] if self._chunks else (b"", 0)
        if last and len(last) + len(data) <= TOGETHER_BYTES_MAX:
            together = last if isinstance(last, bytearray) else bytearray(last)
            together += data
            self._chunks[-1] = together, before + credit
        else:
            self._chunks.append((data, credit))
        self.wake()

    def settle(self) -> int:
        """Drop what has come, and return how many bytes of it the other end does not know to be taken."""
        unread, self._taken = self.unread, 0
        self._chunks.clear()
        return unread

    def end(self) -> None:
        self.ended = True
        self.wake()

    def break_off(self, why: str) -> None:
        self.reset = self.reset or why
        if not self.headers.done():
            self.headers.set_exception(StreamReset(why))
            self.headers.exception()  # retrieved: nobody may be waiting
        self.wake()

    def wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    @property
    def unread(self) -> int:
        """How many bytes of what has come the other end does not know to be taken."""
        return self._taken + sum(credit for _, credit in self._chunks)


class Http2:
    """One connection. ``run`` it until it ends; ``opened`` is called for each stream that the other end opens.

    Before the next ones of many frames ``step`` is waited for.
    """

    def __init__(
        self,
        wire: Wire,
        step: Step,
        *,
        client: bool,
        opened: Callable[[Stream], None] | None = None,
    ) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        self._wire = wire
        self._step = step
        self._opened = opened
        self._streams: dict[int, Stream] = {}
        self._credit: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._frames = Frames(preface=not client)
        self._resets, self._reset_at = 0.0, time.monotonic()
        self.ended = False
        self.idle_since = time.monotonic()
        note(self)
        self.refuses = False
        """The other end opens and takes no more streams."""

    @property
    def held(self) -> int:
        """How many bytes that have come on streams wait here for somebody to take them."""
        return sum(stream.unread for stream in self._streams.values())

    @property
    def streams(self) -> int:
        return len(self._streams)

    async def begin(self) -> None:
        """Say what this end wants of the other."""
        self._h2.local_settings = h2.settings.Settings(
            client=self._h2.config.client_side,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
            },
        )
        self._h2.max_inbound_frame_size = FRAME_BYTES_MAX  # h2 takes over only what changes later
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW)
        await self.flush()

    async def run(self) -> None:
        """Read until the connection ends. Never raises but for cancellation."""
        try:
            while not self.ended and (data := await self._receive()):
                begin = 0
                for end in self._frames.follow(data):
                    await self._take_in(data[begin:end])
                    begin = end
                    await self._step()
                await self._take_in(data[begin:])
        except h2.exceptions.ProtocolError:
            await self._say_last()
        except ConnectionError:
            pass
        finally:
            self.ended = True
            for stream in list(self._streams.values()):
                stream.break_off("the connection ended")
            self._streams.clear()
            self._more_credit()

    async def open(self, headers: Headers, *, end: bool) -> Stream:
        """Open a stream with these headers."""
        if self.ended or self.refuses:
            raise StreamReset("the connection takes no more streams")
        number = 0
        try:
            number = self._h2.get_next_available_stream_id()
            stream = self._streams[number] = Stream(self, number)
            self._h2.send_headers(number, headers, end_stream=end)
        except h2.exceptions.H2Error as error:
            self._streams.pop(number, None)
            raise StreamReset(str(error)) from error
        await self.flush()
        return stream

    async def send_headers(self, stream: Stream, headers: Headers, *, end: bool) -> None:
        self._attempt(lambda: self._h2.send_headers(stream.number, headers, end_stream=end))
        await self.flush()

    async def send(self, stream: Stream, data: bytes) -> None:
        """Send a body's bytes as the other end has room for them. Raises ``StreamReset`` where it long has none."""
        view, waiting_since = memoryview(data), None
        while view:
            async with self._sending:  # else each stream would have a frame waiting, where nobody reads
                await self._wire.drain()
                if stream.reset is not None or self.ended:
                    raise StreamReset(stream.reset or "the connection ended")
                size = min(self._window(stream.number), self._h2.max_outbound_frame_size, len(view))
                if size > 0:
                    part = bytes(view[:size])
                    self._attempt(lambda part=part: self._h2.send_data(stream.number, part))
                    view, waiting_since = view[size:], None
                    await self.flush()
            if size <= 0:
                waiting_since = waiting_since or time.monotonic()
                await self._wait_credit(waiting_since + STALLED_S)

    async def send_end(self, stream: Stream) -> None:
        self._attempt(lambda: self._h2.end_stream(stream.number))
        await self.flush()

    async def reset(self, stream: Stream, code: h2.errors.ErrorCodes = h2.errors.ErrorCodes.CANCEL) -> None:
        """Give up a stream; nothing when it is over already."""
        self._streams.pop(stream.number, None)
        try:
            self._h2.reset_stream(stream.number, code)
            await self.acknowledge(stream.number, stream.settle())
            await self.flush()
        except (h2.exceptions.H2Error, ConnectionError):
            return

    def forget(self, stream: Stream) -> None:
        """The stream is over on both sides."""
        self._streams.pop(stream.number, None)
        self.idle_since = time.monotonic()

    async def acknowledge(self, number: int, credit: int) -> None:
        """Give the other end back the credit of bytes that were taken; that of the connection even if the stream is
        over.
        """
        if not credit or self.ended:
            return
        try:
            self._h2.acknowledge_received_data(credit, number)
        except h2.exceptions.H2Error:
            return
        await self.flush()

    async def go_away(self, code: h2.errors.ErrorCodes = h2.errors.ErrorCodes.NO_ERROR) -> None:
        """Say that this is the end of the connection, and close it."""
        self.ended = True
        try:
            self._h2.close_connection(code)
            await self._say_last()
        except h2.exceptions.H2Error:
            self._wire.abort()

    async def flush(self) -> None:
        """Send what h2 wants to send, in its order, and wait for room."""
        data = self._h2.data_to_send()
        if data:
            await self._wire.send(data)

    # --- private

    async def _take_in(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            self._heed(event)
        # Without waiting for room: an end that waits for the other to read, and reads nothing meanwhile, may wait for
        # ever. What is written here is small, but for answers to a flood of pings.
        self._wire.write(self._h2.data_to_send())
        if self._wire.unsent > UNSENT_BYTES_MAX:
            await self._wire.drain()

    async def _receive(self) -> bytes:
        """Return the next bytes; ``b""`` when the connection ends, or nothing happens on it for too long."""
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    return await self._wire.receive()
            except TimeoutError:
                if not self._streams:
                    await self.go_away()
                    return b""

    def _heed(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived() | h2.events.ResponseReceived():
                self._heed_headers(event)
            case h2.events.DataReceived() | h2.events.TrailersReceived() | h2.events.StreamEnded():
                self._heed_stream(event)
            case h2.events.StreamReset():
                self._heed_reset(event.stream_id)
            case h2.events.RemoteSettingsChanged():
                # What the other end would remember of headers, this end has to remember, too.
                self._h2.encoder.header_table_size = min(self._h2.encoder.header_table_size, HEADER_TABLE_BYTES)
                self._more_credit()
            case h2.events.WindowUpdated():
                self._more_credit()
            case h2.events.ConnectionTerminated():
                self.refuses = True
                self.ended = self.ended or bool(event.error_code)
            case _:
                pass

    def _heed_stream(self, event: h2.events.DataReceived | h2.events.TrailersReceived | h2.events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        match event:
            case h2.events.DataReceived() if stream is not None:
                stream.put(event.data, event.flow_controlled_length)
            case h2.events.DataReceived():
                if event.flow_controlled_length:  # of a stream that was given up
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.TrailersReceived() if stream is not None:
                stream.trailers = [(bytes(name), bytes(value)) for name, value in event.headers]
            case h2.events.StreamEnded() if stream is not None:
                stream.end()
            case _:
                pass

    def _heed_headers(self, event: h2.events.RequestReceived | h2.events.ResponseReceived) -> None:
        headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        if isinstance(event, h2.events.ResponseReceived):
            if (stream := self._streams.get(event.stream_id)) is not None and not stream.headers.done():
                stream.headers.set_result(headers)
            return
        stream = self._streams[event.stream_id] = Stream(self, event.stream_id)
        stream.headers.set_result(headers)
        stream.ended = event.stream_ended is not None
        if self._opened is not None:
            self._opened(stream)

    def _heed_reset(self, number: int) -> None:
        now = time.monotonic()
        self._resets = max(0.0, self._resets - (now - self._reset_at) * RESETS_PER_S) + 1
        self._reset_at = now
        if self._resets > RESETS_MAX:
            raise h2.exceptions.ProtocolError("too many streams were given up")
        stream = self._streams.pop(number, None)
        if stream is not None:
            if not stream.ended and (unread := stream.settle()):
                self._h2.acknowledge_received_data(unread, number)
            stream.break_off("given up by the other end")
        self._more_credit()

    def _window(self, number: int) -> int:
        try:
            return self._h2.local_flow_control_window(number)
        except h2.exceptions.H2Error as error:
            raise StreamReset(str(error)) from error

    async def _wait_credit(self, until: float) -> None:
        if self._credit is None:
            self._credit = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await asyncio.shield(self._credit)
        except TimeoutError:
            raise StreamReset("the other end takes nothing") from None

    def _more_credit(self) -> None:
        if self._credit is not None and not self._credit.done():
            self._credit.set_result(None)
        self._credit = None

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except h2.exceptions.H2Error as error:
            raise StreamReset(str(error)) from error

    async def _say_last(self) -> None:
        try:
            async with asyncio.timeout(1):
                await self.flush()
        except (TimeoutError, ConnectionError):
            pass
        await self._wire.close()
