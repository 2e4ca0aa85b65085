"""Servers in a sandbox, reached as E2B's clients say: by a name for each port, or by headers on the one address."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from e2b import Sandbox
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.client import wait_until
from tests.e2b.conftest import Origin

SERVER = r"""
import base64, hashlib, http.server, json

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("upgrade") == "websocket":
            key = self.headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("upgrade", "websocket")
            self.send_header("connection", "upgrade")
            self.send_header("sec-websocket-accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
            self.end_headers()
            self.wfile.write(b"\x82\x05hello")
            self.rfile.read(1)
            self.close_connection = True
            return
        size = int(self.headers.get("content-length") or 0)
        body = json.dumps({"path": self.path, "headers": {name.lower(): value for name, value in self.headers.items()}, "size": len(self.rfile.read(size))}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("set-cookie", "a=b; Domain=sbx.test")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def serve(box: Sandbox, origin: Origin) -> None:
    box.files.write("server.py", SERVER)
    box.commands.run("python3 server.py", background=True)
    wait_until(lambda: ask(origin, box, headers=traffic(box)).status_code == 200, 60, "the server in the sandbox")


def traffic(box: Sandbox) -> dict[str, str]:
    return {} if box.traffic_access_token is None else {"e2b-traffic-access-token": box.traffic_access_token}


def ask(
    origin: Origin,
    box: Sandbox,
    path: str = "/",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    **options: object,
) -> httpx.Response:
    host = {"host": f"8000-{box.sandbox_id}.sbx.test"}
    return httpx.request(
        method, origin.url + path, headers={**host, **(headers or {})}, trust_env=False, timeout=30, **options
    )


@pytest.fixture(scope="module")
def public(origin: Origin, box: Sandbox) -> Iterator[Sandbox]:
    serve(box, origin)
    yield box
    box.commands.run("pkill -f server.py")


def test_a_port_is_asked_by_its_name_as_if_it_were_there(origin: Origin, public: Sandbox) -> None:
    for path in ("/", "/files?path=x&signature=y", "/health", "/sandboxes", "/a%2Fb//c?x=1&x=2"):
        told = ask(origin, public, path).json()
        assert told["path"] == path
        assert told["headers"]["host"] == f"8000-{public.sandbox_id}.sbx.test"
    assert ask(origin, public, method="POST", content=bytes(8 << 20)).json()["size"] == 8 << 20


def test_headers_of_the_platform_do_not_reach_the_server_nor_are_any_added_to_its_answer(
    origin: Origin, public: Sandbox
) -> None:
    given = {"e2b-sandbox-id": public.sandbox_id, "e2b-sandbox-port": "8000", "x-access-token": "t", "x-own": "stays"}
    answer = ask(origin, public, headers=given)
    seen = {name.lower() for name in answer.json()["headers"]}
    assert "x-own" in seen
    assert not seen & {"e2b-sandbox-id", "e2b-sandbox-port", "x-access-token", "e2b-traffic-access-token"}
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["set-cookie"] == "a=b", "for the port's own name alone"


def test_a_port_asked_by_headers_shares_an_address_and_sets_no_cookies_there(origin: Origin, public: Sandbox) -> None:
    headers = {"e2b-sandbox-id": public.sandbox_id, "e2b-sandbox-port": "8000"}
    answer = httpx.get(origin.url, headers=headers, trust_env=False, timeout=30)
    assert answer.json()["headers"]["host"] == "localhost:8000"
    assert "set-cookie" not in answer.headers


def test_a_server_that_speaks_no_http_is_502(origin: Origin, public: Sandbox) -> None:
    program = (
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 8002)) as server:\n"
        "    while True:\n"
        "        with server.accept()[0] as one: one.sendall(b'220 not what was asked for\\r\\n'); one.recv(9999)\n"
    )
    public.files.write("silly.py", program)
    public.commands.run("python3 silly.py", background=True)
    here = {"host": f"8002-{public.sandbox_id}.sbx.test"}

    def answer() -> httpx.Response:
        return httpx.get(origin.url, headers=here, trust_env=False, timeout=30)

    wait_until(lambda: "port is not open" not in answer().text, 20, "the server in the sandbox")
    told = answer()
    assert told.status_code == 502
    assert "HTTP" in told.json()["message"]


async def test_a_websocket_goes_through(origin: Origin, public: Sandbox) -> None:
    url = urlsplit(origin.url)
    here = {"host": url.hostname, "port": url.port, "proxy": None}
    async with asyncio.timeout(20):
        async with connect(f"ws://8000-{public.sandbox_id}.sbx.test/", **here) as one:
            assert await one.recv() == b"hello"
        for name, status in ((f"8001-{public.sandbox_id}", 502), ("8000-sbxnothing", 502), ("api", 403)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://{name}.sbx.test/", **here)
            assert refused.value.response.status_code == status


def test_a_sandbox_that_is_not_public_wants_its_token_and_keeps_it_from_the_server(origin: Origin) -> None:
    network = {"allow_public_traffic": False, "mask_request_host": "masked.test:${PORT}"}
    one = Sandbox.create(timeout=120, network=network, **origin.options)
    try:
        serve(one, origin)
        for wrong in ({}, {"e2b-traffic-access-token": "0" * 64}):
            assert ask(origin, one, headers=wrong).status_code == 403
        told = ask(origin, one, headers=traffic(one)).json()["headers"]
        assert told["host"] == "masked.test:8000"
        assert "e2b-traffic-access-token" not in {name.lower() for name in told}
        again = Sandbox.connect(one.sandbox_id, **origin.options)
        assert again.traffic_access_token == one.traffic_access_token
        one.pause()
        assert ask(origin, one, headers=traffic(one)).status_code == 502
    finally:
        one.kill()


def test_a_request_wakes_what_is_to_be_waked(origin: Origin) -> None:
    one = Sandbox.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True}, **origin.options)
    try:
        serve(one, origin)
        one.pause()
        assert ask(origin, one).status_code == 200
    finally:
        one.kill()
