"""Routes of the api alone: lifecycle of machines, what the host offers, health."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable
from typing import Any

from space.errors import HostError, NotFound, SpaceError, Unavailable
from space.node.call import NDJSON_TYPE, Call
from space.node.http_commands import describe
from space.node.metrics import CONTENT_TYPE
from space.node.parse import invalid, parse_condition, parse_kind, parse_machine, parse_object
from space.node.spares import HOSTNAME
from space.node.tokens import KEY_BYTES_MAX

ASK_S = 30.0
DOCTOR_S = 60.0
FIGURES_S = 3.0
GC_S = 180.0
WARM_S = 170.0


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
    """Figures of this node and, asked by a verb, of its broker."""
    try:
        of_broker = await call.node.broker.call("figures", timeout_s=FIGURES_S)
    except SpaceError:
        of_broker = None
    await call.answer_bytes(call.node.metrics.render(of_broker), CONTENT_TYPE)


async def set_token_key(call: Call) -> None:
    call.node.tokens.set_key(await call.body(KEY_BYTES_MAX))
    await call.answer_empty()


async def templates(call: Call) -> None:
    await call.answer(_listed(await call.node.broker.call("templates", timeout_s=ASK_S), "templates"))


async def warm_template(call: Call) -> None:
    """Prepare a template for machines of one size, or wait until somebody else has."""
    body = parse_object(await call.body())
    memory_mib = body.get("memory_mib")
    if type(memory_mib) is not int or memory_mib < 1:
        raise invalid("memory_mib", "must be a number of MiB")
    known = {**body, "template_digest": call.params["digest"], "hostname": HOSTNAME, "resources": {}}
    machine, pool, began = parse_machine(known), call.node.pool, time.monotonic()
    driver = machine["driver"] or await pool.drivers.default()
    shape = await pool.drivers.shape(machine["template"], driver, {"memory_mib": memory_mib})
    await pool.prepare(shape, machine["defaults"], WARM_S)
    await call.answer({"timings": {"total": round(time.monotonic() - began, 6)}})


async def doctor(call: Call) -> None:
    await call.answer(_listed(await call.node.broker.call("doctor", timeout_s=DOCTOR_S), "checks"))


async def drivers(call: Call) -> None:
    await call.answer(await call.node.pool.drivers.told())


async def list_machines(call: Call) -> None:
    await call.answer({"machines": await call.node.machines.list()})


async def inspect(call: Call) -> None:
    await call.answer(await call.node.machines.inspect(call.params["sandbox"]))


async def activity(call: Call) -> None:
    """What is going on in each machine, from memory alone."""
    await call.answer({"machines": call.node.machines.activity()})


async def pool(call: Call) -> None:
    await call.answer(call.node.pool.report())


async def collect_garbage(call: Call) -> None:
    """Have the broker look for what belongs to no machine, and remove it unless only a look is wanted."""
    dry_run = (await call.json()).get("dry_run", False)
    if type(dry_run) is not bool:
        raise invalid("dry_run", "must be true or false")
    await call.answer(_listed(await call.node.broker.call("gc", timeout_s=GC_S, dry_run=dry_run), "strays"))


async def list_snapshots(call: Call) -> None:
    """All but the node's own: those that the pool restores spares from, and that builds begin from."""
    listed = await call.node.machines.snapshots.list()
    await call.answer({"snapshots": [row for row in listed if not _is_own(call, str(row.get("snapshot")))]})


async def drop_snapshot(call: Call) -> None:
    snapshot = call.params["snapshot"]
    if _is_own(call, snapshot):
        raise NotFound("There is no such snapshot on this node.", code="snapshot-not-found")
    await call.node.machines.snapshots.drop(snapshot)
    await call.answer({})


async def snapshot(call: Call) -> None:
    kind = parse_kind(await call.json())
    work = call.node.machines.snapshot(call.params["sandbox"], call.params["snapshot"], kind)
    await call.answer(await _timed(call, "snapshot", work))


async def boot(call: Call) -> None:
    """Bring a machine up. The answer shows the commands that it goes on with."""
    request = parse_machine(await call.json())
    answer = await _timed(call, "boot", call.node.machines.boot(call.params["sandbox"], request))
    commands = call.node.commands
    await call.answer({**answer, "commands": [describe(commands.get(one)) for one in answer["commands"]]})


async def destroy(call: Call) -> None:
    condition = parse_condition(await _optional_json(call))
    await call.answer(await _timed(call, "destroy", call.node.machines.destroy(call.params["sandbox"], **condition)))


async def enter_again(call: Call) -> None:
    """Start again what the template starts, where it has ended. ``started`` is null where no check could say so."""
    await call.answer({"started": await call.node.machines.enter_again(call.params["sandbox"])})


async def act(call: Call) -> None:
    """Pause, resume, suspend, wake, stop or start.

    The body may say under which condition; of ``start`` it may tell anew what the machine's guest needs to know.
    """
    machines, sandbox, verb = call.node.machines, call.params["sandbox"], call.params["verb"]
    body = await _optional_json(call)
    work: Awaitable[dict[str, Any]]
    match verb:
        case "pause":
            work = machines.pause(sandbox, **parse_condition(body))
        case "suspend":
            work = machines.suspend(sandbox, **parse_condition(body))
        case "stop":
            work = machines.stop(sandbox, **parse_condition(body))
        case "resume":
            work = machines.resume(sandbox)
        case "wake":
            work = machines.wake(sandbox)
        case "start":
            work = machines.start(sandbox, parse_machine(body) if body else None)
        case _:
            raise NotFound("There is no such route.", code="no-such-route")
    await call.answer(await _timed(call, verb, work))


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


async def _timed(call: Call, verb: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    answer = await work
    call.node.metrics.lifecycle_took(verb, time.monotonic() - began)
    return answer


async def _optional_json(call: Call) -> dict[str, Any]:
    body = await call.body()
    return parse_object(body) if body else {}


def _is_own(call: Call, snapshot: str) -> bool:
    return call.node.pool.is_own(snapshot) or call.node.builds.cache.is_own(snapshot)


def _listed(answer: Any, name: str) -> dict[str, Any]:
    if isinstance(answer, dict):
        return answer if name in answer else {name: next(iter(answer.values()), [])}
    if isinstance(answer, list):
        return {name: answer}
    raise HostError(f"The broker's answer has no list of {name}.")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
