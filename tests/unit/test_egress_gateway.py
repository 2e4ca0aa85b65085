"""The gateway's sockets, where the host has run out of something."""

import asyncio
import contextlib
import os
import resource
import socket
import time
from pathlib import Path

from space.egress.attachments import Attachments
from space.egress.audit import Audit
from space.egress.certificates import Authority, upstream_context
from space.egress.gateway import Gateway
from space.egress.links import Links
from space.egress.metrics import Metrics
from space.egress.pipeline import Pipeline
from space.egress.resolve import Resolver
from space.egress.tunnels import Tunnels

WATCHED_S = 0.4


async def test_without_descriptors_connections_wait_and_are_taken_when_there_are_some(tmp_path: Path) -> None:
    tunnels = Tunnels()
    pipeline = Pipeline(Links(tmp_path), Attachments(lambda *_: None), Audit(tmp_path), tunnels, Metrics())
    authority = Authority.__new__(Authority)  # nobody gets so far as to need one
    gateway = Gateway(pipeline, Resolver(["127.0.0.1"], ()), authority, lambda: upstream_context(None))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        filling = stack.enter_context(contextlib.ExitStack())
        listener.settimeout(0)
        running = asyncio.get_running_loop().create_task(gateway.run([listener]))
        await asyncio.sleep(0)
        clients = [stack.enter_context(socket.socket()) for _ in range(5)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (_highest_descriptor(), hard))
        try:
            with contextlib.suppress(OSError):
                while True:  # what is free below the limit
                    filling.callback(os.close, os.dup(clients[0].fileno()))
            for client in clients:
                client.settimeout(0)
                with contextlib.suppress(BlockingIOError):
                    client.connect(listener.getsockname())
            began = time.process_time()
            await asyncio.sleep(WATCHED_S)
            assert time.process_time() - began < WATCHED_S / 2, "it asks for what it cannot have again and again"
        finally:
            filling.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(5):  # nobody has a link here, so what is taken is closed
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        running.cancel()
        await asyncio.wait({running})


def _highest_descriptor() -> int:
    return max(int(one.name) for one in Path("/proc/self/fd").iterdir())
