"""E2B's sandboxes on ours: pause is suspend, or stop where no memory is to be kept; kill is delete."""

from datetime import timedelta
from typing import Any

from space.control import contents, operations, sandboxes, verbs
from space.control.control import Control
from space.control.creation import NewSandbox, request_create
from space.control.once import Once, fingerprint
from space.control.readiness import wait_ready
from space.control.volumes import WantedVolume
from space.e2b import bodies, listing, network, rules, shapes, templates
from space.e2b.call import Call
from space.e2b.live import GONE
from space.e2b.ports import network_of
from space.e2b.routing import id_of
from space.errors import Conflict, InvalidRequest, NotFound, Unavailable
from space.model.operation import Operation, OperationState
from space.model.sandbox import OnTimeout, Sandbox, State
from space.model.volume import check_apart, check_path
from space.store.paging import Position

READY_S = 120.0
"""How long a request waits for the sandbox that it is about to be ready, or gone."""
SHORTEST_S = 0.001
IDEMPOTENCY_KEY_MAX = 255


async def create(call: Call) -> None:
    """Make a sandbox, and answer when it can be used."""
    body = await bodies.read(call, bodies.NewSandbox)
    reference = await templates.reference(call.control, call.project_id, body.templateID)
    config = _network(body)
    placed = rules.parse(config.rules) if config is not None else []
    granted = await rules.grants(call.control, call.project_id, placed)
    wanted = NewSandbox(
        template=reference,
        metadata=body.metadata,
        env=body.envVars,
        timeout_s=max(float(body.timeout), SHORTEST_S),
        on_timeout=_on_timeout(body),
        wake_on_request=body.autoResume.enabled,
        policy=network.policy(config, placed, allow=body.allow_internet_access),
        grants=tuple(granted),
        volumes=_volumes(body),
        extras=network.extras(config, allow=body.allow_internet_access),
    )
    sandbox, operation = await request_create(call.control, call.project_id, wanted, _once(call, body, wanted))
    sandbox = await _finished(call.control, sandbox, operation)
    await call.answer(shown(call, sandbox), 201)


async def list_(call: Call) -> None:
    """Sandboxes that run or are paused, by pages."""
    query = call.query
    states, metadata = listing.states(query), listing.metadata(query)

    async def page(after: Position | None) -> list[Sandbox]:
        return await sandboxes.page(
            call.control, call.project_id, states=states, metadata=metadata, after=after, limit=listing.PAGE
        )

    found = [one for one in await listing.everything(page) if not contents.is_one(one) and listing.matches(query, one)]
    await listing.answer(call, found, shapes.listed)


async def get(call: Call) -> None:
    found = await owned(call)
    access, domain = call.parts.tokens.access(found.id), call.control.settings.e2b_domain
    told = shapes.detail(found, access, domain, internet=network.allowed(found))
    await call.answer(told | ({"network": config} if (config := network_of(found)) else {}))


async def kill(call: Call) -> None:
    """Delete a sandbox, whatever its state; answered when it is gone."""
    found = await owned(call)
    sandbox, operation = await verbs.request(call.control, call.project_id, found.id, "delete")
    await _finished(call.control, sandbox, operation)
    await call.answer_empty()


async def set_timeout(call: Call) -> None:
    """Count its time anew from now; with 0 it is over now."""
    body, found = await bodies.read(call, bodies.Timeout), await owned(call)
    if body.timeout > 0:
        await sandboxes.change(call.control, call.project_id, found.id, {"timeout_s": float(body.timeout)})
    else:
        sandbox, operation = await verbs.request(call.control, call.project_id, found.id, found.on_timeout)
        await _finished(call.control, sandbox, operation)
    await call.answer_empty()


async def connect(call: Call) -> None:
    """Make a paused sandbox go on, or let a running one run longer; never shorter."""
    body, found = await bodies.read(call, bodies.Connect), await owned(call)
    timeout_s = float(bodies.TIMEOUT_S if body.timeout is None else max(body.timeout, 1))
    status = 200
    if found.state != State.RUNNING:
        status = 201
        found = await _go_on(call, found, memory=body.memory is not False)
    ends = call.control.now() + timedelta(seconds=timeout_s)
    if status == 201 or (found.deadline_at is not None and found.deadline_at < ends):
        found = await sandboxes.change(call.control, call.project_id, found.id, {"timeout_s": timeout_s})
    await call.answer(shown(call, found), status)


async def resume(call: Call) -> None:
    """As ``connect``, for a paused sandbox alone."""
    body, found = await bodies.read(call, bodies.Resume), await owned(call)
    if found.state == State.RUNNING:
        raise Conflict(f"Sandbox {found.id} is already running")
    await _go_on(call, found, memory=body.memory is not False)
    wanted: dict[str, Any] = {"timeout_s": float(max(body.timeout, 1))}
    if body.autoPause is not None:
        wanted["on_timeout"] = "suspend" if body.autoPause else "delete"
    found = await sandboxes.change(call.control, call.project_id, found.id, wanted)
    await call.answer(shown(call, found), 201)


async def refresh(call: Call) -> None:
    """Let a running sandbox run at least so much longer from now."""
    body, found = await bodies.read(call, bodies.Refresh), await owned(call)
    ends = call.control.now() + timedelta(seconds=body.duration)
    if found.deadline_at is not None and found.deadline_at < ends:
        await sandboxes.change(call.control, call.project_id, found.id, {"timeout_s": float(body.duration)})
    await call.answer_empty()


async def pause(call: Call) -> None:
    """Suspend a sandbox; without its memory, stop it."""
    body, found = await bodies.read(call, bodies.Pause), await owned(call)
    if found.state in shapes.PAUSED:
        raise Conflict(f"Sandbox {found.id} is already paused")
    verb = "stop" if body.memory is False else "suspend"
    sandbox, operation = await verbs.request(call.control, call.project_id, found.id, verb)
    await _finished(call.control, sandbox, operation)
    await call.answer_empty()


async def update_network(call: Call) -> None:
    """Replace what may leave a sandbox, and what is added to it."""
    body, found = await bodies.read(call, bodies.NetworkUpdate), await owned(call)
    await network.replace(call, found, body)
    await call.answer_empty()


async def owned(call: Call) -> Sandbox:
    """Return the sandbox of the path if it is the caller's, and is one to E2B."""
    sandbox_id = id_of(call.params["sandbox"])
    try:
        found = await sandboxes.get(call.control, call.project_id, sandbox_id)
    except NotFound:
        found = None
    if found is None or found.state in GONE:
        raise NotFound(f"Sandbox {sandbox_id} not found")
    return found


def shown(call: Call, found: Sandbox) -> dict[str, Any]:
    """Return a sandbox with its tokens."""
    tokens = call.parts.tokens
    traffic = tokens.traffic(found.id) if network_of(found).get("allowPublicTraffic") is False else None
    return shapes.sandbox(found, tokens.access(found.id), traffic, call.control.settings.e2b_domain)


def _network(body: bodies.NewSandbox) -> bodies.Network | None:
    """Return what is said of the network; raise for what no sandbox can have here, rather than leave it out."""
    if body.iam:
        raise InvalidRequest("iam: No identities are given to sandboxes here: grant a secret instead.")
    if body.network is not None:
        network.check(body.network, secure=body.secure)
    return body.network


def _volumes(body: bodies.NewSandbox) -> tuple[WantedVolume, ...]:
    mounts = body.volumeMounts or []
    try:
        check_apart(one.path for one in mounts)
        return tuple(WantedVolume(one.name, check_path(one.path)) for one in mounts)
    except ValueError as error:
        raise InvalidRequest(f"volumeMounts: Paths {error}.") from None


def _on_timeout(body: bodies.NewSandbox) -> OnTimeout:
    """Return what happens when its time is over; raise for what E2B does not allow together."""
    without_memory = body.autoPauseMemory is False
    if without_memory and (not body.autoPause or body.autoResume.enabled):
        raise InvalidRequest("autoPauseMemory=false needs autoPause, and excludes autoResume.")
    if not body.autoPause:
        return "delete"
    return "stop" if without_memory else "suspend"


def _once(call: Call, body: bodies.NewSandbox, wanted: NewSandbox) -> Once | None:
    """Return what a repeated request is known by. Of headers' values it has the names of the secrets they are."""
    key = call.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_MAX or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"An Idempotency-Key is 1 to {IDEMPOTENCY_KEY_MAX} printable characters.")
    said = body.model_dump(mode="json", exclude={"network"})
    said |= {"network": wanted.extras, "grants": [[one.secret, one.terms] for one in wanted.grants]}
    return Once(key, fingerprint("POST", "/e2b/sandboxes", said))


async def _finished(control: Control, sandbox: Sandbox, operation: Operation) -> Sandbox:
    """Return the sandbox when the operation has succeeded and it is ready; raise what it failed with."""
    operation, left = await operations.wait_both(control, sandbox.project_id, operation.id, READY_S)
    if operation.state in {OperationState.FAILED, OperationState.CANCELLED}:
        raise operations.error_of(operation)
    if operation.state != OperationState.SUCCEEDED:
        raise Unavailable("The sandbox takes too long.", code="not-ready")
    return await wait_ready(control, left or sandbox, operation, READY_S)


async def _go_on(call: Call, found: Sandbox, *, memory: bool) -> Sandbox:
    """Make a sandbox that does not run go on, by whatever way applies; without its memory it boots afresh."""
    control = call.control
    if found.operation_id is not None:
        # What is just going on comes to its end first.
        await operations.wait(control, call.project_id, found.operation_id, READY_S)
    for verb in ("wake",) if memory or found.state == State.STOPPED else ("wake", "stop", "wake"):
        sandbox, operation = await verbs.request(control, call.project_id, found.id, verb)
        found = await _finished(control, sandbox, operation)
    return await sandboxes.get(control, call.project_id, found.id)
