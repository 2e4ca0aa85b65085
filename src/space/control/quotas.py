"""What a project may take of the host: counted in the transaction that accepts, so that no two share a place."""

from sqlalchemy import Connection

from space.control.control import Control
from space.errors import HostFull, LimitExceeded
from space.model.project import Quota, Used
from space.model.sandbox import Resources
from space.settings import Settings
from space.store import builds, projects, sandboxes

FULL_RETRY_S = 5
_ROUNDING = 1e-9
_WORDS = {"sandboxes": "sandboxes", "cpus": "cpus", "memory_mib": "MiB of memory", "disk_mib": "MiB of disk"}


def admit(connection: Connection, project_id: str, asked: Used) -> None:
    """Let ``asked`` come on top of what the project takes, or raise ``LimitExceeded``.

    Locks the project's row: of several requests for the last place one has it and the others see that. Lock order, the
    same everywhere: idempotency key, sandbox or snapshot, project.
    """
    quota = projects.lock(connection, project_id)
    if quota == Quota():
        return
    used = projects.used(connection, project_id)
    for name, words in _WORDS.items():
        limit, has, wants = getattr(quota, name), getattr(used, name), getattr(asked, name)
        if limit is not None and wants > 0 and has + wants > limit + _ROUNDING:
            raise LimitExceeded(
                f"The project may have {limit:g} {words}, has {has:g}, and this asks for {wants:g} more. "
                "Delete or suspend something first, or ask for less.",
                code="quota-exceeded",
                quota=name,
                limit=limit,
                used=has,
                asked=wants,
                retry_after_s=FULL_RETRY_S,
            )


def check_room(control: Control, connection: Connection, count: int = 1) -> None:
    """Raise ``HostFull`` when the host has no place for ``count`` more sandboxes or builds; the broker decides."""
    most = control.settings.sandboxes_max
    present = sandboxes.count_taking(connection) + builds.count_open(connection)
    if present + count > most:
        raise HostFull(
            f"This host has room for {most} sandboxes. Delete one first.", limit=most, retry_after_s=FULL_RETRY_S
        )


def of_new(resources: Resources, count: int = 1) -> Used:
    """Return what ``count`` new sandboxes take."""
    return Used(count, resources.cpus * count, resources.memory_mib * count, resources.disk_mib * count)


def of_machine(resources: Resources) -> Used:
    """Return what a sandbox takes that has its disk already, and gets a machine again."""
    return Used(cpus=resources.cpus, memory_mib=resources.memory_mib)


def of_project(settings: Settings) -> Quota:
    """Return the quota of a new project."""
    return Quota(
        settings.project_sandboxes_max,
        settings.project_cpus_max,
        settings.project_memory_mib_max,
        settings.project_disk_mib_max,
    )
