"""The verb `claim`: a spare becomes somebody's machine."""

import asyncio
from typing import Any

from space.broker.admission import SPARE_MIB
from space.broker.host import Timings
from space.broker.journal import RESIDENT, Phase
from space.broker.machines import Machines, conflict
from space.broker.requests import Claim
from space.errors import Conflict, InvalidRequest


async def claim(machines: Machines, request: Claim) -> dict[str, Any]:
    """Call a spare `machine` from now on, with its limits, and let it run. Under the locks of both ids.

    Asked again: no-op.

    One write of the journal makes it so. Until then it is a spare, with limits that do not matter; after that nothing
    is left of the spare's id but the name of its body.
    """
    present = machines.entries.get(request.machine)
    if present:
        if present.body == request.spare and not present.spare:
            return {"timings": {}, "body": present.body}
        raise conflict("claimed", present)
    spare = machines.entry(request.spare)
    if not spare.spare:
        raise Conflict("That machine is not a spare.", code="not-a-spare", machine=spare.machine)
    if spare.phase not in RESIDENT:
        raise conflict("claimed", spare)
    resources = request.resources.resources()
    machines.admission.check_limits(resources)
    machines.admission.check_count(machines.entries.values())
    if resources.memory_mib != spare.resources.memory_mib:
        raise InvalidRequest(
            "A spare keeps the memory that it has.", field="resources.memory_mib", memory_mib=spare.resources.memory_mib
        )
    driver, timings = machines.driver(spare.driver), Timings()
    with machines.admission.memory(machines.entries.values(), needed_mib=SPARE_MIB):
        await timings.of("limits", machines.host.limit(spare, driver, resources))
    if spare.phase is Phase.PAUSED:
        await timings.of("resume", machines.host.resume(spare.body, driver))
    claimed = spare.to(
        Phase.RUNNING, machine=request.machine, spare=False, hostname=request.hostname, resources=resources
    )
    # A crash of the broker finds it claimed from here on; a power cut, soon after. It takes the machine anyway.
    machines.write(claimed, durable=False)
    del machines.entries[request.spare]
    # Not before that is written: what the spare sends until then is nobody's.
    if claimed.link is not None:
        machines.host.links.enter(claimed.link, claimed.machine)
    machines.spawn(asyncio.to_thread(machines.journal.sync, claimed.body))
    return {"timings": timings, "body": claimed.body}
