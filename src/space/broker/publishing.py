"""The verbs about templates: making one of a machine's disk, and giving one up."""

from typing import Any

from space.broker.host import Timings
from space.broker.journal import Phase
from space.broker.machines import Machines, conflict
from space.broker.requests import OfTemplate, Publish
from space.broker.sealing import seal
from space.broker.templates import PREFIX, SCRATCH, Template
from space.drivers.base import Need
from space.errors import Conflict


async def publish(machines: Machines, request: Publish) -> dict[str, Any]:
    """Let a stopped machine's disk, without what the machine left of itself, be a template. The machine keeps its own.

    Asked again, or of another machine with the same files: the template that there is.
    """
    entry, host, timings = machines.entry(request.machine), machines.host, Timings()
    driver = machines.driver(entry.driver)
    if Need.DISK not in driver.capabilities.needs:
        raise Conflict(
            "No template can be made of a virtual machine's disk: build with the gvisor driver, it starts on all.",
            code="not-supported",
            driver=driver.name,
        )
    if entry.phase is not Phase.STOPPED:
        raise conflict("published", entry)
    async with host.templates.working() as working:
        root = await timings.of("copy", host.disks.new_template(working, of=entry.body))
        limit_s = machines.settings.template_publish_s
        sealed = await timings.of("digest", seal(root, request.defaults, tidy=True, limit_s=limit_s))
        template = await timings.of("keep", host.templates.keep(working, sealed, request.defaults))
    return {"timings": timings, "digest": template.digest, "bytes": template.bytes}


async def drop(machines: Machines, request: OfTemplate) -> dict[str, Any]:
    """Leave nothing of a template that no machine and no snapshot is of. Unknown: success."""

    def check(template: Template) -> None:
        if template.name == SCRATCH:
            raise Conflict("That template is built in.", code="template-in-use", template=template.digest)
        # What cannot be read may be of it.
        of_machines = sum(entry.template == template.digest for entry in machines.entries.values())
        of_machines += len(machines.damaged)
        of_snapshots = sum(kept.template == template.digest for kept in machines.host.snapshots.all())
        if of_machines or of_snapshots:
            raise Conflict(
                "Machines or snapshots of that template are left.",
                code="template-in-use",
                template=template.digest,
                machines=of_machines,
                snapshots=of_snapshots,
            )

    timings = Timings()
    await timings.of("drop", machines.host.templates.drop(request.template, check))
    await machines.host.blocks.delete_template(request.template.removeprefix(PREFIX))
    return {"timings": timings}
