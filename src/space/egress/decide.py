"""What a policy says to a host, a request, or a connection. Pure: no name is resolved here, no address vetted."""

import re
from dataclasses import dataclass
from typing import Any

from space.model.addresses import Address, as_address
from space.model.hosts import covers, normalise_host
from space.model.paths import canonical_path, glob_matches
from space.model.policy import Action, NetworkRule, Policy, Rule, Tls

_METHOD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``host`` is what it names (SNI and authority being one), ``path`` may have its query."""

    host: str
    port: int
    method: str
    path: str
    scheme: str = "https"


@dataclass(frozen=True, slots=True)
class Decision:
    """``rule`` is the name of the one that decided, if one did.

    ``reason``: ``rule``, ``default-deny``, ``invalid-host``, ``invalid-method``, or ``ambiguous-path``, where a rule
    with paths would have to decide on one that servers read in different ways.
    """

    allowed: bool
    rule: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class HostDecision:
    """Before a request is seen: whether any could be allowed, and whether the connection is to be left closed."""

    possible: bool
    passthrough: bool
    rule: str | None


def decide(policy: Policy, asked: Asked) -> Decision:
    """Say whether a request may be made."""
    host = normalise_host(asked.host)
    if host is None:
        return Decision(allowed=False, rule=None, reason="invalid-host")
    if _METHOD.fullmatch(asked.method) is None:
        return Decision(allowed=False, rule=None, reason="invalid-method")
    path: str | None = None
    for rule in policy.rules:
        if not _is_for(rule, host, asked.port) or (rule.methods and asked.method.upper() not in rule.methods):
            continue
        if rule.paths:
            path = path or canonical_path(asked.path)
            if path is None:
                return Decision(allowed=False, rule=rule.name, reason="ambiguous-path")
            if not any(glob_matches(glob, path) for glob in rule.paths):
                continue
        return Decision(allowed=rule.action is Action.ALLOW, rule=rule.name, reason="rule")
    return Decision(allowed=False, rule=None, reason="default-deny")


def decide_host(policy: Policy, host: str, port: int) -> HostDecision:
    """Say what can be said of a connection to a host. A request that may be made has ``possible`` here.

    The first rule that allows says whether it passes through; behind a rule that denies some requests it does not,
    since that one must see them.
    """
    name = normalise_host(host)
    looked_into = False
    for rule in policy.rules if name is not None else ():
        if not _is_for(rule, name or "", port):
            continue
        if rule.action is Action.ALLOW:
            passthrough = rule.tls is Tls.PASSTHROUGH and not looked_into
            return HostDecision(possible=True, passthrough=passthrough, rule=rule.name)
        if not rule.methods and not rule.paths:
            return HostDecision(possible=False, passthrough=False, rule=rule.name)
        looked_into = True
    return HostDecision(possible=False, passthrough=False, rule=None)


def may_resolve(policy: Policy, host: str) -> bool:
    """Say whether a name means anything to the guest: whether on any port a request to it could be allowed."""
    name = normalise_host(host)
    if name is None:
        return False
    denied: set[int] = set()
    for rule in policy.rules:
        if not covers(rule.hosts, name):
            continue
        if rule.action is Action.ALLOW:
            if not denied.issuperset(rule.ports):
                return True
        elif not rule.methods and not rule.paths:
            denied.update(rule.ports)
    return False


def decide_network(policy: Policy, address: Address, port: int) -> Decision:
    """Say whether a TCP connection to an address may be made, by the policy alone: the address is vetted besides."""
    address = getattr(address, "ipv4_mapped", None) or address
    for rule in policy.networks:
        if _is_for_address(rule, address, port):
            return Decision(allowed=rule.action is Action.ALLOW, rule=rule.name, reason="rule")
    return Decision(allowed=False, rule=None, reason="default-deny")


def may_answer(policy: Policy, address: Address) -> bool:
    """Say whether an address means anything to the guest: whether on some port a connection to it could be allowed."""
    for rule in policy.networks:
        if rule.has_address(address):
            if rule.action is Action.ALLOW:
                return True
            if not rule.ports:
                return False
    return False


def explain(policy: Policy, asked: Asked) -> list[dict[str, Any]]:
    """Return every rule in order: ``{rule, action, matches, decides, why}``. For an address those for networks."""
    address = as_address(asked.host.strip("[]"))
    if address is not None:
        address = getattr(address, "ipv4_mapped", None) or address
        whys = [(rule, _why_not_address(rule, address, asked.port)) for rule in policy.networks]
        decided = decide_network(policy, address, asked.port)
    else:
        whys = [(rule, _why_not(rule, asked)) for rule in policy.rules]
        decided = decide(policy, asked)
    steps: list[dict[str, Any]] = []
    reached = True
    for rule, why in whys:
        decides = reached and decided.rule == rule.name
        steps.append(
            {
                "rule": rule.name,
                "action": str(rule.action),
                "matches": why is None,
                "decides": decides,
                "why": why or ("It is for such a request." if decides else "It would match; a rule before it decides."),
            }
        )
        reached = reached and not decides
    return steps


def _is_for(rule: Rule, host: str, port: int) -> bool:
    return port in rule.ports and covers(rule.hosts, host)


def _is_for_address(rule: NetworkRule, address: Address, port: int) -> bool:
    return rule.has_port(port) and rule.has_address(address)


def _why_not(rule: Rule, asked: Asked) -> str | None:
    """Say why a rule is not for a request; None when it is."""
    host = normalise_host(asked.host)
    if host is None or _METHOD.fullmatch(asked.method) is None:
        return "The host is no host name." if host is None else "The method is not the name of one."
    if not covers(rule.hosts, host):
        return f"Its hosts ({_some(rule.hosts)}) do not include {host}."
    if asked.port not in rule.ports:
        return f"Its ports ({_some(rule.ports)}) do not include {asked.port}."
    if rule.methods and asked.method.upper() not in rule.methods:
        return f"Its methods ({_some(rule.methods)}) do not include {asked.method.upper()}."
    return _why_not_path(rule, canonical_path(asked.path)) if rule.paths else None


def _why_not_path(rule: Rule, path: str | None) -> str | None:
    if path is None:
        return "It has paths, and servers may read this path in different ways: the request is refused."
    if not any(glob_matches(glob, path) for glob in rule.paths):
        return f"Its paths ({_some(rule.paths)}) do not include {path[:200]}."
    return None


def _why_not_address(rule: NetworkRule, address: Address, port: int) -> str | None:
    if _is_for_address(rule, address, port):
        return None
    if rule.has_address(address):
        ranges = [f"{first}-{last}" if first != last else f"{first}" for first, last in rule.ports]
        return f"Its ports ({_some(ranges)}) do not include {port}."
    return f"Its networks ({_some(rule.networks)}) do not include {address}."


def _some(entries: tuple[Any, ...] | list[str]) -> str:
    shown = ", ".join(map(str, entries[:5]))
    return shown if len(entries) <= 5 else f"{shown} and {len(entries) - 5} more"
