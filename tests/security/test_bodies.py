"""Bodies of requests that are never finished are bounded together: they cost no more memory, and nobody small is kept out."""

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from space.listening import BODIES_BYTES_MAX
from tests.client import Api, wait_until
from tests.installation import Installation

MIB = 1024 * 1024
BODY = b'{"command": "true", "stdin_text": "' + b"x" * (4 * MIB - 4096)
CLIENTS = 2 * BODIES_BYTES_MAX // len(BODY)
# What a server needs beside the bodies: their parts, what waits in its sockets, and what malloc keeps.
BESIDE_MIB = 220


@contextlib.contextmanager
def unfinished_bodies(url: str, sandbox: str, secret: str) -> Iterator[list[socket.socket]]:
    """Many clients that each have sent nearly all of a large body."""
    to = urlsplit(url)
    head = (
        f"POST /v1/sandboxes/{sandbox}/exec HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        f"content-length: {len(BODY) + 10}\r\n\r\n"
    )
    with contextlib.ExitStack() as clients:
        opened = []
        for _ in range(CLIENTS):
            client = clients.enter_context(socket.create_connection((to.hostname, to.port), timeout=30))
            with contextlib.suppress(ConnectionError):
                client.sendall(head.encode() + BODY)
            opened.append(client)
        yield opened


def answers(clients: list[socket.socket]) -> list[bytes]:
    """The beginnings of those answers that have come."""
    found = []
    for client in clients:
        client.settimeout(0)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            found.append(client.recv(4096))
    return found


@pytest.mark.parametrize("process", ["api", "node"])
def test_unfinished_bodies_cost_bounded_memory_and_keep_nobody_out(
    installation: Installation, api: Api, shared: str, process: str
) -> None:
    secret, url = installation.key, installation.url
    if process == "node":
        access = api.call("POST", f"/v1/sandboxes/{shared}/access").json()
        secret, url = access["token"], access["url"]
    before = installation.memory_mib(process)
    with unfinished_bodies(url, shared, secret) as clients:
        wait_until(lambda: any(b"too-many-bodies" in answer for answer in answers(clients)), what="a refusal")
        assert installation.memory_mib(process) < before + BODIES_BYTES_MAX // MIB + BESIDE_MIB
        headers = {"Authorization": f"Bearer {secret}"}
        small = httpx.post(f"{url}/v1/sandboxes/{shared}/exec", json={"argv": ["true"]}, headers=headers, timeout=30)
        assert small.is_success, small.text
    wait_until(
        lambda: (
            httpx.post(
                f"{url}/v1/sandboxes/{shared}/exec",
                json={"argv": ["true"], "stdin_text": "x" * MIB},
                headers=headers,
                timeout=30,
            ).is_success
        ),
        what="room for a large body again",
    )
