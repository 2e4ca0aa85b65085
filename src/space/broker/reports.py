"""What the verbs `inspect` and `machines` answer."""

import time
from contextlib import suppress
from typing import Any

from space.broker.journal import Entry, Phase
from space.broker.machines import Machines
from space.drivers import processes
from space.errors import HostError, InvalidRequest, NotFound

_MIB = 1 << 20
# How phases in passing look from outside: as the state they come from, which is where a crash would lead back to.
_STATE = {
    Phase.BOOTING: "absent",
    Phase.STARTING: "stopped",
    Phase.WAKING: "suspended",
    Phase.PAUSING: "running",
    Phase.RESUMING: "paused",
    Phase.SUSPENDING: "running",
    Phase.SNAPSHOTTING: "running",
    Phase.STOPPING: "running",
    Phase.DESTROYING: "exited",
}


async def inspect(machines: Machines, machine_id: str) -> dict[str, Any]:
    return report(machines, machine_id)


async def all_of(machines: Machines) -> list[dict[str, Any]]:
    return [report(machines, machine_id) for machine_id in sorted(machines.entries)]


def report(machines: Machines, machine_id: str) -> dict[str, Any]:
    """Return one machine. One whose process has ended is `exited` even before that is journaled."""
    entry = machines.entries.get(machine_id)
    if entry is None:
        return {"machine": machine_id, "state": "absent"}
    usage = machines.host.cgroups.usage(entry.body)
    found: dict[str, Any] = {
        "machine": machine_id,
        "body": entry.body,
        "spare": entry.spare,
        "state": _STATE.get(entry.phase, entry.phase.value),
        "template": entry.template,
        "driver": entry.driver,
        "usage": {
            "cpu_s": round(usage.cpu_s, 3),
            "memory_mib": usage.memory_mib,
            "memory_peak_mib": usage.memory_peak_mib,
            "pids": usage.pids,
            "oom_kills": usage.oom_kills,
            "disk_mib": _disk_mib(machines, entry),
        },
    }
    if entry.process and found["state"] in {"running", "paused"}:
        if processes.is_alive(entry.process):
            found["pid"] = entry.process.pid
            if usage.oom_kills > machines.oom_kills_seen.get(entry.body, (0, 0.0))[0]:
                machines.oom_kills_seen[entry.body] = (usage.oom_kills, time.monotonic())
        else:
            found |= {"state": "exited", "cause": machines.cause(entry)}
    elif entry.cause:
        found["cause"] = entry.cause
    return found


def _disk_mib(machines: Machines, entry: Entry) -> float:
    """Return what the guest has added to its template; nothing as long as, or because, there is no disk."""
    with suppress(NotFound, HostError, InvalidRequest):
        if store := machines.host.store(machines.driver(entry.driver)):
            size = machines.host.template_bytes(entry), entry.resources.disk_mib
            return round(store.used(entry.body, *size) / _MIB, 1)
    return 0.0
