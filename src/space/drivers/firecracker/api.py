"""What is asked of a Firecracker, through the socket of its API (HTTP; read by `h11`).

Firecracker is on the guest's side of the boundary: a guest may have taken it over. So every answer is bounded, in size
and in time, and nothing is believed but a few words.
"""

import asyncio
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h11
import structlog

from space.errors import HostError, MachineLost

ANSWER_S = 10.0
HEAD_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 64 * 1024
REASON_CHARS_MAX = 200

log = structlog.get_logger()


async def ask(
    address: Path, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_S
) -> Any:
    """Return the answer, None where it has no body. Raise `MachineLost` when no Firecracker listens there, and
    `HostError` when it refuses, does not answer or makes no sense.
    """
    data = b"" if body is None else json.dumps(body).encode()
    try:
        async with asyncio.timeout(timeout_s):
            status, answer = await _exchange(address, _request(method, path, data), data)
        found = json.loads(answer) if answer else None
    except TimeoutError as error:
        raise HostError("The virtual machine's program does not answer.", code="machine-silent") from error
    except OSError as error:
        raise MachineLost from error
    except (h11.RemoteProtocolError, ValueError, RecursionError) as error:
        raise HostError("The virtual machine's program answers nonsense.", code="machine-silent") from error
    if not 200 <= status < 300:
        log.warning("monitor-refused", command=path, reason=_reason(found))
        raise HostError(f"The virtual machine's program refused {path}.", code="monitor-refused")
    return found


async def state(address: Path) -> str:
    """Return Firecracker's word for the state of the machine: "Not started", "Running" or "Paused"."""
    match await ask(address, "GET", "/"):
        case {"state": str(word)}:
            return word
        case _:
            raise HostError("The virtual machine's program answers nonsense.", code="machine-silent")


def _request(method: str, path: str, data: bytes) -> h11.Request:
    headers = [("Host", "localhost"), ("Accept", "application/json"), ("Content-Length", str(len(data)))]
    if data:
        headers.append(("Content-Type", "application/json"))
    return h11.Request(method=method, target=path, headers=headers)


async def _exchange(address: Path, request: h11.Request, data: bytes) -> tuple[int, bytes]:
    # By way of the descriptor, as the path may be longer than such addresses can be. SAFETY: the directory is the
    # machine's own, so its last name may be anything by now: a link is not followed, and only a socket is connected to.
    found = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise MachineLost
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{found}")
    finally:
        os.close(found)
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        for event in (request, h11.Data(data=data), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        return await _answer(connection, reader)
    finally:
        writer.transport.abort()


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, body = 0, b""
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                if not (piece := await reader.read(BODY_BYTES_MAX)) and not status:
                    raise ConnectionResetError
                connection.receive_data(piece)
            case h11.Response():
                status = event.status_code
            case h11.Data():
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    raise ValueError
            case h11.EndOfMessage():
                return status, body
            case h11.InformationalResponse():
                continue
            case _:
                raise ConnectionResetError


def _reason(answer: object) -> str:
    match answer:
        case {"fault_message": str(text)}:
            return text[:REASON_CHARS_MAX]
        case _:
            return ""
