"""`space pool`."""

from space.cli import show
from space.cli.targets import JsonOption, open_client


def pool(as_json: JsonOption = False) -> None:
    """Show the machines that are kept ready, and how sandboxes of each shape have come about.

    A claim took a machine that was ready, a restore came from the template's warm snapshot, a boot from nothing.
    """
    with open_client() as client:
        found = client.pool()
    if as_json:
        show.document(found.raw)
        return
    show.table(
        ["TEMPLATE", "DRIVER", "MEMORY", "WARM", "IDLE", "TARGET", "FILLING", "CLAIMS", "RESTORES", "BOOTS"],
        [
            [
                s.template_digest[:19],
                s.driver,
                f"{s.memory_mib} MiB",
                "yes" if s.warm else "no",
                *map(str, (s.idle, s.target, s.filling, s.claims, s.restores, s.boots)),
            ]
            for s in found.shapes
        ],
    )
    print(f"memory: {found.memory_mib} of at most {found.memory_max_mib} MiB")
