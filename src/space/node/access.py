"""Who may do what: decides from the route's access and the token, before any handler runs."""

from space.errors import NotFound, Unauthenticated
from space.model.ids import is_id
from space.node.call import Call
from space.node.http_ports import authorise_port
from space.node.table import Access
from space.node.tokens import Grant


def authorise(call: Call, access: Access) -> None:
    """Return when the caller may go on; raise ``Unauthenticated``, or ``NotFound`` for what a token does not cover.

    What exists and is somebody else's looks exactly like what does not exist.
    """
    if call.local:
        _check_ids(call)
        if access is Access.PORT:
            authorise_port(call)
        return
    if access is Access.PORT:
        _check_ids(call)
        authorise_port(call)
        return
    grant = call.node.tokens.verify(_token(call))
    _check_ids(call)
    if access is Access.SANDBOX:
        if grant.expired:
            raise Unauthenticated("The token has expired.", code="token-expired")
        if not grant.whole or grant.sandbox_id != call.params["sandbox"]:
            raise _no_sandbox()
    elif access is Access.COMMAND:
        _authorise_command(call, grant)
    else:
        raise NotFound
    call.token_fingerprint = grant.fingerprint if grant.command_id is not None else None


def _authorise_command(call: Call, grant: Grant) -> None:
    """A token that has expired still serves a command that was attached with it."""
    command_id = call.params["command"]
    if grant.port is not None:
        raise _no_command()
    if grant.expired and grant.command_id is None:
        raise Unauthenticated("The token has expired.", code="token-expired")
    session = call.node.commands.get(command_id)
    if session.record.sandbox_id != grant.sandbox_id or grant.command_id not in {None, command_id}:
        raise _no_command()
    if grant.expired and not session.attached_with(grant.fingerprint):
        raise Unauthenticated("The token has expired.", code="token-expired")


def _check_ids(call: Call) -> None:
    if "sandbox" in call.params and not is_id("sbx", call.params["sandbox"]):
        raise _no_sandbox()
    if "snapshot" in call.params and not is_id("snp", call.params["snapshot"]):
        raise NotFound("There is no such snapshot on this node.", code="snapshot-not-found")
    if "command" in call.params and not is_id("cmd", call.params["command"]):
        raise _no_command()


def _token(call: Call) -> str:
    header = call.header("authorization")
    if header is not None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() == "bearer" and token:
            return token.strip()
    token = call.query.get("token")
    if not token:
        raise Unauthenticated("A token is needed.")
    return token


def _no_sandbox() -> NotFound:
    return NotFound("There is no such sandbox on this node.", code="sandbox-not-found")


def _no_command() -> NotFound:
    return NotFound("There is no such command.", code="command-not-found")
