"""What tests of a node's ports do again and again: expose one, get a token, ask it, connect to it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import jwt
import pytest
from websockets.sync.client import connect

from space.node.http_ports import SUBPROTOCOL
from tests.node_host import NodeHost
from tests.port_servers import echo_server

DOMAIN = "sandboxes.localhost"
MIB = 1024 * 1024


def expose(host: NodeHost, box: str, port: int, /, **body: Any) -> dict[str, Any]:
    answer = host.local.put(f"/machines/{box}/ports/{port}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def token_for(host: NodeHost, box: str, port: int, *, lasts_s: float = 600, key: str | None = None) -> str:
    key = key or expose(host, box, port)["key"]
    claims = {"sub": box, "scope": "port", "port": port, "key": key, "exp": time.time() + lasts_s}
    return jwt.encode(claims, host.key, algorithm="EdDSA")


def preview(host: NodeHost, box: str, port: int, token: str | None = None, **headers: str) -> httpx.Client:
    """A client of the port's own host."""
    own = {"host": f"{port}-{box}.{DOMAIN}:{host.port}", **headers}
    if token is not None:
        own["x-space-token"] = token
    return httpx.Client(base_url=host.url, headers=own, timeout=30)


def websocket(host: NodeHost, box: str, port: int, path: str = "/", **options: Any) -> Any:
    """Connect to the port's own host, whose name need not resolve."""
    options.setdefault("additional_headers", {"x-space-token": token_for(host, box, port)})
    raw = socket.create_connection(("127.0.0.1", host.port))
    return connect(f"ws://{port}-{box}.{DOMAIN}:{host.port}{path}", sock=raw, **options)


@contextmanager
def tunnel(host: NodeHost, box: str, port: int) -> Iterator[Any]:
    url = f"ws://127.0.0.1:{host.port}/v1/sandboxes/{box}/tunnels/{port}?token={host.token(box)}"
    with connect(url, subprotocols=[SUBPROTOCOL], compression=None, max_size=MIB, close_timeout=1) as client:
        assert json.loads(client.recv(timeout=10)) == {"type": "open"}
        yield client


@pytest.fixture(scope="module")
def echo() -> Iterator[Any]:
    """A server on this host's loopback, which guests of the fake driver share."""
    with echo_server() as server:
        yield server


@pytest.fixture(scope="module")
def port(echo: Any) -> int:
    return echo.server_port


@pytest.fixture
def page(host: NodeHost, box: str, port: int) -> Iterator[httpx.Client]:
    """A client of the echo server's preview, with a token."""
    with preview(host, box, port, token_for(host, box, port)) as client:
        yield client


def headers_of(answer: httpx.Response) -> dict[str, str]:
    return dict(answer.json()["headers"])
