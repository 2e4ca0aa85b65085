"""Servers for tests of ports: what a program in a sandbox might be, well-behaved or not."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import ServerConnection, serve

MIB = 1024 * 1024
BLOCK = bytes(range(256)) * 256


class _Echo(http.server.BaseHTTPRequestHandler):
    """Says what it was asked. ``/large?MIB`` streams, ``/sink`` counts what it is sent, ``/events`` are one by one."""

    protocol_version = "HTTP/1.1"
    server: "EchoServer"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/large":
            count = int(query) * MIB
            self.send_response(200)
            self.send_header("content-length", str(count))
            self.end_headers()
            for _ in range(count // len(BLOCK)):
                self.wfile.write(BLOCK)
        elif path == "/events":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for number in range(3):
                self.server.may_send.acquire()
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
            self.close_connection = True
        elif path == "/cookies":
            self.send_response(200)
            for value in ("a=1; Domain=sandboxes.localhost; Path=/", "b=2; HttpOnly", "space_preview=mine"):
                self.send_header("set-cookie", value)
            self.send_header("content-length", "0")
            self.end_headers()
        else:
            self._say()

    def do_POST(self) -> None:
        self._say()

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815 - as http.server wants them

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "12345")
        self.end_headers()

    def _say(self) -> None:
        count, first = 0, b""
        for chunk in self._body():
            count, first = count + len(chunk), (first + chunk)[:64]
        said = {
            "method": self.command,
            "path": self.path,
            "headers": [[name.lower(), value] for name, value in self.headers.items()],
            "count": count,
            "body": first.decode("latin-1"),
        }
        body = json.dumps(said).encode()
        self.send_response(201 if self.command == "POST" else 200)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-powered-by", "tests")
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("content-length") or 0)
        while left:
            chunk = self.rfile.read(min(left, len(BLOCK)))
            left -= len(chunk)
            yield chunk

    def log_message(self, *_: object) -> None:
        """Nothing is said of it."""


class EchoServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.may_send = threading.Semaphore(0)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Echo)

    def handle_error(self, *_: object) -> None:
        """Clients that go away are part of the tests."""


@contextmanager
def echo_server(address: str = "127.0.0.1", port: int = 0) -> Iterator[EchoServer]:
    server = EchoServer((address, port))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def raw_server(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen on a port and let ``handle`` have each connection, which is closed afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                handle(connection)

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def read_head(connection: socket.socket) -> bytes:
    """Read a request's head, byte by byte so that nothing behind it is taken."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return head
        head += byte
    return head


@contextmanager
def websocket_server(handle: Callable[[ServerConnection], None], **options: Any) -> Iterator[int]:
    with serve(handle, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()
