"""The sandbox that a request for the data plane is meant for: found by its id or by its signature, and awake."""

from collections.abc import Callable

from space.control.control import Control
from space.control.readiness import get_running
from space.e2b import errors
from space.errors import Conflict, NotFound
from space.model.ids import is_id
from space.model.sandbox import Sandbox, State
from space.store import sandboxes as rows

GONE = frozenset({State.DELETING, State.DELETED, State.FAILED})
"""What is no sandbox any more to E2B's clients."""


async def running(control: Control, sandbox_id: str) -> Sandbox:
    """Return a sandbox that runs, of whatever project: who asks has a token of it. Waked where it is to be on requests.

    Raises ``SandboxError`` (``sandbox-gone``) for one that does not run, is unknown or deleted.
    """
    generation = control.store.generation
    known = control.running.get(sandbox_id, generation)
    if known is not None:
        return known
    found = await find(control, sandbox_id)
    if found is None:
        raise errors.gone(sandbox_id)
    if found.state == State.RUNNING:
        control.running.remember(found, generation)
        return found
    if not found.wake_on_request:
        raise errors.gone(sandbox_id)
    try:
        return await get_running(control, found.project_id, found.id)
    except (Conflict, NotFound) as error:
        raise errors.gone(sandbox_id) from error


async def find(control: Control, sandbox_id: str) -> Sandbox | None:
    """Return a sandbox of any project, in whatever state; None for one that is gone."""
    if not is_id("sbx", sandbox_id):
        return None
    found = await control.store.read(lambda connection: rows.get(connection, sandbox_id))
    return None if found is None or found.state in GONE else found


async def signer(control: Control, is_signer: Callable[[str], bool]) -> str | None:
    """Return the id of the sandbox that ``is_signer`` says a URL is signed for; all there are are asked."""
    found: str | None = None
    for sandbox_id in await control.store.read(rows.all_present):
        if is_signer(sandbox_id):
            found = sandbox_id
    return found
