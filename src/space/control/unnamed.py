"""Secrets that nobody named: values that came with the rules by which they are placed, as E2B's clients give them.

One value is one secret of its project, however many sandboxes have it. It is kept as long as a sandbox that is there
has a grant of it, and a while.
"""

from datetime import timedelta

from sqlalchemy import Connection

from space.control import secrets
from space.control.control import Control
from space.control.secrets import NewSecret
from space.errors import Conflict
from space.store import secrets as rows

PREFIX = "unnamed:"
"""No name that is given has a colon. What follows is a digest that nobody without the installation's key can guess."""
DIGEST_CHARS = 40
KEPT = timedelta(hours=1)
"""How long one that nothing uses is kept: whoever has just asked for it is about to grant it."""


async def keep(control: Control, project_id: str, value: str) -> str:
    """Return the name of the project's secret that has this value, which is made where there is none.

    Raises ``InvalidRequest`` for what can be no value, ``LimitExceeded`` when the project has too many secrets.
    """
    digest = await secrets.fingerprint_of(control, {"kind": "text", "value": value})
    name = PREFIX + digest[:DIGEST_CHARS]
    try:
        await secrets.request_secret(control, project_id, NewSecret(name, "text", {"value": value}))
    except Conflict as error:
        if error.code != "name-taken":
            raise
        now = control.now()
        await control.store.write(lambda connection: rows.touch(connection, project_id, name, now))
    return name


def sweep(connection: Connection, control: Control) -> None:
    """Forget those that no sandbox has any more."""
    rows.remove_unused(connection, PREFIX, control.now() - KEPT)
