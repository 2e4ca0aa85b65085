"""Routes of the api alone: lifecycle of machines, what the host offers, health."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from space.errors import HostError, NotFound, SpaceError, Unavailable
from space.node.call import NDJSON_TYPE, Call
from space.node.metrics import CONTENT_TYPE
from space.node.parse import parse_machine, parse_object
from space.node.tokens import KEY_BYTES_MAX

ASK_S = 30.0
DOCTOR_S = 60.0


async def healthz(call: Call) -> None:
    """The process answers."""
    await call.answer({"ok": True})


async def readyz(call: Call) -> None:
    """The broker answers and all machines of a former node were found."""
    if not call.node.machines.adopted:
        raise Unavailable("The node is still looking for its machines.", code="not-ready")
    await call.node.broker.call("machines", timeout_s=2.0)
    await call.answer({"ok": True, "token_key": call.node.tokens.has_key})


async def metrics(call: Call) -> None:
    await call.answer_bytes(call.node.metrics.render(), CONTENT_TYPE)


async def set_token_key(call: Call) -> None:
    call.node.tokens.set_key(await call.body(KEY_BYTES_MAX))
    await call.answer_empty()


async def templates(call: Call) -> None:
    await call.answer(_listed(await call.node.broker.call("templates", timeout_s=ASK_S), "templates"))


async def doctor(call: Call) -> None:
    await call.answer(_listed(await call.node.broker.call("doctor", timeout_s=DOCTOR_S), "checks"))


async def list_machines(call: Call) -> None:
    await call.answer({"machines": await call.node.machines.list()})


async def inspect(call: Call) -> None:
    await call.answer(await call.node.machines.inspect(call.params["sandbox"]))


async def boot(call: Call) -> None:
    request = parse_machine(await call.json())
    await _lifecycle(call, "boot", call.node.machines.boot(call.params["sandbox"], request))


async def destroy(call: Call) -> None:
    await _lifecycle(call, "destroy", call.node.machines.destroy(call.params["sandbox"]))


async def act(call: Call) -> None:
    """Pause, resume, suspend, wake, stop or start. The body may tell anew what the machine's guest needs to know."""
    machines = call.node.machines
    verbs: dict[str, Callable[[str, dict[str, Any] | None], Awaitable[dict[str, Any]]]] = {
        "pause": machines.pause,
        "resume": machines.resume,
        "suspend": machines.suspend,
        "wake": machines.wake,
        "stop": machines.stop,
        "start": machines.start,
    }
    verb = call.params["verb"]
    if verb not in verbs:
        raise NotFound("There is no such route.", code="no-such-route")
    body = await call.body()
    request = parse_machine(parse_object(body)) if body and body != b"{}" else None
    await _lifecycle(call, verb, verbs[verb](call.params["sandbox"], request))


async def events(call: Call) -> None:
    """All machines first, then what happens to them, a line each, until the client goes or is too slow."""
    listening = call.node.events.listen()
    first = {"machines": await call.node.machines.list()}
    await call.begin(200, {"content-type": NDJSON_TYPE})
    await call.write(_line(first))
    async with call.while_connected():
        async for event in listening:
            await call.write(_line(event))
    await call.finish()


async def usage(call: Call) -> None:
    """What the sandbox uses, seen from the host and, when it is ready, from inside."""
    sandbox = call.params["sandbox"]
    seen = await call.node.machines.inspect(sandbox)
    if seen.get("state") == "absent":
        raise NotFound("There is no such sandbox on this node.", code="sandbox-not-found")
    inside: dict[str, Any] | None = None
    try:
        inside = await call.node.machines.guest(sandbox).request("metrics", timeout_s=5.0)
    except SpaceError:
        inside = None  # Paused, suspended, stopped: the host's view is all there is.
    await call.answer({"at": time.time(), "state": seen.get("state"), "host": seen.get("usage"), "guest": inside})


async def _lifecycle(call: Call, verb: str, work: Awaitable[dict[str, Any]]) -> None:
    began = time.monotonic()
    answer = await work
    call.node.metrics.lifecycle_took(verb, time.monotonic() - began)
    await call.answer(answer)


def _listed(answer: Any, name: str) -> dict[str, Any]:
    if isinstance(answer, dict):
        return answer if name in answer else {name: next(iter(answer.values()), [])}
    if isinstance(answer, list):
        return {name: answer}
    raise HostError(f"The broker's answer has no list of {name}.")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
