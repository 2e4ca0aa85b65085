"""Connections to the code interpreter in a sandbox; one that has ended is started again for who asks."""

from space.control.nodes import Node
from space.control.ports import NodeTunnel, dial
from space.errors import NotFound, SandboxError

PORT = 49999
START_S = 160.0
"""Longer than a node waits for what a template starts."""


async def dial_interpreter(node: Node, sandbox_id: str, *, for_contexts: bool) -> NodeTunnel:
    """Connect to the code interpreter, after it was started again where it had ended.

    Raises ``NotFound`` (``contexts-lost``) when it had to be and the request is ``for_contexts`` that were there,
    ``SandboxError`` (``no-interpreter``) where there is none, and as ``dial`` does.
    """
    try:
        return await dial(node, sandbox_id, PORT)
    except SandboxError as error:
        if error.code != "port-closed":
            raise
        started = (await node.call("POST", f"/machines/{sandbox_id}/entry", START_S)).get("started")
        if started is None:
            raise _none() from error
    if started and for_contexts:
        raise NotFound(
            "The code interpreter had ended, and all contexts with what they remembered. It runs again: begin anew.",
            code="contexts-lost",
        )
    try:
        return await dial(node, sandbox_id, PORT)
    except SandboxError as error:
        raise (_none() if error.code == "port-closed" else error) from error


def _none() -> SandboxError:
    return SandboxError(
        "No code interpreter runs in this sandbox: make one from the template code-interpreter-v1.",
        code="no-interpreter",
    )
