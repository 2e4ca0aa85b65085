"""Servers outside, in a network namespace of their own: name server, HTTP in its versions, and a log of all they saw.

``outside()`` makes the namespace with addresses from the ranges for documentation (RFC 5737, RFC 3849), its certificate
authority and the process that serves. As a program, this module is that process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import functools
import gzip
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import h11

from tests.images import Certificates

HOST_V4, HOST_V6 = "198.51.100.1", "2001:db8:5::1"
NAME_SERVER = "198.51.100.53"
GOOD, GOOD_V6 = "198.51.100.10", "2001:db8:5::10"
PLAIN = "plain.wild.example"
"""Under this name there is no HTTP/2."""
EVIL, EVIL_V6 = "198.51.100.66", "2001:db8:5::66"
NETWORKS = tuple(f"{one}/32" for one in (GOOD, EVIL)) + tuple(f"{one}/128" for one in (GOOD_V6, EVIL_V6))
"""What the operator allows, as no address for documentation is public."""
OWN = "192.31.196.1"
"""An address of the host for the time of the tests that counts as public: of a service that many run, for nobody."""
DATAGRAM_PORTS = (9, 123, 443)
READY_S, FREE_S = 15.0, 600.0
HUGE = {"value": b"X: " + b"a" * 600_000 + b"\r\n", "many": b"X: y\r\n" * 120_000}
ZONE: dict[str, dict[str, list[str]]] = {
    "good.example": {"A": [GOOD]},
    "other.example": {"A": [GOOD]},  # the same server as good.example: one address, two names
    "both.example": {"A": [GOOD], "AAAA": [GOOD_V6]},
    "six.example": {"AAAA": [GOOD_V6]},
    "evil.example": {"A": [EVIL]},
    "evil-six.example": {"AAAA": [EVIL_V6]},
    "untrusted.example": {"A": [GOOD]},
    "metadata.example": {"A": ["169.254.169.254"]},
    "loopback.example": {"A": ["127.0.0.1"], "AAAA": ["::1"]},
    "zero.example": {"A": ["0.0.0.0"]},
    "private.example": {"A": ["10.1.2.3"], "AAAA": ["fd00::1"]},
    "shared.example": {"A": ["100.100.100.200"]},
    "mapped.example": {"AAAA": ["::ffff:127.0.0.1"]},
    "nat64.example": {"AAAA": ["64:ff9b::7f00:1"]},
    "multicast.example": {"A": ["224.0.0.1"]},
    "mixed.example": {"A": ["127.0.0.1", GOOD]},
    "link-local.example": {"AAAA": ["fe80::1"]},
    "six-to-four.example": {"AAAA": ["2002:7f00:1::1"]},
    "own.example": {"A": [OWN]},
    "xn--mnchen-3ya.example": {"A": [GOOD]},
}
"""What the name server knows.

Besides: below ``mute.example`` it neither answers nor notes; below ``wild.example`` every name is good; below ``rebind.example`` each is at first good and then 127.0.0.1;
``wrong-name.example`` is good, and the server there has no certificate for it.
"""

Page = tuple[int, dict[str, str], bytes]


@dataclass
class Outside:
    """The namespace, from the outside."""

    netns: str
    directory: Path
    certificates: Certificates
    _read: dict[str, int] = field(default_factory=dict)

    def seen(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return what the servers saw so far: ``{kind: dns|http|raw, …}`` each."""
        lines = (self.directory / "seen.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if kind in {None, row["kind"]}]

    def forget(self) -> None:
        (self.directory / "seen.jsonl").write_text("")

    def asked(self) -> set[str]:
        """Return the names that the name server was asked for."""
        return {row["name"] for row in self.seen("dns")}


@contextlib.contextmanager
def outside(directory: Path) -> Iterator[Outside]:
    """Serve while the block lasts. One at a time on a host: the addresses are fixed."""
    with Path("/run/lock/space-tests-outside").open("w") as lock:
        deadline = time.monotonic() + FREE_S
        while not _locked(lock.fileno()):
            assert time.monotonic() < deadline, (
                "another test, or run of tests, has the addresses of the servers outside"
            )
            time.sleep(0.1)
        for left in Path("/run/netns").glob("outside-*"):  # by a run that was killed: its addresses are these, too
            _remove(left.name, f"out{left.name.removeprefix('outside-')}")
        with _outside(directory) as found:
            yield found


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _outside(directory: Path) -> Iterator[Outside]:
    netns = f"outside-{os.getpid()}"
    interface = f"out{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    for kind in ("trusted", "untrusted"):
        (directory / kind).mkdir(exist_ok=True)
    certificates = Certificates(directory / "trusted", (*ZONE, "*.rebind.example", "*.wild.example"))
    Certificates(directory / "untrusted", ("untrusted.example",))
    (directory / "seen.jsonl").touch()
    ip = ["ip", "-n", netns]
    addresses = [f"{NAME_SERVER}/24", f"{GOOD}/24", f"{EVIL}/24", f"{GOOD_V6}/64", f"{EVIL_V6}/64"]
    try:
        _run("ip", "netns", "add", netns)
        _run("ip", "link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", netns)
        _run("ip", "address", "add", f"{HOST_V4}/24", "dev", interface)
        _run("ip", "address", "add", f"{OWN}/32", "dev", interface)
        _run("ip", "address", "add", f"{HOST_V6}/64", "dev", interface, "nodad")
        _run("ip", "link", "set", interface, "up")
        for address in addresses:
            nodad = ["nodad"] if ":" in address else []
            _run(*ip, "address", "add", address, "dev", "eth0", *nodad)
        _run(*ip, "link", "set", "lo", "up")
        _run(*ip, "link", "set", "eth0", "up")
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{netns}", sys.executable, "-m", "tests.upstreams", str(directory)],
            cwd=Path(__file__).parents[1],
        )
        try:
            deadline = time.monotonic() + READY_S
            while not (directory / "ready").exists():
                assert process.poll() is None, "the servers outside ended"
                assert time.monotonic() < deadline, "the servers outside are not ready"
                time.sleep(0.02)
            yield Outside(netns, directory, certificates)
        finally:
            process.kill()
            process.wait()
    finally:
        _remove(netns, interface)


def _remove(netns: str, interface: str) -> None:
    subprocess.run(["ip", "link", "delete", interface], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "delete", netns], check=False, capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


# --- the process inside


class Servers:
    """All servers, and the log."""

    def __init__(self, directory: Path) -> None:
        self._log = (directory / "seen.jsonl").open("a", buffering=1)
        self.directory = directory
        self._asked: Counter[str] = Counter()
        self._released = asyncio.Event()

    async def released(self) -> None:
        """Wait until somebody asks for ``/release``."""
        await self._released.wait()
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    def note(self, kind: str, **fields: Any) -> None:
        self._log.write(json.dumps({"kind": kind, "at": time.time(), **fields}) + "\n")

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: _Names(self), local_addr=(NAME_SERVER, 53))
        for address in (GOOD, EVIL, GOOD_V6, EVIL_V6):
            await asyncio.start_server(self._http, address, 80)
            await asyncio.start_server(self._http, address, 443, ssl=self._tls())
            await asyncio.start_server(self._raw, address, 9)
            await asyncio.start_server(self._greet, address, 22)
            for port in DATAGRAM_PORTS:
                await loop.create_datagram_endpoint(lambda: _Datagrams(self), local_addr=(address, port))
        await asyncio.start_server(self._raw, NAME_SERVER, 53)
        await asyncio.start_server(self._raw, NAME_SERVER, 853)
        # Another server's certificate, which nobody trusts, behind a name of its own.
        untrusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        untrusted.load_cert_chain(*_chain(self.directory / "untrusted"))
        await asyncio.start_server(self._http, GOOD, 8443, ssl=untrusted)
        (self.directory / "ready").touch()
        await asyncio.Event().wait()

    def _tls(self) -> ssl.SSLContext:
        context, plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for one in (context, plain):
            one.load_cert_chain(*_chain(self.directory / "trusted"))
        context.set_alpn_protocols(["h2", "http/1.1"])

        def asked_for(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            if name == PLAIN:
                connection.context = plain

        context.sni_callback = asked_for  # type: ignore[assignment]
        return context

    async def _raw(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send back what comes."""
        server, port = writer.get_extra_info("sockname")[:2]
        self.note("raw", server=server, port=port)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak first, as SSH and mail servers do."""
        self.note("raw", server=writer.get_extra_info("sockname")[0], port=22)
        writer.write(b"SSH-2.0-test\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read(1)
        writer.close()

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = writer.get_extra_info("ssl_object")
        server = writer.get_extra_info("sockname")[0]
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            if tls is not None and tls.selected_alpn_protocol() == "h2":
                from tests.upstream_http2 import serve_http2

                await serve_http2(self, reader, writer, server)
            else:
                await _Http1(self, reader, writer, server, tls=tls is not None).serve()
        writer.close()

    def answer_names(self, data: bytes) -> bytes | None:
        question = dns.message.from_wire(data)
        asked = question.question[0]
        name, kind = asked.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(asked.rdtype)
        if name.endswith(".mute.example"):
            return None  # unnoted: it is asked for again and again, while other tests look at what was
        self.note("dns", name=name, type=kind)
        response = dns.message.make_response(question, recursion_available=True)
        records = ZONE.get(name, {})
        ttl = 60
        if name.endswith(".rebind.example"):
            self._asked[name] += kind == "A"
            records, ttl = {"A": [GOOD if self._asked[name] < 2 else "127.0.0.1"]}, 0
        elif name.endswith(".wild.example") or name == "wrong-name.example":
            records = {"A": [GOOD]}
        if not records:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif kind in records:
            response.answer.append(dns.rrset.from_text_list(asked.name, ttl, "IN", asked.rdtype, records[kind]))
        return response.to_wire()


def _chain(directory: Path) -> tuple[Path, Path]:
    return directory / "server.pem", directory / "server.key"


class _Names(asyncio.DatagramProtocol):
    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._servers.answer_names(data)
        if answer is not None:
            self._transport.sendto(answer, addr)  # type: ignore[attr-defined]


class _Datagrams(asyncio.DatagramProtocol):
    """Notes what comes."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._own = transport.get_extra_info("sockname")

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._servers.note("udp", server=self._own[0], port=self._own[1], peer=addr[0], data=data.decode("latin-1"))


def respond(method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of what answers at once, in every version of HTTP."""
    path, _, query = target.partition("?")
    fields = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    echo = json.dumps({"method": method, "target": target, "headers": headers, "body": body.decode("latin-1")}).encode()
    pages: dict[str, Callable[[], tuple[int, dict[str, str], bytes]]] = {
        "/hello": lambda: (200, {}, b"hello"),
        "/echo": lambda: (200, {"content-type": "application/json", "set-cookie": _authorization(headers)}, echo),
        "/gzip-echo": lambda: (200, {"content-encoding": "gzip"}, gzip.compress(echo)),
        "/br": lambda: (200, {"content-encoding": "br"}, b"\x0b\x02\x80hello\x03"),
        "/bomb": lambda: (200, {"content-encoding": "gzip"}, gzip.compress(bytes(int(fields["n"])), 9)),
        "/redirect": lambda: (302, {"location": base64.urlsafe_b64decode(fields["to"]).decode()}, b""),
        "/sink": lambda: (200, {}, str(len(body)).encode()),
        "/error": lambda: (500, {"x-debug": _authorization(headers)}, b"refused: " + _authorization(headers).encode()),
        "/located": lambda: (302, {"location": "/?" + urlencode({"token": _authorization(headers)})}, b""),
        "/forms": lambda: (200, {}, _forms(_authorization(headers))),
        "/alt-svc": lambda: (200, {"alt-svc": 'h3=":443"'}, b"ok"),
    }
    return pages.get(path, lambda: (404, {}, b"no such page"))()


def file_page(top: Path, path: str) -> Page:
    """Return a file below ``top`` for a path below ``/www``; a directory is its ``index``."""
    found = (top / path.removeprefix("/www/")).resolve()
    found = found / "index" if found.is_dir() else found
    there = found.is_relative_to(top) and found.is_file()
    kind = {".json": "application/json", ".whl": "application/zip"}.get(found.suffix, "text/html")
    return (200 if there else 404), {"content-type": kind}, found.read_bytes() if there else b""


async def git_page(top: Path, headers: dict[str, str], method: str, path: str, query: str, body: bytes) -> Page:
    """Answer as git's own CGI program does, for repositories below ``top`` (RFC 3875)."""
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_PROJECT_ROOT": str(top),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": path.removeprefix("/git"),
        "QUERY_STRING": query,
        "REQUEST_METHOD": method,
        "CONTENT_TYPE": headers.get("content-type", ""),
        "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
        "GIT_PROTOCOL": headers.get("git-protocol", ""),
        "HOME": "/nonexistent",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("git", "http-backend", stdin=pipe, stdout=pipe, env=environment)
    output, _ = await process.communicate(body)
    head, _, content = output.partition(b"\r\n\r\n")
    pairs = (line.partition(":") for line in head.decode().splitlines())
    told = {name.lower(): value.strip() for name, _, value in pairs}
    return int(told.pop("status", "200").split()[0]), told, content


def _authorization(headers: list[tuple[str, str]]) -> str:
    return dict(headers).get("authorization", "none")


def _forms(text: str) -> bytes:
    """Return what a server may make of a header that it shows."""
    value = text.rpartition(" ")[2]
    encoded = base64.b64encode(value.encode()).decode()
    return "\n".join([value, quote(value, safe=""), quote(value), encoded, json.dumps(value), f"user:{value}"]).encode()


class _Http1:
    """One connection."""

    def __init__(
        self, servers: Servers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: str, *, tls: bool
    ) -> None:
        self._servers, self._reader, self._writer, self._server, self._tls = servers, reader, writer, server, tls
        self._h11 = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        while True:
            event = await self._next()
            if not isinstance(event, h11.Request):
                return
            headers = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
            method, target = event.method.decode(), event.target.decode()
            self._servers.note(
                "http", server=self._server, tls=self._tls, version="1.1", method=method, target=target, headers=headers
            )
            if not await self._stream(method, target, headers):
                body = await self._body() if not target.startswith("/sink") else bytes(0)
                if target.startswith("/sink"):
                    await self._send(200, {}, str(await self._count()).encode(), method)
                else:
                    status, more, content = respond(method, target, headers, body)
                    await self._send(status, more, content, method)
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                return
            self._h11.start_next_cycle()

    async def _next(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._reader.read(1 << 18))
        return event

    async def _body(self) -> bytes:
        parts = []
        while isinstance(event := await self._next(), h11.Data):
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def _count(self) -> int:
        size = 0
        while isinstance(event := await self._next(), h11.Data):
            size += len(event.data)
        return size

    async def _send(self, status: int, headers: dict[str, str], body: bytes, method: str) -> None:
        head = h11.Response(status_code=status, headers=[*headers.items(), ("content-length", str(len(body)))])
        out = [self._h11.send(head)]
        if body and method != "HEAD":
            out.append(self._h11.send(h11.Data(data=body)))
        out.append(self._h11.send(h11.EndOfMessage()))
        self._writer.write(b"".join(part or b"" for part in out))
        await self._writer.drain()

    async def _stream(self, method: str, target: str, headers: list[tuple[str, str]]) -> bool:
        """Answer what takes its time; False: it is another page."""
        path, _, query = target.partition("?")
        if path == "/release":
            self._servers.release()
            return False
        if path.startswith("/git/"):
            await self._git(method, path, query, dict(headers))
            return True
        pages: dict[str, Callable[[], Awaitable[None]]] = {
            "/bytes": lambda: self._bytes(int(query.removeprefix("n="))),
            "/events": lambda: self._events(int(query.removeprefix("n="))),
            "/silent": lambda: self._write(b"", keep=True),
            "/ws": lambda: self._websocket(dict(headers)),
            "/held": lambda: self._held(dict(headers)),
            "/raw": lambda: self._raw(query),
            "/huge": lambda: self._write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + HUGE[query] + b"\r\n"),
            "/pieces": lambda: self._pieces(_authorization(headers)),
            "/h2c": lambda: self._write(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"),
        }
        page = pages.get(path)
        if page is None and path.startswith("/www/"):
            page = functools.partial(self._file, path, method)
        if page is None:
            return False
        await self._body()
        await page()
        return True

    async def _write(self, data: bytes, *, keep: bool = False) -> None:
        """Answer with exactly these bytes; with ``keep`` the connection stays open until the other end has enough."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()
            if keep:
                await self._reader.read(1)

    async def _raw(self, query: str) -> None:
        fields = dict(part.partition("=")[::2] for part in query.split("&"))
        await self._write(base64.urlsafe_b64decode(fields["b64"]), keep="keep" in fields)

    async def _held(self, headers: dict[str, str]) -> None:
        await self._servers.released()
        await self._websocket(headers)

    async def _pieces(self, text: str) -> None:
        """Send a text a byte a chunk, and once more in the trailer and as reason."""
        reason = text.encode()
        self._writer.write(b"HTTP/1.1 200 " + reason + b"\r\ntransfer-encoding: chunked\r\n\r\n")
        for byte in reason:
            self._writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            await self._writer.drain()
        self._writer.write(b"0\r\nx-trailer: " + reason + b"\r\n\r\n")
        await self._writer.drain()

    async def _bytes(self, size: int) -> None:
        chunk = bytes(1 << 18)
        self._writer.write(
            self._h11.send(h11.Response(status_code=200, headers=[("content-length", str(size))])) or b""
        )
        while size:
            part = chunk[: min(size, len(chunk))]
            size -= len(part)
            self._writer.write(self._h11.send(h11.Data(data=part)) or b"")
            await self._writer.drain()
        self._h11.send(h11.EndOfMessage())

    async def _file(self, path: str, method: str) -> None:
        status, headers, content = file_page(self._servers.directory / "www", path)
        await self._send(status, headers, content, method)

    async def _git(self, method: str, path: str, query: str, headers: dict[str, str]) -> None:
        asked = (method, path, query, await self._body())
        status, told, content = await git_page(self._servers.directory / "git", headers, *asked)
        await self._send(status, told, content, method)

    async def _events(self, count: int) -> None:
        """Send the time, twice a second."""
        head = h11.Response(
            status_code=200, headers=[("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        )
        self._writer.write(self._h11.send(head) or b"")
        for _ in range(count):
            self._writer.write(self._h11.send(h11.Data(data=f"data: {time.time():.6f}\n\n".encode())) or b"")
            await self._writer.drain()
            await asyncio.sleep(0.5)
        self._writer.write(self._h11.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()

    async def _websocket(self, headers: dict[str, str]) -> None:
        """Shake hands (RFC 6455 §4.2.2) and send frames back as text, unmasked."""
        import hashlib

        key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self._writer.write(
            f"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            f"sec-websocket-accept: {accept}\r\n\r\n".encode()
        )
        greeting = json.dumps(headers).encode()
        self._writer.write(b"\x81\x7e" + len(greeting).to_bytes(2) + greeting)
        while True:
            head = await self._reader.readexactly(2)
            size = head[1] & 0x7F
            mask = await self._reader.readexactly(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(await self._reader.readexactly(size)))
            if head[0] & 0x0F == 8:
                return
            self._writer.write(bytes([0x81, len(data)]) + data)
            await self._writer.drain()


def main() -> None:
    socket.setdefaulttimeout(None)
    asyncio.run(Servers(Path(sys.argv[1])).serve())


if __name__ == "__main__":
    main()
