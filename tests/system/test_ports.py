"""Servers in a sandbox on a real installation: asked through their own hosts, by raw connections, and awake for that."""

import asyncio
import contextlib
import hashlib
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from websockets.sync.client import connect

from space import AsyncClient, AsyncSandbox, Client, Port, Sandbox, SandboxError
from tests.client import wait_until
from tests.installation import Installation, patient
from tests.system.test_cli import SPACE, Cli

MIB = 1024 * 1024
LARGE_MIB = 200
PORT = 8000
SERVER = r"""
import base64, hashlib, http.server, threading

BLOCK = bytes(range(256)) * 256

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if self.headers.get("upgrade") == "websocket":
            return self.echo()
        self.send_response(200)
        if path == "/large":
            size = int(query) * 1024 * 1024
            self.send_header("content-length", str(size))
            self.end_headers()
            for _ in range(size // len(BLOCK)):
                self.wfile.write(BLOCK)
        elif path == "/events":
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for number in range(3):
                self.wfile.write(b"data: %d\n\n" % number)
                self.wfile.flush()
                more.acquire()
            self.close_connection = True
        else:
            more.release()
            body = repr(self.headers.items()).encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def do_PUT(self):
        left, digest = int(self.headers["content-length"]), hashlib.sha256()
        while left:
            chunk = self.rfile.read(min(left, 65536))
            left -= len(chunk)
            digest.update(chunk)
        body = digest.hexdigest().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def echo(self):
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "upgrade")
        self.send_header("sec-websocket-accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:
            first, size = self.rfile.read(2)
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(size & 127)))
            self.wfile.write(bytes((first, len(data))) + data)
            self.wfile.flush()
            if first & 15 == 8:
                break
        self.close_connection = True

    def log_message(self, *_):
        pass

more = threading.Semaphore(0)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def client(installation: Installation) -> Iterator[Client]:
    with Client(installation.url, installation.key) as client:
        yield client


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create("base", client=client, wake_on_request=True) as sandbox:
        sandbox.files.write("/tmp/server.py", SERVER)
        sandbox.start(["python3", "/tmp/server.py"]).detach()
        listens = f"until (: </dev/tcp/127.0.0.1/{PORT}) 2>/dev/null; do sleep 0.05; done"
        sandbox.run(["bash", "-c", listens], check=True, timeout_s=patient(20))
        yield sandbox


@pytest.fixture
def exposed(box: Sandbox) -> Port:
    return box.ports.expose(PORT)


@contextlib.contextmanager
def visitor(installation: Installation, port: Port) -> Iterator[httpx.Client]:
    """Asks the port's own host, whose name need not be known here."""
    headers = {"host": httpx.URL(port.url).netloc.decode(), "x-space-token": port.token or ""}
    with httpx.Client(base_url=installation.data_plane_url, headers=headers, timeout=patient(60)) as client:
        yield client


def test_a_servers_answer_comes_through_its_own_host_and_nothing_of_ours_reaches_it(installation, exposed) -> None:
    with visitor(installation, exposed) as client:
        answer = client.get("/", headers={"cookie": f"space_preview={exposed.token}; mine=1"})
    assert answer.status_code == 200
    assert exposed.token not in answer.text
    assert "mine=1" in answer.text
    assert httpx.URL(exposed.url).netloc.decode() in answer.text
    by_path = httpx.get(exposed.api_url, headers={"x-space-token": exposed.token or ""}, timeout=patient(30))
    assert "localhost:8000" in by_path.text


def test_a_browser_gets_in_by_the_address_that_is_shown_and_is_known_from_then_on(installation, box) -> None:
    address = httpx.URL(box.ports.url(PORT))
    headers = {"host": address.netloc.decode(), "accept": "text/html"}
    with httpx.Client(base_url=installation.data_plane_url, headers=headers, timeout=patient(30)) as browser:
        assert browser.get("/").status_code == 401
        first = browser.get(address.raw_path.decode())
        assert (first.status_code, first.headers["location"]) == (302, "/")
        kept = first.headers["set-cookie"].partition(";")[0]
        assert browser.get("/", headers={"cookie": kept}).status_code == 200


def test_large_answers_and_bodies_stream_in_flat_memory(installation, exposed) -> None:
    with visitor(installation, exposed) as client:
        client.get("/large?1")
        with installation.flat("node", mib=32):
            with client.stream("GET", f"/large?{LARGE_MIB}") as answer:
                assert sum(len(chunk) for chunk in answer.iter_raw(MIB)) == LARGE_MIB * MIB
            block = bytes(range(256)) * 256
            blocks = 50 * MIB // len(block)
            sent = client.put(
                "/", content=(block for _ in range(blocks)), headers={"content-length": str(blocks * len(block))}
            )
            assert sent.text == hashlib.sha256(block * blocks).hexdigest()


def test_events_come_one_by_one(installation, exposed) -> None:
    with visitor(installation, exposed) as client, client.stream("GET", "/events") as answer:
        lines = answer.iter_lines()
        for number in range(3):
            assert next(line for line in lines if line) == f"data: {number}"
            # The next one is sent only for this: that the last one came is not for want of a full buffer.
            with visitor(installation, exposed) as other:
                assert other.get("/").status_code == 200


def test_a_websocket_reaches_the_server(installation, exposed) -> None:
    raw = socket.create_connection(("127.0.0.1", installation.settings.node_port))
    url = exposed.url.replace("http", "ws", 1)
    with connect(url, sock=raw, additional_headers={"x-space-token": exposed.token or ""}, compression=None) as one:
        one.send("hello")
        assert one.recv(timeout=patient(20)) == "hello"


def test_a_public_port_is_everybodys_and_a_hidden_one_nobodys(installation, box) -> None:
    port = box.ports.expose(PORT, public=True)
    assert port.browser_url == port.url
    headers = {"host": httpx.URL(port.url).netloc.decode()}
    assert httpx.get(installation.data_plane_url, headers=headers, timeout=patient(30)).status_code == 200
    assert [(one.port, one.public) for one in box.ports.list()] == [(PORT, True)]
    box.ports.hide(PORT)
    assert box.ports.list() == []
    for sent in (headers, {**headers, "x-space-token": port.token or ""}):
        assert httpx.get(installation.data_plane_url, headers=sent, timeout=patient(30)).status_code in {401, 403}


def test_another_projects_ports_are_not_there(installation, box, exposed) -> None:
    with Client(installation.url, installation.other_key) as other:
        for method, path in (("POST", f"/{PORT}"), ("GET", ""), ("DELETE", f"/{PORT}")):
            answer = httpx.request(
                method,
                f"{installation.url}/v1/sandboxes/{box.id}/ports{path}",
                headers={"authorization": f"Bearer {installation.other_key}"},
                timeout=patient(30),
            )
            assert answer.status_code == 404
        with Sandbox.create("base", client=other) as theirs:
            token = theirs.ports.expose(PORT).token
    headers = {"host": httpx.URL(exposed.url).netloc.decode(), "x-space-token": token or ""}
    assert httpx.get(installation.data_plane_url, headers=headers, timeout=patient(30)).status_code == 403


def test_a_raw_connection_carries_bytes_and_says_when_nobody_listens(box) -> None:
    with box.ports.connect(PORT) as connection:
        connection.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        connection.end()
        got = b""
        while data := connection.read():
            got += data
    assert got.startswith(b"HTTP/1.1 200")
    with pytest.raises(SandboxError) as refused, box.ports.connect(9):
        pass
    assert refused.value.code == "port-closed"


def test_a_server_on_the_sandboxs_own_address_is_found(installation, box) -> None:
    address = box.run("hostname -I", check=True).stdout.split()[0]
    box.start(["python3", "-m", "http.server", "8100", "--bind", address, "--directory", "/etc"]).detach()
    port = box.ports.expose(8100)
    with visitor(installation, port) as client:
        wait_until(lambda: client.get("/hostname").status_code == 200, 20, "the server to answer")


def test_many_connections_at_once_through_one_local_port(installation, box) -> None:
    process = subprocess.Popen(
        [*SPACE, "port", "--forward", box.id, f"{PORT}:0"],
        env=Cli(installation).environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        local = process.stderr.readline().split()[0].rpartition(":")[2]
        answers: list[int] = []

        def ask() -> None:
            answers.append(httpx.get(f"http://127.0.0.1:{local}/", timeout=patient(60)).status_code)

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 20
    finally:
        process.terminate()
        process.wait(20)


def test_the_command_line_shows_an_address_and_lists_and_hides(installation, box) -> None:
    space = Cli(installation)
    address = space("port", box.id, str(PORT)).strip()
    assert address.startswith(f"http://{PORT}-{box.id}.")
    assert "?space_token=" in address
    assert f"{PORT}-{box.id}" in space("port", box.id)
    space("port", box.id, str(PORT), "--hide")
    assert f"{PORT}-{box.id}" not in space("port", box.id)


@pytest.mark.parametrize("verb", ["suspend", "pause"])
def test_a_request_wakes_a_sandbox_that_wakes_on_request(installation, box, verb) -> None:
    port = box.ports.expose(PORT)
    getattr(box, verb)()
    with visitor(installation, port) as client:
        assert client.get("/").status_code == 200
    box.refresh()
    assert box.state == "running"


def test_connections_that_are_open_end_when_the_sandbox_is_suspended(box) -> None:
    with box.ports.connect(PORT) as connection:
        # The server keeps the connection, and has nothing to say on it after its answer.
        connection.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        got = b""
        while b"]" not in got:
            got += connection.read()
        box.suspend()
        with pytest.raises(SandboxError):
            connection.read()
    with box.ports.connect(PORT) as again:  # which wakes it
        again.write(b"GET / HTTP/1.0\r\n\r\n")
        assert again.read()


def test_a_sandbox_that_does_not_wake_is_a_conflict_and_a_deleted_one_is_not_there(installation, client) -> None:
    sandbox = Sandbox.create("base", client=client)
    port = sandbox.ports.expose(PORT)
    with visitor(installation, port) as asking:
        sandbox.suspend()
        answer = asking.get("/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong-state")
        sandbox.delete()
        wait_until(lambda: asking.get("/").status_code in {403, 404}, 20, "it to be gone")
    sandbox.close()


async def test_the_asynchronous_sdk_does_the_same(installation) -> None:
    async def lines(connection) -> AsyncIterator[bytes]:
        while data := await connection.read():
            yield data

    async with (
        AsyncClient(installation.url, installation.key) as client,
        await AsyncSandbox.create("base", client=client) as sandbox,
    ):
        await sandbox.start(["python3", "-m", "http.server", "8200", "--directory", "/etc"])
        async with asyncio.timeout(patient(30)):
            while True:
                try:
                    async with sandbox.ports.connect(8200) as connection:
                        await connection.write(b"GET /hostname HTTP/1.0\r\n\r\n")
                        got = b"".join([data async for data in lines(connection)])
                        break
                except SandboxError:
                    continue
        assert b" 200 " in got
        opened = await sandbox.ports.expose(8200)
        assert (await sandbox.ports.list())[0].port == opened.port
        await sandbox.ports.hide(8200)


def test_what_a_request_costs_is_little(installation, exposed) -> None:
    """Not a measurement, which `space bench` is for: only that nothing waits for a timer."""
    took = []
    with visitor(installation, exposed) as client:
        for _ in range(50):
            began = time.monotonic()
            assert client.get("/").status_code == 200
            took.append(time.monotonic() - began)
    print(f"p50 {sorted(took)[25] * 1000:.1f} ms")
    assert sorted(took)[25] < patient(0.1)
