"""HTTP/2 from a guest, frame by frame: also what no library would send (RFC 9113)."""

from __future__ import annotations

import ssl
import struct
from collections import defaultdict
from typing import Self

import hpack

from tests.guest import Answer, Closed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
HeaderList = list[tuple[str, str]]


class Reset(ConnectionError):
    """The stream was given up."""


class Http2Talk:
    """One connection."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        assert sock.selected_alpn_protocol() == "h2"
        self.sock = sock
        self._buffer = b""
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._next = 1
        self._headers: dict[int, list[HeaderList]] = defaultdict(list)
        self._bodies: dict[int, bytes] = defaultdict(bytes)
        self._ended: set[int] = set()
        self._reset: dict[int, int] = {}
        self.gone: int | None = None
        """The code with which the other end said goodbye."""
        self.frames = 0
        sock.sendall(PREFACE)
        self.frame(SETTINGS, 0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.sock.sendall(frame(kind, flags, stream, payload))

    def encoded(self, headers: HeaderList) -> bytes:
        return self._encoder.encode(headers)

    def number(self) -> int:
        """Return the number of the next stream."""
        self._next += 2
        return self._next - 2

    def open(self, headers: HeaderList, *, end: bool = True) -> int:
        """Send headers on a new stream."""
        stream = self.number()
        self.frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, self.encoded(headers))
        return stream

    def get(self, host: str, path: str = "/hello", *headers: tuple[str, str], method: str = "GET") -> Answer:
        return self.answer(self.open([*pseudo(host, path, method), *headers]))

    def answer(self, stream: int) -> Answer:
        """Return the answer on a stream; raise ``Reset``, or ``Closed`` when the connection ends."""
        while stream not in self._ended:
            if stream in self._reset:
                raise Reset(f"stream {stream} with code {self._reset[stream]}")
            self.heed()
        headers = dict(self._headers[stream][0])
        kept = [(name, value) for name, value in headers.items() if name != ":status"]
        trailers = [pair for more in self._headers[stream][1:] for pair in more]
        return Answer(int(headers[":status"]), kept, self._bodies[stream], trailers=trailers)

    def began(self, stream: int) -> int:
        """Return the status of an answer that need not be complete."""
        while not self._headers[stream]:
            if stream in self._reset:
                raise Reset(f"stream {stream}")
            self.heed()
        return int(dict(self._headers[stream][0])[":status"])

    def ping(self) -> None:
        """Wait until all that was sent before has been read; raise ``Closed`` when it was too much."""
        self.frame(PING, 0, 0, b"question")
        while self.heed() != (PING, b"question"):
            pass

    def until_closed(self) -> int | None:
        """Read to the end and return the code of the goodbye."""
        try:
            while True:
                self.heed()
        except Closed:
            return self.gone

    def heed(self) -> tuple[int, bytes]:
        """Take one frame."""
        head = self._take(9)
        size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        stream, payload = int.from_bytes(head[5:9]) & 0x7FFFFFFF, self._take(size)
        self.frames += 1
        if kind == HEADERS:
            self._headers[stream].append([(str(name), str(value)) for name, value in self._decoder.decode(payload)])
        elif kind == DATA:
            self._bodies[stream] += payload
            if size:
                self.frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", size))
                if not flags & END_STREAM:
                    self.frame(WINDOW_UPDATE, 0, stream, struct.pack("!I", size))
        elif kind == SETTINGS and not flags & ACK:
            self.frame(SETTINGS, ACK, 0)
        elif kind == RST_STREAM:
            self._reset[stream] = int.from_bytes(payload)
        elif kind == GOAWAY:
            self.gone = int.from_bytes(payload[4:8])
        if kind in {HEADERS, DATA} and flags & END_STREAM:
            self._ended.add(stream)
        return kind, payload

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                data = self.sock.recv(1 << 16)
            except (ConnectionResetError, ssl.SSLEOFError) as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed("end")
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def pseudo(host: str, path: str = "/hello", method: str = "GET", scheme: str = "https") -> HeaderList:
    return [(":method", method), (":scheme", scheme), (":authority", host), (":path", path)]
