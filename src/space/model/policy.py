"""What a sandbox may reach: rules for hosts, and apart from them rules for networks. The first that matches decides.

What no rule matches is denied. It is read from, and told as, a *document*: ``preset``, ``rules``, ``networks``.
"""

import ipaddress
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from space.model.addresses import Address
from space.model.hosts import normalise_pattern
from space.model.policy_fields import (
    HOSTS_MAX,
    PORTS_MAX,
    PolicyInvalid,
    one_of,
    parse_each,
    parse_hosts,
    parse_list,
    parse_methods,
    parse_network,
    parse_object,
    parse_paths,
    parse_port_range,
    parse_ports,
)

RULES_MAX = 256
HOSTS_TOTAL_MAX = 4096
"""In all rules of a policy: each request is held against them."""
PATHS_TOTAL_MAX = 1024
PORTS_DEFAULT = (80, 443)
PRESETS = ("none", "package-registries", "public-internet")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")


class Action(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


class Tls(StrEnum):
    """Whether a connection is opened up to see its requests, or goes through as it is, judged by its server name."""

    TERMINATE = "terminate"
    PASSTHROUGH = "passthrough"


@dataclass(frozen=True, slots=True)
class Rule:
    """For requests to hosts. Without methods it is for any, without paths for any."""

    name: str
    action: Action
    hosts: tuple[str, ...]
    ports: tuple[int, ...] = PORTS_DEFAULT
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    tls: Tls = Tls.TERMINATE


class Spans:
    """Ranges of numbers, both ends included, in which a number is found in the time that it takes to halve them."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted(ranges):
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(self._lasts[-1], last)
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """For TCP connections to addresses. ``ports`` are ranges, both ends included; none: all ports."""

    name: str
    action: Action
    networks: tuple[str, ...]
    ports: tuple[tuple[int, int], ...] = ()
    _spans: Mapping[int, Spans] = field(init=False, repr=False, compare=False)
    _ports: Spans = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Put in order what each connection and each answer to a question is held against: there may be thousands."""
        found = [ipaddress.ip_network(network) for network in self.networks]
        spans = {
            version: Spans(
                (int(one.network_address), int(one.broadcast_address)) for one in found if one.version == version
            )
            for version in (4, 6)
        }
        object.__setattr__(self, "_spans", spans)
        object.__setattr__(self, "_ports", Spans(self.ports))

    def has_address(self, address: Address) -> bool:
        return int(address) in self._spans[address.version]

    def has_port(self, port: int) -> bool:
        return not self.ports or port in self._ports


@dataclass(frozen=True, slots=True)
class Policy:
    rules: tuple[Rule, ...] = ()
    networks: tuple[NetworkRule, ...] = ()


def parse_policy(document: Mapping[str, Any] | str, registries: Sequence[str] = ()) -> Policy:
    """Read a document, or the name of a preset. Own rules come before the preset's. Raises ``PolicyInvalid``.

    ``registries`` are the hosts of the preset package-registries, as ``host`` or ``host:port``.
    """
    if isinstance(document, str):
        document = {"preset": document}
    given = parse_object(document, "policy", ("preset", "rules", "networks"))
    preset = given.get("preset", "none")
    if preset not in PRESETS:
        raise PolicyInvalid("preset", f"It must be one of {', '.join(PRESETS)}.")
    rules = [_rule(entry, number) for number, entry in enumerate(parse_list(given, "rules", "", RULES_MAX))]
    networks = [
        _network_rule(entry, number) for number, entry in enumerate(parse_list(given, "networks", "", RULES_MAX))
    ]
    if preset == "public-internet":
        name = f"preset:{preset}"
        rules.append(Rule(name, Action.ALLOW, ("*",)))
        networks.append(NetworkRule(name, Action.ALLOW, ("0.0.0.0/0", "::/0")))
    elif preset == "package-registries":
        rules += _registry_rules(f"preset:{preset}", registries)
    _check_whole(rules, networks)
    return Policy(tuple(rules), tuple(networks))


def render_policy(policy: Policy) -> dict[str, Any]:
    """Return the document of a policy, in full and without presets: ``parse_policy`` makes the same policy of it."""
    rules: list[dict[str, Any]] = []
    for rule in policy.rules:
        shown: dict[str, Any] = {"name": rule.name, "action": str(rule.action), "hosts": [*rule.hosts]}
        shown["ports"] = [*rule.ports]
        if rule.methods:
            shown["methods"] = [*rule.methods]
        if rule.paths:
            shown["paths"] = [*rule.paths]
        if rule.tls is not Tls.TERMINATE:
            shown["tls"] = str(rule.tls)
        rules.append(shown)
    networks: list[dict[str, Any]] = []
    for network in policy.networks:
        shown = {"name": network.name, "action": str(network.action), "networks": [*network.networks]}
        if network.ports:
            shown["ports"] = [first if first == last else f"{first}-{last}" for first, last in network.ports]
        networks.append(shown)
    return {"rules": rules, "networks": networks}


def _rule(entry: object, number: int) -> Rule:
    at = f"rules[{number}]"
    given = parse_object(entry, at, ("name", "action", "hosts", "ports", "methods", "paths", "tls"))
    rule = Rule(
        name=_name(given, at, f"rule-{number + 1}"),
        action=one_of(given, f"{at}.action", Action, Action.ALLOW),
        hosts=parse_hosts(given, f"{at}."),
        ports=parse_ports(given, f"{at}.", PORTS_DEFAULT),
        methods=parse_methods(given, f"{at}."),
        paths=parse_paths(given, f"{at}."),
        tls=one_of(given, f"{at}.tls", Tls, Tls.TERMINATE),
    )
    if rule.tls is Tls.PASSTHROUGH and (rule.methods or rule.paths or rule.action is Action.DENY):
        raise PolicyInvalid(
            f"{at}.tls",
            "What passes through is not looked into: such a rule can have no methods or paths, and cannot deny.",
        )
    return rule


def _network_rule(entry: object, number: int) -> NetworkRule:
    at = f"networks[{number}]"
    given = parse_object(entry, at, ("name", "action", "networks", "ports"))
    return NetworkRule(
        name=_name(given, at, f"network-{number + 1}"),
        action=one_of(given, f"{at}.action", Action, Action.ALLOW),
        networks=parse_each(given, "networks", f"{at}.", HOSTS_MAX, parse_network, needed=True),
        ports=tuple(sorted(parse_each(given, "ports", f"{at}.", PORTS_MAX, parse_port_range))),
    )


def _registry_rules(name: str, registries: Sequence[str]) -> list[Rule]:
    """Return a rule for the hosts without a port, and one for each port that some have."""
    found: dict[str, list[str]] = {}
    for entry in registries:
        text, _, port = entry.partition(":")
        host = normalise_pattern(text)
        if host is None or not (port == "" or (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16)):
            raise PolicyInvalid(
                "preset", f"The installation's list of package registries has {entry[:80]!r}, which is no host."
            )
        hosts = found.setdefault(port, [])
        if host not in hosts:
            hosts.append(host)
    if not found:
        raise PolicyInvalid(
            "preset",
            "This installation knows no package registries. Its operator can name them (setting `package_registries`).",
        )
    return [
        Rule(f"{name}-{port}", Action.ALLOW, tuple(hosts), (int(port),))
        if port
        else Rule(name, Action.ALLOW, tuple(hosts))
        for port, hosts in found.items()
    ]


def _check_whole(rules: Sequence[Rule], networks: Sequence[NetworkRule]) -> None:
    for where, named in (("rules", rules), ("networks", networks)):
        if len(named) > RULES_MAX:
            raise PolicyInvalid(where, f"There may be {RULES_MAX} with those of the preset.")
        names: set[str] = set()
        for number, rule in enumerate(named):
            if rule.name in names:
                raise PolicyInvalid(
                    f"{where}[{number}].name", f"Another of these is called {rule.name!r}. Records name rules."
                )
            names.add(rule.name)
    if sum(len(rule.hosts) for rule in rules) > HOSTS_TOTAL_MAX:
        raise PolicyInvalid("rules", f"All rules together may have {HOSTS_TOTAL_MAX} hosts.")
    if sum(len(rule.networks) for rule in networks) > HOSTS_TOTAL_MAX:
        raise PolicyInvalid("networks", f"All rules together may have {HOSTS_TOTAL_MAX} networks.")
    if sum(len(rule.paths) for rule in rules) > PATHS_TOTAL_MAX:
        raise PolicyInvalid("rules", f"All rules together may have {PATHS_TOTAL_MAX} paths.")


def _name(given: Mapping[str, Any], at: str, default: str) -> str:
    name = given.get("name", default)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise PolicyInvalid(
            f"{at}.name", "It must be 1 to 63 of the characters `A-Z a-z 0-9 . _ : -`, a letter or digit first."
        )
    return name
