"""The port proxy in another process than the node: through the node's socket, and behind a server of its own with TLS."""

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from space.control import ports
from space.control.nodes import Node
from space.control.ports import dial
from space.errors import GuestError, NotFound, SandboxError, Unavailable
from space.node.ports.proxy import Target, serve
from space.node.ports.upgrades import upgradable
from tests.port_servers import BLOCK, MIB, echo_server, raw_server, read_head, websocket_server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that nobody has signed but itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "inside")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "inside.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(pem))
    return path


@pytest.fixture
async def node(host) -> AsyncIterator[Node]:
    node = Node(Path(host.socket))
    yield node
    await node.close()


async def ask(target: Target, *parts: bytes, method: str = "GET") -> tuple[int, bytes]:
    """Have one request served that is made by hand; return status and body."""
    length = [(b"content-length", str(sum(map(len, parts))).encode())] if parts else []
    scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "raw_path": b"/large",
        "query_string": b"3",
        "headers": [(b"host", b"outside"), (b"e2b-traffic-access-token", b"secret"), *length],
        "client": ("203.0.113.7", 1),
    }
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    answered: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        return await asyncio.Future()

    async def send(message: Message) -> None:
        answered.append(message)

    async with asyncio.timeout(30):
        status = await serve(scope, receive, send, target)
    assert answered[0]["status"] == status
    return status, b"".join(message["body"] for message in answered[1:])


async def test_requests_pass_through_the_nodes_socket(host, box, node) -> None:
    with echo_server() as server:
        target = Target(
            dial=lambda: dial(node, box, server.server_port),
            port=server.server_port,
            host="masked:${PORT}",
            drop=frozenset({b"e2b-traffic-access-token"}),
        )
        status, body = await ask(target)
        assert (status, len(body)) == (200, 3 * MIB)
        status, body = await ask(target, *[BLOCK] * 40, method="POST")
        assert status == 201
        assert b'"count": %d' % (40 * len(BLOCK)) in body
        assert b"masked:%d" % server.server_port in body
        assert b"secret" not in body
        assert b"203.0.113.7" in body


async def test_what_the_node_says_is_raised_as_what_it_is(host, box, node) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(SandboxError) as closed:
            await dial(node, box, port)
        assert closed.value.code == "port-closed"
        with pytest.raises(NotFound):
            await dial(node, "sbx" + "a" * 16, port)


async def test_a_node_that_does_not_say_whether_the_connection_is_there_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: web.Request) -> web.WebSocketResponse:
        opened = web.WebSocketResponse(protocols=(ports.TUNNEL,))
        await opened.prepare(request)
        await opened.receive()  # until the other side has gone
        return opened

    app = web.Application()
    app.router.add_get("/v1/sandboxes/{sandbox}/tunnels/{port}", silent)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "node")).start()
    node = Node(tmp_path / "node")
    monkeypatch.setattr(ports, "DIAL_S", 0.2)
    try:
        with pytest.raises(Unavailable) as given_up:
            await asyncio.wait_for(dial(node, "sbx" + "a" * 16, 80), 30)
        assert given_up.value.code == "node-unavailable"
    finally:
        await node.close()
        await runner.cleanup()


async def test_a_connection_that_breaks_off_is_no_end(host, box, node) -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with raw_server(handle) as port:
        tunnel = await dial(node, box, port)
        await tunnel.write(b"x")
        with pytest.raises(SandboxError):
            await tunnel.read()
        await tunnel.close()


async def test_a_server_that_speaks_tls_is_asked_in_tls(host, box, node, certificate) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            head = read_head(secured)
            secured.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(head) + MIB) + head + bytes(MIB))

    with raw_server(handle) as port:
        status, body = await ask(Target(dial=lambda: dial(node, box, port), port=port, tls=True))
    assert status == 200
    assert body.startswith(b"GET /large?3 HTTP/1.1")
    assert body.endswith(bytes(MIB))
    with echo_server() as plain:
        with pytest.raises(GuestError) as refused:
            await ask(Target(dial=lambda: dial(node, box, plain.server_port), port=plain.server_port, tls=True))
        assert refused.value.code == "bad-answer"


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.mark.parametrize("secure", [False, True])
async def test_a_server_of_ones_own_gives_its_websockets_away(host, box, node, certificate, secure) -> None:
    def handle(connection: Any) -> None:
        for message in connection:
            connection.send(message)
            if message == "bye":
                connection.close(4000, "done")

    with websocket_server(handle, subprotocols=["s"]) as port, listening() as sock:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["path"] == "/to/it"
            await serve(scope, receive, send, Target(dial=lambda: dial(node, box, port), port=port))

        tls = {"ssl_certfile": str(certificate)} if secure else {}
        protocol = upgradable(lambda scope: scope["path"].startswith("/to/"))
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, **tls))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            context = ssl.create_default_context(cafile=str(certificate)) if secure else None
            if context is not None:
                context.check_hostname = False
            url = f"{'wss' if secure else 'ws'}://127.0.0.1:{sock.getsockname()[1]}"
            with pytest.raises(InvalidStatus, match="400"):
                await connect(f"{url}/elsewhere", ssl=context)
            async with connect(f"{url}/to/it", ssl=context, subprotocols=["s"]) as client:
                assert client.subprotocol == "s"
                for message in ("hello", b"\0\1", "x" * 500_000):
                    await client.send(message)
                    assert await asyncio.wait_for(client.recv(), 10) == message
                await client.send("bye")
                assert await asyncio.wait_for(client.recv(), 10) == "bye"
                with pytest.raises(ConnectionClosed) as closed:
                    await asyncio.wait_for(client.recv(), 10)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 4000
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, 10)
