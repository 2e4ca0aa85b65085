"""The data plane: what a request to one sandbox asks for, by port and path, and whether its token allows it."""

from collections.abc import Awaitable, Callable

from space.control import usage
from space.e2b import errors, files, filesystem, keys, live, ports, process
from space.e2b.call import Call
from space.e2b.environment import variables
from space.e2b.routing import ENVD_PORT, Target
from space.errors import Conflict, NotFound, RequestError, SpaceError, Unauthenticated
from space.model.sandbox import Sandbox

Handler = Callable[[Call], Awaitable[None]]
METRICS_S = 10.0
MIB = 1024 * 1024


async def health(call: Call) -> None:
    await call.answer_empty()


async def envs(call: Call) -> None:
    """The variables that every process gets. Only who has the sandbox's token sees them."""
    await call.answer({**variables(call.sandbox), **call.sandbox.env})


async def metrics(call: Call) -> None:
    """What the sandbox uses now, as it and its host see it."""
    told = await call.control.node.call("GET", f"/v1/sandboxes/{call.sandbox.id}/metrics", METRICS_S)
    host, inside = told.get("host") or {}, told.get("guest") or {}
    resources = call.sandbox.resources
    await call.answer(
        {
            "ts": int(told["at"]),
            "cpu_count": max(1, round(resources.cpus)),
            "cpu_used_pct": await _cpu_used_pct(call, told["at"], host.get("cpu_s")),
            "mem_total": resources.memory_mib * MIB,
            "mem_used": int(inside.get("memory_used") or (host.get("memory_mib") or 0) * MIB),
            "mem_cache": 0,
            "disk_used": int((host.get("disk_mib") or 0) * MIB),
            "disk_total": resources.disk_mib * MIB,
        }
    )


async def _cpu_used_pct(call: Call, at: float, cpu_s: float | None) -> float:
    """Return the share of one processor used since the last sample, in percent."""
    samples = await usage.history(call.control, call.sandbox.id, None, None, None)
    if not samples or cpu_s is None or samples[-1].cpu_s is None:
        return 0.0
    passed = at - samples[-1].at.timestamp()
    return round(max(0.0, cpu_s - samples[-1].cpu_s) / passed * 100, 2) if passed > 0 else 0.0


PUBLIC: dict[tuple[str, str], Handler] = {("GET", "/health"): health}
SIGNED: dict[tuple[str, str], Handler] = {("GET", "/files"): files.read, ("POST", "/files"): files.write}
"""For who has the token, or a URL that is signed with it."""
WITH_TOKEN: dict[tuple[str, str], Handler] = {
    ("GET", "/envs"): envs,
    ("GET", "/metrics"): metrics,
    **{("POST", f"/process.Process/{name}"): handler for name, handler in process.METHODS.items()},
    **{("POST", f"/filesystem.Filesystem/{name}"): handler for name, handler in filesystem.METHODS.items()},
}


def route_of(call: Call, target: Target) -> str:
    """Return what the log calls this request."""
    if target.port != ENVD_PORT:
        return "port"
    asked = (call.method, call.path)
    known = asked in PUBLIC or asked in SIGNED or asked in WITH_TOKEN
    return f"{call.method} {call.path}" if known else "envd"


async def serve(call: Call, target: Target) -> None:
    """Answer a request for the data plane."""
    if call.method == "OPTIONS" and target.port == ENVD_PORT:
        await call.answer_empty()
        return
    sandbox_id = target.sandbox_id
    if sandbox_id is None:
        sandbox_id = await _signer(call)
    if target.port != ENVD_PORT:
        await ports.pass_on(call, await live.running(call.control, sandbox_id), target.port)
        return
    try:
        await _serve_envd(call, sandbox_id)
    except Conflict as error:
        if error.code != "wrong-state" or call.status:
            raise
        # It fell asleep after it was seen running.
        raise errors.gone(sandbox_id) from error


async def _serve_envd(call: Call, sandbox_id: str) -> None:
    asked = (call.method, call.path)
    handler = PUBLIC.get(asked)
    if handler is None and asked in SIGNED:
        handler = SIGNED[asked]
        await _known(call, sandbox_id)
        _check_signature(call, sandbox_id)
    elif handler is None:
        handler = WITH_TOKEN.get(asked)
        await _known(call, sandbox_id)
        call.parts.tokens.check_access(sandbox_id, call.headers.get("x-access-token"))
        if handler is None:
            raise _nothing(call)
    call.target_sandbox = await live.running(call.control, sandbox_id)
    await handler(call)


async def _known(call: Call, sandbox_id: str) -> None:
    """Raise ``sandbox-gone`` for what is no sandbox, before anything is said of tokens."""
    if call.control.running.get(sandbox_id, call.control.store.generation) is None:
        found: Sandbox | None = await live.find(call.control, sandbox_id)
        if found is None:
            raise errors.gone(sandbox_id)


def _check_signature(call: Call, sandbox_id: str) -> None:
    given = call.headers.get("x-access-token")
    if given is not None:
        call.parts.tokens.check_access(sandbox_id, given)
        return
    expected = _signature(call, sandbox_id)
    keys.check_signature(call.query.get("signature"), expected, call.query.get("signature_expiration"))


async def _signer(call: Call) -> str:
    given = call.query.get("signature", "")
    found = await live.signer(call.control, lambda sandbox_id: keys.same(given, _signature(call, sandbox_id)))
    if found is None:
        raise Unauthenticated("invalid signature")
    return found


def _signature(call: Call, sandbox_id: str) -> str:
    operation = "read" if call.method == "GET" else "write"
    query = call.query
    return keys.signature(
        query.get("path", ""),
        operation,
        query.get("username", ""),
        call.parts.tokens.access(sandbox_id),
        query.get("signature_expiration"),
    )


def _nothing(call: Call) -> SpaceError:
    service = call.path.startswith(("/process.Process/", "/filesystem.Filesystem/"))
    if service:
        return RequestError("This method is not there.", code="unimplemented")
    return NotFound("There is nothing at this path.")
