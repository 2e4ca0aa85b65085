"""What left sandboxes, or was to: the gateway's records for their owners, and what a policy says to a request."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from space.control import policies, sandboxes
from space.control.control import Control
from space.control.effective import Chosen
from space.egress.decide import Asked, Decision, decide, decide_network, explain
from space.egress.suggest import suggest
from space.model.addresses import as_address
from space.model.hosts import normalise_host

__all__ = ["Asked", "Checked", "check", "records", "suggested"]
SUGGESTED_FROM = 1000
"""So many of the latest denials are looked at."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a sandbox's policy says to a request, and every rule with why it is for it or not."""

    chosen: Chosen
    generation: int
    decision: Decision
    rules: list[dict[str, Any]]


async def check(control: Control, project_id: str, sandbox_id: str, asked: Asked) -> Checked:
    """Ask a sandbox's policy about a request; of addresses its network rules. Nothing is resolved or recorded."""
    sandbox, chosen = await policies.of_sandbox(control, project_id, sandbox_id)
    policy = chosen.policy(control.settings)
    address = as_address(asked.host.strip("[]"))
    decision = decide(policy, asked) if address is None else decide_network(policy, address, asked.port)
    return Checked(chosen, sandbox.egress_generation, decision, explain(policy, asked))


async def suggested(control: Control, project_id: str, sandbox_id: str) -> dict[str, Any]:
    """Return rules that would have allowed what was denied to a sandbox lately; nobody is given them by this."""
    await sandboxes.get(control, project_id, sandbox_id)
    wanted = {"decision": "deny", "limit": str(SUGGESTED_FROM)}
    async with aclosing(records(control, project_id, sandbox_id, wanted)) as found:
        return suggest([record async for record in found])


async def records(
    control: Control, project_id: str, sandbox_id: str | None, wanted: Mapping[str, str]
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the project's records that fit, the newest last; those of one sandbox, or of all, also deleted ones."""
    asked = {**wanted, "project": project_id} | ({} if sandbox_id is None else {"sandbox": sandbox_id})
    if (host := normalise_host(wanted.get("host", ""))) is not None:
        asked["host"] = host  # as records have it
    async with aclosing(control.gateway.egress(asked)) as found:
        async for record in found:
            # The gateway was asked for these alone; that nobody sees another's does not hang on it.
            if record.get("missed") is True or record.get("project") == project_id:
                yield record
