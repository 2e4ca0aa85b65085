"""Proposes rules from what was denied, for somebody to read and cut down. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from space.model.addresses import Address, as_address, is_public
from space.model.hosts import normalise_host
from space.model.paths import canonical_path, normalise_glob
from space.model.policy import PORTS_DEFAULT
from space.model.policy_fields import PolicyInvalid, parse_methods

RULES_MAX = 64
PATHS_KEPT = 8
"""More paths than that become the first segments they have in common."""
_PORTS_MAX = 16
_METHODS_MAX = 16
_REASONS = {"default-deny", "direct-address"}
"""That no rule was for it. What a rule denied was denied on purpose."""


@dataclass(slots=True)
class _Seen:
    ports: set[int] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    requests: bool = False
    any_request: bool = False
    """Some of it cannot be said in methods and paths."""


def suggest(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a document (``{"rules": […], "networks": […]}``) that allows what these audit records say was denied.

    For each host, those asked for most often first, its ports, its methods, and its paths or what they begin with. One
    that was only looked up, or connected to, is proposed without. What a rule denied is left out.
    """
    hosts: dict[str, _Seen] = defaultdict(_Seen)
    addresses: dict[str, set[int]] = defaultdict(set)
    often: Counter[str] = Counter()
    for record in records:
        if record.get("decision") != "deny" or record.get("reason") not in _REASONS:
            continue
        port = record.get("port")
        ports = {port} if isinstance(port, int) and 0 < port < 1 << 16 else set[int]()
        if record.get("kind") == "tcp" or record["reason"] == "direct-address":
            address = as_address(str(record.get("address") or ""))
            if address is not None and _is_sensible(address):
                addresses[str(address)] |= ports
                often[str(address)] += 1
            continue
        host = normalise_host(str(record.get("host") or ""))
        if host is not None:
            often[host] += 1
            _see(hosts[host], record, ports)
    order = [name for name, _ in often.most_common()]
    rules = [_rule(name, hosts[name]) for name in order if name in hosts][:RULES_MAX]
    networks = [
        {"networks": [name], "ports": sorted(addresses[name])[:_PORTS_MAX]} for name in order if name in addresses
    ][:RULES_MAX]
    return {"rules": rules, "networks": networks}


def _is_sensible(address: Address) -> bool:
    """Whether somebody may want to reach it: public, or of a private network, but not a host's or a cloud's own."""
    own = address.is_link_local or address.is_loopback or address.is_unspecified or address.is_multicast
    return is_public(address) or (address.is_private and not own)


def _see(seen: _Seen, record: Mapping[str, Any], ports: set[int]) -> None:
    if record.get("kind") != "http":
        # A name that was looked up says nothing of ports: its record has the resolver's.
        seen.ports |= ports if record.get("kind") == "tls" else set[int]()
        return
    seen.ports |= ports
    seen.requests = True
    try:
        seen.methods |= set(parse_methods({"methods": [record.get("method")]}))
    except PolicyInvalid:
        seen.any_request = True
    path = canonical_path(str(record.get("path") or ""))
    if path is None or normalise_glob(path) is None:
        seen.any_request = True
    elif len(seen.paths) < 4096:
        seen.paths.add(path)


def _rule(host: str, seen: _Seen) -> dict[str, Any]:
    rule: dict[str, Any] = {"hosts": [host]}
    if seen.ports - set(PORTS_DEFAULT):
        rule["ports"] = sorted(seen.ports)[:_PORTS_MAX]
    if not seen.requests or seen.any_request:
        return rule
    if len(seen.methods) <= _METHODS_MAX:
        rule["methods"] = sorted(seen.methods)
    paths = _in_short(seen.paths)
    if paths:
        rule["paths"] = paths
    return rule


def _in_short(paths: set[str]) -> list[str]:
    """Return the paths, or as few beginnings as cover them all; none when only ``/**`` would."""
    if len(paths) <= PATHS_KEPT:
        return sorted(paths)
    for depth in (3, 2, 1):
        beginnings = {_beginning(path, depth) for path in paths}
        if len(beginnings) <= PATHS_KEPT:
            return sorted(beginnings)
    return []


def _beginning(path: str, depth: int) -> str:
    segments = path.split("/")[1:]
    return path if len(segments) <= depth else "/" + "/".join([*segments[:depth], "**"])
