"""HTTP for what a sandbox uses and used."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import AwareDatetime

from space.api.access import caller
from space.api.answers import control_of, reply
from space.api.schemas import MetricsOut, SampleOut
from space.control import sandboxes, usage
from space.model.sandbox import State
from space.model.usage import sample


async def metrics(
    request: Request,
    sandbox_id: str,
    since: Annotated[AwareDatetime | None, Query(alias="from", description="No older; an hour before `to`.")] = None,
    until: Annotated[AwareDatetime | None, Query(alias="to", description="No younger; now.")] = None,
    step_s: Annotated[
        float | None,
        Query(ge=usage.SAMPLE_S, le=usage.STEP_S_MAX, description="One sample in so many seconds; at most 1000."),
    ] = None,
) -> Response:
    """What the sandbox uses now and did before: of the last hour a sample in 15 s, of the last day one in 5 minutes."""
    control = control_of(request)
    sandbox = await sandboxes.get(control, caller(request).project_id, sandbox_id)
    now = None
    if sandbox.state in {State.RUNNING, State.PAUSED}:
        now = sample((await control.node.inspect(sandbox.id)).get("usage"), control.now())
    history = await usage.history(control, sandbox.id, since, until, step_s)
    return reply(
        MetricsOut(
            now=None if now is None else SampleOut.model_validate(now),
            history=[SampleOut.model_validate(taken) for taken in history],
        )
    )
