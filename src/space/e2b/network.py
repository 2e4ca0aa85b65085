"""E2B's network configuration as our policies, and the grants that come with its rules."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from space.control import outgoing
from space.control.outgoing import Outgoing
from space.e2b import rules
from space.e2b.bodies import Network, NetworkUpdate
from space.e2b.call import Call
from space.e2b.ports import network_of
from space.e2b.rules import Placed
from space.errors import InvalidRequest, RequestError
from space.model.policy import PORTS_DEFAULT
from space.model.sandbox import Sandbox

INTERNET, NOTHING = "public-internet", "none"
_HOST = re.compile(r"(\$\{PORT\}|[A-Za-z0-9.:_-]){1,255}")
EVERYTHING = frozenset({"0.0.0.0/0"})
OF_PORTS = ("allowPublicTraffic", "maskRequestHost", "httpsPorts")
"""What of a configuration is said once, when a sandbox is made: it is about coming in."""
ALLOWED = "allow_internet_access"
"""Under which name it is kept what was said of it."""
Reference = str | dict[str, Any]
_NOT_HERE = {
    "egressProxy": "What leaves a sandbox goes out from its host: a proxy of one's own cannot be put behind that",
    "dnsServers": "Names are resolved by the gateway, whichever name server a sandbox asks: it cannot have others",
}


def policy(given: Network | None, placed: Sequence[Placed] = (), *, allow: bool | None) -> Reference:
    """Return the policy of a sandbox. Without a word on it, what it may reach is the internet, as with E2B."""
    allowed, denied = (given.allowOut or [], given.denyOut or []) if given is not None else ([], [])
    networks = [one for one in denied if not _is_everything(one)]
    for one in networks:
        if _network(one) is None:
            raise InvalidRequest(f"denyOut takes addresses and networks, and {one!r} is neither.")
    hosts = [one for one in allowed if _network(one) is None]
    closed = len(networks) < len(denied) or allow is False
    if hosts and not closed:
        raise InvalidRequest("Names in allowOut need 0.0.0.0/0 in denyOut: all else is allowed anyway.")
    preset = NOTHING if closed else INTERNET
    named = _rules(hosts) if closed else _rules([f"{one.host}:{one.port}" for one in placed], beyond=PORTS_DEFAULT)
    connections = _connections([one for one in allowed if _network(one) is not None], networks)
    return {"preset": preset, "rules": named, "networks": connections} if named or connections else preset


def check(given: Network, *, secure: bool = True) -> None:
    """Raise for what cannot be had here: it must not seem to hold."""
    for name, why in _NOT_HERE.items():
        if getattr(given, name):
            raise RequestError(f"network.{name} is not supported here. {why}. Leave it out.", code="unimplemented")
    if given.maskRequestHost is not None and _HOST.fullmatch(given.maskRequestHost) is None:
        raise InvalidRequest("network.maskRequestHost must be a host name, perhaps with a port or ${PORT}.")
    if not given.allowPublicTraffic and not secure:
        raise InvalidRequest("network.allowPublicTraffic=false needs a secure sandbox: others have no token.")


def extras(given: Network | None, *, allow: bool | None) -> dict[str, Any]:
    """Return what is kept of a new sandbox: how its ports are asked, and what its owner is told again."""
    return {"network": {} if given is None else rules.hidden(given), ALLOWED: allow}


def allowed(sandbox: Sandbox) -> bool | None:
    """Return what was said of access to the internet; None where nothing was."""
    return (sandbox.details.get("extras") or {}).get(ALLOWED)


async def replace(call: Call, sandbox: Sandbox, given: NetworkUpdate) -> None:
    """Replace what may leave a sandbox, and what is placed into it; when this returns it holds."""
    check(given)
    placed = rules.parse(given.rules)
    wanted = Outgoing(
        policy=policy(given, placed, allow=given.allow_internet_access),
        grants=await rules.grants(call.control, call.project_id, placed),
        ends=lambda seen, terms: rules.ends(network_of(seen), terms),
        extras=lambda seen: _replaced(network_of(seen), rules.hidden(given)) | {ALLOWED: given.allow_internet_access},
    )
    await outgoing.replace(call.control, call.project_id, sandbox.id, wanted)


def _replaced(before: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: before[name] for name in OF_PORTS if name in before}
    gone = {ALLOWED, *OF_PORTS}
    return {"network": kept | {name: value for name, value in told.items() if name not in gone}}


def _rules(hosts: Sequence[str], beyond: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return a rule for the hosts of each port, without those ``beyond`` which there are others."""
    by_port: dict[int | None, list[str]] = {}
    for one in hosts:
        name, port = rules.split(one)
        if port not in beyond:
            by_port.setdefault(None if port in PORTS_DEFAULT else port, []).append(name)
    return [
        {"name": "allow-out" if port is None else f"allow-out-{port}", "hosts": list(dict.fromkeys(names))}
        | ({} if port is None else {"ports": [port]})
        for port, names in by_port.items()
    ]


def _connections(allowed: list[str], denied: list[str]) -> list[dict[str, Any]]:
    """Return rules by which what is allowed comes before what is denied."""
    found: list[dict[str, Any]] = []
    if allowed:
        found.append({"name": "allow-out", "networks": allowed})
    if denied:
        found.append({"name": "deny-out", "action": "deny", "networks": denied})
    return found


def _is_everything(text: str) -> bool:
    return text in EVERYTHING or text == "::/0"


def _network(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None
