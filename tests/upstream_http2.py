"""An HTTP/2 server for tests: answers what the HTTP/1.1 one answers, and sends trailers as gRPC does."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

if TYPE_CHECKING:
    from tests.upstreams import Servers


async def serve_http2(
    servers: Servers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: str
) -> None:
    """Serve one connection until it ends."""
    await _Connection(servers, reader, writer, server).serve()


class _Connection:
    def __init__(
        self, servers: Servers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: str
    ) -> None:
        self._servers, self._reader, self._writer, self._server = servers, reader, writer, server
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._requests: dict[int, tuple[list[tuple[str, str]], bytearray]] = {}
        self._unsent: dict[int, bytes] = {}
        self._sizes: dict[int, int] = defaultdict(int)
        self._windows: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def serve(self) -> None:
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        self._h2.increment_flow_control_window(1 << 23)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._writer.write(self._h2.data_to_send())
                data = await self._reader.read(1 << 18)
                if not data:
                    return
                try:
                    events = self._h2.receive_data(data)
                except h2.exceptions.ProtocolError:
                    return
                for event in events:
                    self._heed(event, tasks)

    def _heed(self, event: h2.events.Event, tasks: asyncio.TaskGroup) -> None:
        match event:
            case h2.events.RequestReceived():
                self._requests[event.stream_id] = (list(event.headers), bytearray())
            case h2.events.DataReceived():
                headers, body = self._requests[event.stream_id]
                if dict(headers)[":path"] == "/sink":  # of any size
                    self._sizes[event.stream_id] += len(event.data)
                else:
                    body.extend(event.data)
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                tasks.create_task(self._answer(event.stream_id))
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for window in self._windows.values():
                    window.set()
            case _:
                pass

    async def _answer(self, stream: int) -> None:
        from tests.upstreams import file_page, git_page, respond

        headers, body = self._requests.pop(stream)
        pseudo = {name: value for name, value in headers if name.startswith(":")}
        plain = [(name, value) for name, value in headers if not name.startswith(":")]
        method, target = pseudo[":method"], pseudo[":path"]
        self._servers.note(
            "http",
            server=self._server,
            tls=True,
            version="2",
            method=method,
            target=target,
            headers=[("host", pseudo[":authority"]), *plain],
        )
        path, _, query = target.partition("?")
        if path == "/bytes":
            self._h2.send_headers(stream, [(":status", "200")])
            left = int(query.removeprefix("n="))
            while left:
                part = min(left, 1 << 20)
                await self._send(stream, bytes(part))
                left -= part
            self._h2.end_stream(stream)
        elif path == "/grpc":
            self._h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            await self._send(stream, bytes(body))
            self._h2.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        elif path == "/events":
            self._h2.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")])
            for _ in range(int(query.removeprefix("n="))):
                await self._send(stream, f"data: {time.time():.6f}\n\n".encode())
                await asyncio.sleep(0.5)
            self._h2.end_stream(stream)
        elif path == "/sink":
            self._h2.send_headers(stream, [(":status", "200")])
            await self._send(stream, str(self._sizes.pop(stream, 0)).encode())
            self._h2.end_stream(stream)
        elif path == "/silent":
            return
        else:
            directory, fields = self._servers.directory, dict(plain)
            if path.startswith("/git/"):
                status, more, content = await git_page(directory / "git", fields, method, path, query, bytes(body))
            elif path.startswith("/www/"):
                status, more, content = file_page(directory / "www", path)
            else:
                status, more, content = respond(method, target, plain, bytes(body))
            sent = [(":status", str(status)), *more.items(), ("content-length", str(len(content)))]
            self._h2.send_headers(stream, sent)
            await self._send(stream, content)
            self._h2.end_stream(stream)
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _send(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            size = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size, len(view))
            if size <= 0:
                self._windows[stream].clear()
                await self._windows[stream].wait()
                continue
            self._h2.send_data(stream, bytes(view[:size]))
            view = view[size:]
            self._writer.write(self._h2.data_to_send())
            await self._writer.drain()
