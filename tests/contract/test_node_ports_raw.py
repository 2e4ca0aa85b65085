"""WebSockets and raw connections to ports of sandboxes through a node with a real agent, and waking for them."""

import json
import socket
import threading
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from space.node.http_ports import SUBPROTOCOL
from tests.node_host import NodeHost, wait_until, wait_until_still
from tests.port_servers import BLOCK, MIB, echo_server, raw_server, websocket_server
from tests.previews import DOMAIN, echo, page, port, preview, token_for, tunnel, websocket

__all__ = ["echo", "page", "port"]


# --- upgrades


def test_a_websocket_keeps_subprotocol_compression_and_closing_code(host, box):
    asked: list[Any] = []

    def handle(connection: Any) -> None:
        asked.append(connection.request)
        for message in connection:
            if message == "bye":
                connection.close(4321, "so long")
                return
            connection.send(message)

    with websocket_server(handle, subprotocols=["b", "a"], max_size=8 * MIB) as port:
        with websocket(host, box, port, "/w?q=1", subprotocols=["a", "b"], max_size=8 * MIB) as client:
            assert client.subprotocol == "b"
            assert client.protocol.extensions[0].name == "permessage-deflate"
            large = "é" * (2 * MIB)
            for message in ("hello", b"\x00\xff", large):
                client.send(message)
                assert client.recv(timeout=20) == message
            client.send("bye")
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=10)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "so long")
    assert asked[0].path == "/w?q=1"
    assert "x-space-token" not in asked[0].headers


def test_a_websocket_that_the_server_refuses_is_its_answer(host, box, port):
    with pytest.raises(InvalidStatus) as refused:
        websocket(host, box, port)
    assert refused.value.response.status_code == 200
    assert json.loads(refused.value.response.body)["path"] == "/"


def test_a_websocket_needs_a_token_and_a_page_of_the_same_sandbox(host, box):
    with websocket_server(lambda one: one.send("in")) as port:
        with pytest.raises(InvalidStatus, match="401"):
            websocket(host, box, port, additional_headers={})
        cookie = {"cookie": f"space_preview={token_for(host, box, port)}"}
        with pytest.raises(InvalidStatus, match="403"):
            websocket(host, box, port, additional_headers={**cookie, "origin": f"http://1-x.{DOMAIN}"})
        own = f"http://{port}-{box}.{DOMAIN}:{host.port}"
        with websocket(host, box, port, additional_headers={**cookie, "origin": own}) as client:
            assert client.recv(timeout=10) == "in"
        with websocket(host, box, port, f"/?space_token={token_for(host, box, port)}", additional_headers={}) as client:
            assert client.recv(timeout=10) == "in"


def test_a_websocket_by_path_works_too(host, box):
    with websocket_server(lambda one: one.send(one.request.path)) as port:
        url = f"ws://127.0.0.1:{host.port}/v1/sandboxes/{box}/ports/{port}/x"
        headers = {"authorization": f"Bearer {token_for(host, box, port)}"}
        with connect(url, additional_headers=headers) as client:
            assert client.recv(timeout=10) == "/x"


def test_a_websocket_to_a_closed_port_is_a_502(host, box):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(InvalidStatus) as refused:
            websocket(host, box, port)
    assert refused.value.response.status_code == 502
    assert json.loads(refused.value.response.body)["error"]["code"] == "port-closed"


# --- raw connections


def echo_until_end(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def test_a_tunnel_carries_bytes_both_ways_and_both_ends(host, box):
    def handle(connection: socket.socket) -> None:
        got = b""
        while data := connection.recv(65536):
            got += data
        connection.sendall(b"%d" % len(got))

    with raw_server(handle) as port, tunnel(host, box, port) as client:
        for _ in range(10):
            client.send(BLOCK)
        client.send(json.dumps({"type": "eof"}))
        assert client.recv(timeout=10) == b"%d" % (10 * len(BLOCK))
        assert json.loads(client.recv(timeout=10)) == {"type": "eof"}
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=10)
        assert closed.value.rcvd.code == 1000


def test_a_tunnel_that_breaks_off_says_so(host, box):
    def handle(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with raw_server(handle) as port, tunnel(host, box, port) as client:
        client.send(b"x")
        assert json.loads(client.recv(timeout=10))["error"]["code"] == "connection-reset"
        with pytest.raises(ConnectionClosedError) as closed:
            client.recv(timeout=10)
        assert closed.value.rcvd.code == 1011


def test_a_tunnel_to_a_closed_port_says_why(host, box):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{host.port}/v1/sandboxes/{box}/tunnels/{probe.getsockname()[1]}?token={host.token(box)}"
        with connect(url, subprotocols=[SUBPROTOCOL]) as client:
            assert json.loads(client.recv(timeout=10))["error"]["code"] == "port-closed"


def test_many_tunnels_at_once_keep_apart(host, box):
    with raw_server(echo_until_end) as port, ExitStack() as held:
        clients = [held.enter_context(tunnel(host, box, port)) for _ in range(100)]
        for number, client in enumerate(clients):
            client.send(b"%d" % number)
        assert [client.recv(timeout=10) for client in clients] == [b"%d" % number for number in range(100)]


def test_who_does_not_read_holds_up_the_server_and_nobody_else(host, box, page):
    sent = 0

    def handle(connection: socket.socket) -> None:
        nonlocal sent
        while True:
            sent += connection.send(BLOCK)

    with raw_server(handle) as port, tunnel(host, box, port):
        wait_until_still(lambda: sent)
        assert sent < 32 * MIB
        assert page.get("/").status_code == 200


def test_suspending_ends_connections_at_once_and_new_ones_work_after_waking(host):
    box = host.boot()
    with raw_server(echo_until_end) as port, tunnel(host, box, port) as client:
        client.send(b"x")
        assert client.recv(timeout=10) == b"x"
        assert host.local.post(f"/machines/{box}/suspend").status_code == 200
        assert json.loads(client.recv(timeout=10))["type"] == "error"
        assert host.local.post(f"/machines/{box}/wake").status_code == 200
        with tunnel(host, box, port) as again:
            again.send(b"y")
            assert again.recv(timeout=10) == b"y"
    host.local.delete(f"/machines/{box}")


# --- waking


class Api:
    """What the api does for requests that wait: it hears of them, and answers."""

    def __init__(self, host: NodeHost, answer: Any) -> None:
        self._host, self._answer = host, answer
        self.heard: list[str] = []
        self._client = httpx.Client(transport=httpx.HTTPTransport(uds=host.socket), base_url="http://node", timeout=60)
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._listens.wait(10)

    def _run(self) -> None:
        with self._client.stream("GET", "/machines/events") as events:
            lines = events.iter_lines()
            next(lines)
            self._listens.set()
            for line in lines:
                event = json.loads(line)
                if event.get("event") == "wanted":
                    self.heard.append(event["machine"])
                    self._answer(event["machine"])
                    if len(self.heard) >= 1:
                        return


def test_a_request_is_held_while_its_sandbox_wakes(host):
    box = host.boot()

    def wake(machine: str) -> None:
        assert host.local.post(f"/machines/{machine}/wake").status_code == 200
        assert host.local.put(f"/machines/{machine}/wanted", json={"error": None}).status_code == 200

    with echo_server() as server:
        token = token_for(host, box, server.server_port)
        host.local.post(f"/machines/{box}/suspend")
        api = Api(host, wake)
        with preview(host, box, server.server_port, token) as client:
            assert client.post("/", content=b"kept").json()["body"] == "kept"
        assert api.heard == [box]
    host.local.delete(f"/machines/{box}")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({"code": "wrong-state", "message": "No.", "kind": "Conflict", "details": {"state": "suspended"}}, 409, None),
        ({"code": "host-full", "message": "No.", "kind": "HostFull", "details": {}}, 503, None),
        ({"code": "internal", "message": "No.", "kind": "SpaceError", "details": {}}, 503, "waking-failed"),
    ],
)
def test_a_waking_that_comes_to_nothing_is_told_to_who_waits(host, error, status, code):
    box = host.boot()
    token = host.token(box)
    host.local.post(f"/machines/{box}/suspend")
    Api(host, lambda machine: host.local.put(f"/machines/{machine}/wanted", json={"error": error}))
    with preview(host, box, 8000, token) as client:
        answer = client.get("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code or error["code"])
    host.local.delete(f"/machines/{box}")


def test_without_an_api_a_sleeping_sandbox_is_a_503_at_once(fresh):
    box = fresh.boot()
    fresh.local.post(f"/machines/{box}/suspend")
    with preview(fresh, box, 8000, fresh.token(box)) as client:
        answer = client.get("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "waking-failed")


def test_a_machine_with_an_open_connection_is_not_idle(host, box):
    with raw_server(echo_until_end) as port, tunnel(host, box, port):
        wait_until(lambda: host.local.get(f"/machines/{box}").json()["clients"] >= 1, "the client to be counted")
    wait_until(lambda: host.local.get(f"/machines/{box}").json()["clients"] == 0, "the client to be gone")
