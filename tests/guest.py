"""What programs in a sandbox do on the network, done from this process at the guest's end of a link.

Bytes are written as they are given, so that what no library would send can be sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import dns.exception
import dns.message
import dns.query
import dns.rcode
import dns.rdatatype
import h11

from space.broker.addressing import Link
from tests.netns import socket_in

WAIT_S = 8.0


class Closed(ConnectionError):
    """The connection was closed, or never made, and nothing was answered."""


@dataclass
class Answer:
    """One answer; names of headers are lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    reason: str = ""
    trailers: list[tuple[str, str]] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and reason of an answer that is the gateway's own."""
        return self.status, self.json["error"]["reason"]

    @property
    def all(self) -> bytes:
        """All that came, as one text."""
        pairs = [f"{name}: {value}" for name, value in [*self.headers, *self.trailers]]
        return "\n".join([self.reason, *pairs]).encode() + b"\n" + self.body


class Talk:
    """One connection over HTTP/1.1."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, data: bytes, method: str = "GET", *, upgrade: bool = False) -> Answer:
        """Send bytes and return the answer to them, read as that to one request of that method."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(data)  # the answer may be there all the same
        return self.answer(method, upgrade=upgrade)

    def get(self, host: str, target: str = "/hello", *headers: str, method: str = "GET", body: bytes = b"") -> Answer:
        return self.ask(request(host, target, *headers, method=method, body=body), method)

    def answer(self, method: str = "GET", *, upgrade: bool = False) -> Answer:
        """Return the next answer; raise ``Closed`` when there is none."""
        asked = [("host", "x"), *([("connection", "upgrade"), ("upgrade", "websocket")] if upgrade else [])]
        self._h11.send(h11.Request(method=method, target="/", headers=asked))
        self._h11.send(h11.EndOfMessage())
        found: Answer | None = None
        parts: list[bytes] = []
        while True:
            event = self._next()
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    return Answer(101, _texts(event.headers))
            elif isinstance(event, h11.Response):
                found = Answer(event.status_code, _texts(event.headers), reason=bytes(event.reason).decode("latin-1"))
            elif isinstance(event, h11.Data) and found is not None:
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and found is not None:
                found.body, found.trailers = b"".join(parts), _texts(event.headers)
                if self._h11.their_state is h11.DONE and self._h11.our_state is h11.DONE:
                    self._h11.start_next_cycle()
                return found
            else:
                raise Closed(str(event))

    def rest(self) -> bytes:
        """Return what has come behind the last answer."""
        return self._h11.trailing_data[0]

    def is_closed(self) -> bool:
        """Wait for the other end to close; False when it sends something instead."""
        try:
            return self.sock.recv(1) == b""
        except (ConnectionResetError, ssl.SSLEOFError):
            return True

    def _next(self) -> Any:
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                try:
                    self._h11.receive_data(self.sock.recv(1 << 18))
                except (ConnectionResetError, ssl.SSLEOFError) as error:
                    raise Closed(str(error)) from error
        except h11.RemoteProtocolError as error:
            raise Closed(str(error)) from error
        return event


class Guest:
    """Whoever is at the guest's end of ``link``."""

    netns: str
    link: Link
    authority: Path

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        sock = socket_in(self.netns, family, kind, protocol)
        sock.settimeout(WAIT_S)
        return sock

    def tcp(self, port: int, to: str | None = None) -> socket.socket:
        """Connect; to the link's host end, where names lead, or any address. Raises ``Closed`` when refused."""
        address = to or str(self.link.host_v4)
        sock = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect((address, port))
        except OSError as error:
            sock.close()
            raise Closed(str(error)) from error
        return sock

    def tls(
        self,
        name: str | None,
        *,
        port: int = 443,
        to: str | None = None,
        alpn: tuple[str, ...] = ("http/1.1",),
        authority: Path | None = None,
    ) -> ssl.SSLSocket:
        """Shake hands for a name, trusting the installation's authority or another. Raises ``Closed``."""
        context = ssl.create_default_context(cafile=str(authority or self.authority))
        context.set_alpn_protocols(list(alpn))
        if name is None:
            context.check_hostname = False
        sock = self.tcp(port, to)
        try:
            return context.wrap_socket(sock, server_hostname=name)
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            sock.close()
            raise Closed(str(error)) from error
        except BaseException:
            sock.close()
            raise

    def https(self, name: str, **how: Any) -> Talk:
        return Talk(self.tls(name, **how))

    def http(self, port: int = 80, to: str | None = None) -> Talk:
        return Talk(self.tcp(port, to))

    def get(self, url: str, *headers: str, method: str = "GET", body: bytes = b"", to: str | None = None) -> Answer:
        """Make one request as any client does, but that its name is not resolved: ``to`` says where it goes."""
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        name, _, port = host.partition(":")
        number = int(port or {"http": 80, "https": 443}[scheme])
        with self.https(name, port=number, to=to) if scheme == "https" else self.http(number, to) as talk:
            return talk.get(host, slash + path or "/", *headers, method=method, body=body)

    def ask_name(
        self, name: str, kind: str = "A", *, server: str | None = None, tcp: bool = False, wait_s: float = WAIT_S
    ) -> dns.message.Message | None:
        """Ask a name server, the link's own if no other is given; None: it says nothing, or cannot be reached."""
        return self.ask_message(dns.message.make_query(name, kind), server=server, tcp=tcp, wait_s=wait_s)

    def ask_message(
        self, question: dns.message.Message, *, server: str | None = None, tcp: bool = False, wait_s: float = WAIT_S
    ) -> dns.message.Message | None:
        address = server or str(self.link.host_v4)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with self.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as sock:
            sock.settimeout(wait_s)
            try:
                sock.connect((address, 53))
                if tcp:
                    return dns.query.tcp(question, address, wait_s, sock=_unwaiting(sock))
                sock.send(question.to_wire())
                return dns.message.from_wire(sock.recv(65535))
            except (OSError, EOFError, dns.exception.Timeout):
                return None


def _unwaiting(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)  # noqa: FBT003 - of socket; dnspython waits by itself
    return sock


def request(host: str, target: str = "/hello", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    """Return a request as it is written."""
    length = [f"Content-Length: {len(body)}"] if body else []
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, *length, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def addresses(answer: dns.message.Message | None) -> list[str]:
    """Return the addresses in an answer to a question for them."""
    assert answer is not None, "no answer"
    return [item.address for rrset in answer.answer for item in rrset]


def refused(answer: dns.message.Message | None) -> bool:
    assert answer is not None, "no answer"
    return answer.rcode() == dns.rcode.REFUSED and not answer.answer


def _texts(headers: Any) -> list[tuple[str, str]]:
    return [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in headers]
