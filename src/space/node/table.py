"""What a row of the route table is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from space.node.call import Call


class Access(Enum):
    """Who may use a route: the api on the Unix socket may use all."""

    LOCAL = "local"
    """Nobody else; elsewhere the route does not exist."""
    SANDBOX = "sandbox"
    """Whoever has a token for the sandbox ``{sandbox}`` of the path."""
    COMMAND = "command"
    """Whoever has a token for the command ``{command}`` of the path, or for its sandbox."""
    PORT = "port"
    """Whoever has a token for the port ``{port}`` of ``{sandbox}``, or for that; everybody where it is public."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: method (WS, or * for any other), path, who may use it, and the function that answers."""

    method: str
    path: str
    access: Access
    handler: Callable[[Call], Awaitable[None]]
