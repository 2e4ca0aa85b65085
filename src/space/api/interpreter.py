"""The code interpreter in sandboxes of its template: asked over a port of theirs. What it says is a guest's."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from space.control.interpreter import dial_interpreter
from space.control.nodes import Node
from space.errors import (
    GuestError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    SpaceError,
)
from space.node.ports.exchange import Server

CONTEXTS = "/contexts"
CALL_S = 120.0
"""From the request to the head of its answer, as a kernel may have to be started on a machine that has much to do; and
from there to its end, if it is no cell.
"""
SILENCE_S = 60.0
"""While a cell runs there is a sign of life every few seconds."""
ANSWER_BYTES_MAX = 256 * 1024
REASON_CHARS_MAX = 300
_HEADERS = [(b"host", b"localhost:49999"), (b"content-type", b"application/json"), (b"connection", b"close")]


async def call(node: Node, sandbox_id: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return what the interpreter answers, as JSON; None where it says nothing.

    Raises ``NotFound`` (``context-not-found``), ``InvalidRequest`` (``context-refused``), ``GuestError``
    (``bad-answer``) for what makes no sense, and as ``dial_interpreter``.
    """
    try:
        async with _asked(node, sandbox_id, method, path, body) as answer, asyncio.timeout(CALL_S):
            text = await _bounded(answer)
    except TimeoutError as error:
        raise _no_answer(f"did not answer within {CALL_S:g} s") from error
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GuestError("The code interpreter answered with what is not JSON.", code="bad-answer") from error


@contextlib.asynccontextmanager
async def execute(
    node: Node, sandbox_id: str, context: str, body: Mapping[str, Any]
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Have a cell run, and give what is said of it, NDJSON, as it comes; who leaves before its end interrupts it.

    Raises as ``call``, and ``SpaceError`` when what comes is not whole.
    """
    async with _asked(node, sandbox_id, "POST", "/execute", {**body, "context_id": context}) as answer:
        yield _alive(answer)


@contextlib.asynccontextmanager
async def _asked(
    node: Node, sandbox_id: str, method: str, path: str, body: Mapping[str, Any] | None
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Ask, and give the body of a good answer."""
    data = b"" if body is None else json.dumps(body).encode()
    tunnel = await dial_interpreter(node, sandbox_id, for_contexts=path != CONTEXTS)
    try:
        server = Server(tunnel)
        try:
            async with asyncio.timeout(CALL_S):
                await server.ask(method, path.encode("ascii"), [*_HEADERS, (b"content-length", b"%d" % len(data))])
                await server.give(data, last=True)
                response = await server.head()
                if not 200 <= response.status_code < 300:
                    raise _refusal(path, response.status_code, await _bounded(server.body()))
        except TimeoutError as error:
            raise _no_answer(f"did not answer within {CALL_S:g} s") from error
        yield server.body()
    finally:
        await tunnel.close()


async def _alive(answer: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                chunk = await anext(answer)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _no_answer(f"was silent for {SILENCE_S:g} s") from error
        yield chunk


async def _bounded(answer: AsyncIterator[bytes]) -> bytes:
    text = b""
    async for chunk in answer:
        text += chunk
        if len(text) > ANSWER_BYTES_MAX:
            raise GuestError("The code interpreter's answer is too large.", code="bad-answer")
    return text


def _no_answer(what: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"The code interpreter {what}.", code="port-timeout")


def _refusal(path: str, status: int, text: bytes) -> SpaceError:
    """Return what a refusal is here. Its words are a guest's: few of them, and nothing but letters."""
    told = text.decode("utf-8", "replace")[:REASON_CHARS_MAX]
    reason = "".join(letter if letter.isprintable() else " " for letter in told).strip() or "no reason given"
    match status:
        case 400:
            return InvalidRequest(f"The code interpreter refused: {reason}", code="context-refused")
        case 404:
            return NotFound("There is no such context in this sandbox.", code="context-not-found")
        case 429:
            if path == "/execute":
                return LimitExceeded(f"The code interpreter refused: {reason}", code="too-many-cells")
            return LimitExceeded(f"The code interpreter refused: {reason}", code="too-many-contexts")
        case _:
            return GuestError(f"The code interpreter answered {status}: {reason}", code="bad-answer")
