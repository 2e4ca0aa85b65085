"""HTTP for policies: named ones, the project's default, and a sandbox's own."""

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from space.api.access import caller
from space.api.answers import IdempotencyKey, control_of, once, reply
from space.api.egress_bodies import CheckBody, NameInPath, PolicyChoice, PolicyCreate, PolicyReplace
from space.api.egress_schemas import (
    CheckOut,
    PolicyInForce,
    PolicyOut,
    PolicyPage,
    RuleCheckOut,
    SandboxPolicyOut,
    SuggestionOut,
)
from space.api.paging import LIMIT_DEFAULT, Cursor, Limit, next_cursor, position
from space.control import egress, policies
from space.control.control import Control
from space.control.effective import Chosen, shown
from space.errors import NotFound
from space.store.policies import Reference

_PORTS = {"https": 443, "http": 80}


async def create(request: Request, body: PolicyCreate, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a policy that sandboxes can follow."""
    asked_once = await once(request, idempotency_key)
    made = await policies.request_policy(
        control_of(request), caller(request).project_id, body.name, body.document, asked_once
    )
    return reply(PolicyOut.model_validate(made), 201)


async def page(request: Request, limit: Limit = LIMIT_DEFAULT, cursor: Cursor = None) -> Response:
    """List the project's policies, newest first."""
    found = await policies.page(control_of(request), caller(request).project_id, after=position(cursor), limit=limit)
    items = [PolicyOut.model_validate(policy) for policy in found]
    return reply(PolicyPage(items=items, next_cursor=next_cursor(found, limit)))


async def get(request: Request, name: str) -> Response:
    """One policy."""
    found = await policies.get(control_of(request), caller(request).project_id, name)
    return reply(PolicyOut.model_validate(found))


async def replace(request: Request, name: NameInPath, body: PolicyReplace) -> Response:
    """Give a policy another document, or make it. When this is answered, it holds for every sandbox that follows it."""
    control, project_id = control_of(request), caller(request).project_id
    try:
        changed = await policies.replace(control, project_id, name, body.document)
    except NotFound:
        made = await policies.request_policy(control, project_id, name, body.document)
        return reply(PolicyOut.model_validate(made), 201)
    return reply(PolicyOut.model_validate(changed))


async def delete(request: Request, name: str) -> Response:
    """Delete a policy that nobody follows."""
    await policies.remove(control_of(request), caller(request).project_id, name)
    return Response(status_code=204)


async def of_project(request: Request) -> Response:
    """The policy of the project's sandboxes that have none of their own, nor their template."""
    control = control_of(request)
    return reply(_in_force(control, *await policies.of_project(control, caller(request).project_id)))


async def set_of_project(request: Request, body: PolicyChoice) -> Response:
    """Choose that policy; null: the installation's. When this is answered, it holds."""
    control = control_of(request)
    chosen = await policies.set_of_project(control, caller(request).project_id, body.policy)
    return reply(_in_force(control, *chosen))


async def of_sandbox(request: Request, sandbox_id: str) -> Response:
    """The policy that a sandbox has, and who says so."""
    control = control_of(request)
    sandbox, chosen = await policies.of_sandbox(control, caller(request).project_id, sandbox_id)
    return reply(_of_sandbox(control, sandbox.policy, chosen, sandbox.egress_generation))


async def set_of_sandbox(request: Request, sandbox_id: str, body: PolicyChoice) -> Response:
    """Give a sandbox a policy of its own; null: its template's or project's. When this is answered, it holds."""
    control = control_of(request)
    sandbox, chosen = await policies.set_of_sandbox(control, caller(request).project_id, sandbox_id, body.policy)
    return reply(_of_sandbox(control, sandbox.policy, chosen, sandbox.egress_generation))


async def check(request: Request, sandbox_id: str, body: CheckBody) -> Response:
    """What a sandbox's policy says to a request, and which rule decides it."""
    asked = egress.Asked(body.host, body.port or _PORTS[body.scheme], body.method, body.path, body.scheme)
    found = await egress.check(control_of(request), caller(request).project_id, sandbox_id, asked)
    return reply(
        CheckOut(
            allowed=found.decision.allowed,
            rule=found.decision.rule,
            reason=found.decision.reason,
            source=found.chosen.source,
            name=found.chosen.name,
            generation=found.generation,
            rules=[RuleCheckOut(**rule) for rule in found.rules],
        )
    )


async def suggest(request: Request, sandbox_id: str) -> Response:
    """Rules that would have allowed what was denied to a sandbox lately, as a part of a document."""
    found = await egress.suggested(control_of(request), caller(request).project_id, sandbox_id)
    return reply(SuggestionOut(rules=found.get("rules", []), networks=found.get("networks", [])))


def _in_force(control: Control, said: Reference, chosen: Chosen) -> PolicyInForce:
    return PolicyInForce(**_told(control, said, chosen))


def _of_sandbox(control: Control, said: Reference, chosen: Chosen, generation: int) -> SandboxPolicyOut:
    return SandboxPolicyOut(**_told(control, said, chosen), generation=generation)


def _told(control: Control, said: Reference, chosen: Chosen) -> dict[str, Any]:
    return {
        "policy": said,
        "source": chosen.source,
        "name": chosen.name,
        "document": chosen.document,
        "effective": shown(control.settings, chosen),
    }
