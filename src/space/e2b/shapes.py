"""Sandboxes, snapshots and samples as E2B's clients are told of them. Pure."""

from datetime import datetime
from typing import Any

from space.model.sandbox import Sandbox, State
from space.model.snapshot import REFERENCE_PREFIX, Snapshot

ENVD_VERSION = "0.6.13"
CLIENT_ID = "space"
RUNNING = frozenset({State.RUNNING})
PAUSED = frozenset(
    {
        *(State.PAUSED, State.SUSPENDED, State.STOPPED, State.PAUSING, State.SUSPENDING, State.STOPPING),
        *(State.RESUMING, State.WAKING, State.STARTING),
    }
)
"""What to E2B is paused: what does not run, and goes on when it is asked to."""
STATES = {"running": RUNNING, "paused": PAUSED}


def template_id(sandbox: Sandbox) -> str:
    return sandbox.template.removeprefix(REFERENCE_PREFIX)


def sandbox(found: Sandbox, access: str, traffic: str | None, domain: str | None) -> dict[str, Any]:
    """Return a ``Sandbox``, with its tokens."""
    return {
        "templateID": template_id(found),
        "sandboxID": found.id,
        "clientID": CLIENT_ID,
        "alias": template_id(found).partition(":")[0],
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": access,
        "trafficAccessToken": traffic,
        "domain": domain,
    }


def listed(found: Sandbox) -> dict[str, Any]:
    """Return a ``ListedSandbox``."""
    return {
        "templateID": template_id(found),
        "alias": template_id(found).partition(":")[0],
        "sandboxID": found.id,
        "clientID": CLIENT_ID,
        "startedAt": time(found.created_at),
        # One that does not run has no end; when it stopped is the nearest to it.
        "endAt": time(found.deadline_at or found.updated_at),
        "cpuCount": max(1, round(found.resources.cpus)),
        "memoryMB": found.resources.memory_mib,
        "diskSizeMB": found.resources.disk_mib,
        "metadata": found.metadata,
        "state": "running" if found.state in RUNNING else "paused",
        "envdVersion": ENVD_VERSION,
        "volumeMounts": [{"name": one["name"], "path": one["path"]} for one in found.volumes],
    }


def detail(found: Sandbox, access: str, domain: str | None, *, internet: bool | None) -> dict[str, Any]:
    """Return a ``SandboxDetail``. ``internet``: what was said of access to it, None where nothing was."""
    on_timeout = "kill" if found.on_timeout == "delete" else "pause"
    return {
        **listed(found),
        "envdAccessToken": access,
        "domain": domain,
        "allowInternetAccess": internet,
        "lifecycle": {"autoResume": found.wake_on_request, "onTimeout": on_timeout},
        "pauseMode": "filesystem" if found.on_timeout == "stop" else "full",
    }


def snapshot(found: Snapshot) -> dict[str, Any]:
    """Return a ``SnapshotInfo``."""
    return {"snapshotID": found.id, "names": [f"{found.name}:default"] if found.name else []}


def time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
