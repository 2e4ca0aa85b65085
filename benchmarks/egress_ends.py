"""The two ends of a measurement of the gateway: a server outside, and a client where a sandbox is.

    python -m benchmarks.egress_ends serve PORT CERTIFICATE KEY ADDRESS
    python -m benchmarks.egress_ends WHAT ADDRESS PORT NAME CA [NUMBER]

Both speak as little HTTP as will do, so that what is measured is what lies between them. Results are JSON on stdout.
"""

import asyncio
import json
import re
import ssl
import sys
import time

import uvloop

CHUNK = bytes(1 << 20)
PAUSE_S = 0.002
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """``GET /N`` is answered with N bytes, ``POST`` with two once all is there."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await _skip(reader, _length(head))
                size = 2
            else:
                size = int(head.split(b" ", 2)[1][1:])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            while size:
                part = min(size, len(CHUNK))
                writer.write(CHUNK if part == len(CHUNK) else CHUNK[:part])
                size -= part
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(port: str, certificate: str, key: str, address: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = await asyncio.start_server(_answer, address, int(port), ssl=context, backlog=2048, limit=1 << 20)
    print("ready", flush=True)
    await server.serve_forever()


class Client:
    """Connections to one name at one address."""

    def __init__(self, address: str, port: str, name: str, ca: str) -> None:
        self._address, self._port, self._name = address, int(port), name
        self._tls = ssl.create_default_context(cafile=ca)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self._address, self._port, ssl=self._tls, server_hostname=self._name, limit=1 << 20
        )

    async def get(self, ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], size: int) -> None:
        reader, writer = ends
        writer.write(f"GET /{size} HTTP/1.1\r\nHost: {self._name}:{self._port}\r\n\r\n".encode())
        await self._read(reader)

    async def post(self, ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], size: int) -> None:
        reader, writer = ends
        head = f"POST / HTTP/1.1\r\nHost: {self._name}:{self._port}\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode())
        while size:
            part = min(size, len(CHUNK))
            writer.write(CHUNK[:part])
            size -= part
            await writer.drain()
        await self._read(reader)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(head[:100])
        await _skip(reader, _length(head))


async def latency(client: Client, count: int) -> list[float]:
    """Return the milliseconds of each of so many requests, one after the other on one connection."""
    ends = await client.connect()
    await client.get(ends, 2)
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await client.get(ends, 2)
        took.append((time.perf_counter() - began) * 1e3)
    return took


async def download(client: Client, size: int) -> list[float]:
    """Return megabytes a second."""
    ends = await client.connect()
    began = time.perf_counter()
    await client.get(ends, size)
    return [size / 1e6 / (time.perf_counter() - began)]


async def upload(client: Client, size: int) -> list[float]:
    ends = await client.connect()
    began = time.perf_counter()
    await client.post(ends, size)
    return [size / 1e6 / (time.perf_counter() - began)]


async def many(client: Client, count: int) -> list[float]:
    """Return how many of so many connections, all open at once, got ten answers each, and the seconds that took."""
    began = time.perf_counter()
    opened = await asyncio.gather(*(client.connect() for _ in range(count)), return_exceptions=True)
    ends = [one for one in opened if not isinstance(one, BaseException)]

    async def ten(one: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        for _ in range(10):
            await client.get(one, 2)

    done = await asyncio.gather(*map(ten, ends), return_exceptions=True)
    good = sum(not isinstance(one, BaseException) for one in done)
    return [float(good), time.perf_counter() - began]


async def flood(client: Client, count: int) -> list[float]:
    """Ask as fast as it goes on so many connections, until killed."""
    ends = await asyncio.gather(*(client.connect() for _ in range(count)))
    print("ready", flush=True)

    async def ask(one: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        while True:
            await client.get(one, 2)

    await asyncio.gather(*map(ask, ends))
    return []


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        data = await reader.read(min(size, 1 << 20))
        if not data:
            raise ConnectionError("cut off")
        size -= len(data)


def _length(head: bytes) -> int:
    found = _LENGTH.search(head)
    return int(found[1]) if found else 0


ACTIONS = {"latency": latency, "download": download, "upload": upload, "many": many, "flood": flood}


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "serve":
        uvloop.run(serve(*words))
        return
    address, port, name, ca, number = words
    print(json.dumps(uvloop.run(ACTIONS[what](Client(address, port, name, ca), int(number)))))


if __name__ == "__main__":
    main()
