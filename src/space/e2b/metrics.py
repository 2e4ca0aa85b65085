"""What E2B's sandboxes used, and use now."""

from datetime import timedelta
from typing import Any

from space.control import usage
from space.e2b import query as queries
from space.e2b import shapes
from space.e2b.call import Call
from space.e2b.routing import id_of
from space.e2b.sandboxes import owned
from space.errors import InvalidRequest
from space.model.sandbox import Sandbox, State
from space.model.usage import Sample, sample
from space.store import sandboxes as rows

METRICS_MAX = 100
MIB = 1024 * 1024


async def history(call: Call) -> None:
    """What a sandbox used, sample by sample, and uses now."""
    found = await owned(call)
    since, until = (_epoch(call, name) for name in ("start", "end"))
    now = call.control.now()
    samples = await usage.history(
        call.control,
        found.id,
        None if since is None else now - timedelta(seconds=max(0.0, now.timestamp() - since)),
        None if until is None else now - timedelta(seconds=max(0.0, now.timestamp() - until)),
        None,
    )
    if found.state == State.RUNNING and (until is None or until >= now.timestamp() - 1):
        taken = sample((await call.control.node.inspect(found.id)).get("usage"), now)
        samples += [taken] if taken is not None else []
    shown = [_metric(found, one, before) for one, before in zip(samples, [None, *samples], strict=False)]
    await call.answer(shown)


async def latest(call: Call) -> None:
    """What each named sandbox uses now; those that are not the caller's, or do not run, are left out."""
    wanted = {id_of(one) for one in call.query.get("sandbox_ids", "").split(",") if one}
    if not 1 <= len(wanted) <= METRICS_MAX:
        raise InvalidRequest(f"sandbox_ids must name 1 to {METRICS_MAX} sandboxes, with commas between them.")
    named = await call.control.store.read(lambda connection: [rows.get(connection, one) for one in sorted(wanted)])
    mine = {one.id: one for one in named if one is not None and one.project_id == call.project_id}
    now, told = call.control.now(), dict[str, Any]()
    for machine in await call.control.node.machines():
        found, taken = mine.get(str(machine.get("machine"))), sample(machine.get("usage"), now)
        if found is not None and taken is not None and found.state == State.RUNNING:
            before = await usage.history(call.control, found.id, None, None, None)
            told[found.id] = _metric(found, taken, before[-1] if before else None)
    await call.answer({"sandboxes": told})


def _metric(found: Sandbox, one: Sample, before: Sample | None) -> dict[str, Any]:
    used = 0.0
    if before is not None and one.cpu_s is not None and before.cpu_s is not None:
        passed = (one.at - before.at).total_seconds()
        used = max(0.0, one.cpu_s - before.cpu_s) / passed * 100 if passed > 0 else 0.0
    return {
        "timestamp": shapes.time(one.at),
        "timestampUnix": int(one.at.timestamp()),
        "cpuCount": max(1, round(found.resources.cpus)),
        "cpuUsedPct": round(used, 2),
        "memUsed": int((one.memory_mib or 0) * MIB),
        "memTotal": found.resources.memory_mib * MIB,
        "memCache": 0,
        "diskUsed": int((one.disk_mib or 0) * MIB),
        "diskTotal": found.resources.disk_mib * MIB,
    }


def _epoch(call: Call, name: str) -> int | None:
    return queries.number(call.query, name, "seconds since 1970", digits_max=12)
