"""Recording a new sandbox: from a template or from a snapshot. Making it is the runner's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from space.control import grants, once, policies, quotas, snapshots, templates, transitions, volumes
from space.control.control import Control
from space.control.grants import NewGrant
from space.control.once import Once
from space.control.operations import new_operation
from space.control.sandboxes import earlier_answer
from space.control.volumes import WantedVolume
from space.errors import Conflict, InvalidRequest
from space.model.ids import new_id
from space.model.operation import Operation
from space.model.sandbox import OnIdle, OnTimeout, Resources, Sandbox, State
from space.model.snapshot import REFERENCE_PREFIX, SnapshotKind
from space.model.template import Resolved, default_resources
from space.store import operations, sandboxes


@dataclass(frozen=True, slots=True)
class NewSandbox:
    """What a caller asks for; the api has checked every field's form. ``resources`` has those that were named."""

    template: str
    resources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    timeout_s: float | None = None
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: float | None = None
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False
    policy: str | dict[str, Any] | None = None
    grants: tuple[NewGrant, ...] = ()
    volumes: tuple[WantedVolume, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What another surface than the api keeps of it; what begins from it has that, too."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a sandbox begins from."""

    digest: str
    driver: str
    resources: Resources
    details: dict[str, Any]
    snapshot_id: str | None = None
    template: Resolved | None = None


async def request_create(
    control: Control, project_id: str, wanted: NewSandbox, asked_once: Once | None = None
) -> tuple[Sandbox, Operation]:
    """Record a new sandbox and the operation that will make it, in one transaction.

    With ``asked_once`` a repeated request gets the first one's sandbox and operation, as they are now.
    """
    origin = await _origin(control, project_id, wanted)
    check_resources(control, origin.resources)
    granted = await grants.prepare(control, project_id, wanted.grants)
    now = control.now()
    sandbox = Sandbox(
        id=new_id("sbx"),
        project_id=project_id,
        template=wanted.template,
        template_digest=origin.digest,
        driver=origin.driver,
        state=State.CREATING,
        resources=origin.resources,
        created_at=now,
        updated_at=now,
        name=wanted.name,
        metadata=wanted.metadata,
        env=grants.environment(granted, wanted.env),
        timeout_s=wanted.timeout_s,
        on_timeout=wanted.on_timeout,
        idle_timeout_s=wanted.idle_timeout_s,
        on_idle=wanted.on_idle,
        wake_on_request=wanted.wake_on_request,
        details=origin.details | ({"extras": dict(wanted.extras)} if wanted.extras else {}),
        snapshot_id=origin.snapshot_id,
        policy=wanted.policy,
    )
    with control.leases.reserve() as seat:
        operation = seat.lease(new_operation(control, sandbox, "create", {"verb": "create"}))
        made = replace(sandbox, operation_id=operation.id)

        def record(connection: Connection) -> tuple[Sandbox, Operation]:
            earlier = once.first(
                connection, asked_once, project_id, subject_id=made.id, operation_id=operation.id, now=now
            )
            if earlier is not None:
                return earlier_answer(connection, earlier)
            if made.snapshot_id is not None:
                # It cannot be dropped any more once this sandbox is there.
                snapshots.usable(connection, project_id, made.snapshot_id)
            quotas.check_room(control, connection)
            quotas.admit(connection, project_id, quotas.of_new(made.resources))
            asked = _with_volumes(connection, made, wanted)
            if origin.template is not None:
                templates.usable(connection, project_id, origin.template)
            if wanted.policy is not None:
                policies.check(control.settings, connection, project_id, wanted.policy)
            sandboxes.add(connection, asked)
            volumes.mount(connection, asked)
            grants.give(connection, granted, made.id)
            operations.add(connection, operation)
            transitions.tell(connection, asked, now)
            return asked, operation

        result = await control.store.write(record)
        if result[1].id == operation.id:
            seat.start(operation, result[0])
            control.changes.notify(project_id)
    return result


def check_resources(control: Control, resources: Resources) -> None:
    """Raise ``InvalidRequest`` when one sandbox may not have so much here."""
    settings = control.settings
    for name, value, most in (
        ("cpus", resources.cpus, settings.cpus_max),
        ("memory_mib", resources.memory_mib, settings.memory_mib_max),
        ("disk_mib", resources.disk_mib, settings.disk_mib_max),
        ("pids", resources.pids, settings.pids_max),
    ):
        if value > most:
            raise InvalidRequest(
                f"resources.{name} may be at most {most:g} here.", field=f"resources.{name}", maximum=most
            )


async def _origin(control: Control, project_id: str, wanted: NewSandbox) -> Origin:
    if wanted.template.startswith(REFERENCE_PREFIX):
        return await _from_snapshot(control, project_id, wanted)
    template = await templates.resolve(control, project_id, wanted.template)
    driver = wanted.driver or control.settings.driver or template.driver or "auto"
    if driver != "auto":
        await control.drivers.check(driver, volumes=bool(wanted.volumes))
    resources = Resources(**{**default_resources(template.defaults), **wanted.resources})
    return Origin(template.digest, driver, resources, _details(template.defaults), template=template)


async def _from_snapshot(control: Control, project_id: str, wanted: NewSandbox) -> Origin:
    """Begin from a snapshot: it fixes what is not named; its disk and, where it has memory, its driver are given."""
    snapshot_id = wanted.template.removeprefix(REFERENCE_PREFIX)
    snapshot = await control.store.read(lambda connection: snapshots.usable(connection, project_id, snapshot_id))
    resources = Resources(**{**asdict(snapshot.resources), **wanted.resources})
    fixed = {"disk_mib": "a disk does not shrink"}
    if snapshot.kind == SnapshotKind.FULL:
        fixed["memory_mib"] = "what runs in it may use all of that"
    for name, why in fixed.items():
        least: int = getattr(snapshot.resources, name)
        if getattr(resources, name) < least:
            raise InvalidRequest(
                f"resources.{name} must be at least {least}, as in the snapshot: {why}.",
                field=f"resources.{name}",
                minimum=least,
            )
    # A driver was not always written down; there was only one then.
    driver = _BEFORE_DRIVERS if snapshot.driver == "auto" else snapshot.driver
    if wanted.driver is not None and wanted.driver != driver:
        raise Conflict(
            f"The snapshot is of a {driver} machine: no {wanted.driver} machine can begin from it, as its disk and "
            "memory have another form. Leave the driver out.",
            code="wrong-driver",
            driver=driver,
        )
    if wanted.volumes and snapshot.kind == SnapshotKind.FULL:
        raise InvalidRequest(
            "What begins with a snapshot's memory has the volumes that are mounted there, and no others. Leave them"
            " out, or take a snapshot of the kind disk.",
            field="volumes",
        )
    await control.drivers.check(driver, volumes=bool(wanted.volumes or snapshot.details.get("volumes")))
    return Origin(snapshot.template_digest, driver, resources, {**_OF_TEMPLATE, **snapshot.details}, snapshot.id)


def _with_volumes(connection: Connection, made: Sandbox, wanted: NewSandbox) -> Sandbox:
    """Return the sandbox with the volumes that it was asked to have; the project is locked."""
    if not wanted.volumes:
        return made
    mounted = volumes.resolve(connection, made.project_id, wanted.volumes)
    return replace(made, details={**made.details, "volumes": mounted})


_OF_TEMPLATE: dict[str, Any] = {"template_defaults": {}}
_BEFORE_DRIVERS = "gvisor"


def _details(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sandbox keeps of its template: what the node is told, and apart from that the template's policy."""
    told = {"template_defaults": templates.without_policy(defaults)}
    return told | ({"template_policy": defaults["policy"]} if defaults.get("policy") else {})
