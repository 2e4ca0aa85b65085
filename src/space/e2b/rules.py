"""E2B's network rules: headers that are placed into requests to some hosts, as grants of ours.

A value that is written out becomes a secret that nobody named; ``${e2b.secrets.NAME}`` in one means a secret of the
project. Headers go over verified TLS alone, and are not taken out of answers: whoever wrote a rule trusts its hosts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from space.control import secrets, unnamed
from space.control.control import Control
from space.control.grants import NewGrant
from space.e2b.bodies import Network, Rule
from space.errors import InvalidRequest, NotFound
from space.model.grant import GRANTS_MAX, SecretValue, check_grant, check_value
from space.model.hosts import host_matches, normalise_pattern
from space.model.policy_fields import PolicyInvalid

HTTPS = 443
HIDDEN = "***"
"""What is told of a value: that there is one."""
_FILL = re.compile(r"\$\{e2b\.secrets\.([^{}]*)\}")
_PLACEHOLDER = "${e2b."


@dataclass(frozen=True, slots=True)
class Placed:
    """One header for one host. ``value`` is written out, or ``secret`` is the name of one that ``template`` takes."""

    host: str
    port: int
    header: str
    value: str = field(default="", repr=False)
    secret: str | None = None
    template: str = "{}"

    @property
    def terms(self) -> dict[str, Any]:
        """How it is placed, as grants say it."""
        place = {"hosts": [self.host], "ports": [self.port], "placement": "header", "name": self.header}
        return {**place, "template": self.template, "scrub": False}


def split(host: str) -> tuple[str, int]:
    """Return a host's name and port: of the domain of an installation here a port may be part."""
    name, colon, port = host.rpartition(":")
    known = colon and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    return (name, int(port)) if known else (host, HTTPS)


def parse(rules: Mapping[str, Sequence[Rule]] | None) -> list[Placed]:
    """Return what rules place where; of two for one header the later one holds. Raises ``InvalidRequest``."""
    placed: list[Placed] = []
    for key, ordered in (rules or {}).items():
        host, port = split(key)
        pattern = normalise_pattern(host)
        if pattern is None or pattern == "*":
            raise _wrong(key, "Headers are placed for hosts that are named: a name, or *.name.")
        headers: dict[str, str] = {}
        for rule in ordered:
            if rule.transform is not None:
                headers |= {name.lower(): value for name, value in rule.transform.headers.items()}
        placed += [_parsed(key, pattern, port, name, value) for name, value in headers.items()]
    if len(placed) > GRANTS_MAX:
        raise InvalidRequest(f"network.rules may place at most {GRANTS_MAX} headers.", field="network.rules")
    _check_one_for_each(placed)
    return placed


def _parsed(key: str, host: str, port: int, name: str, value: str) -> Placed:
    filled = _FILL.search(value)
    template = value if filled is None else value[: filled.start()] + "{}" + value[filled.end() :]
    if _PLACEHOLDER in template:
        raise _wrong(f"{key}.{name}", "A value can have one ${e2b.secrets.NAME}, and no identities.")
    if filled is None:
        one = Placed(host, port, name, value=value)
    else:
        one = Placed(host, port, name, secret=filled[1], template=template)
    try:
        if filled is None:
            check_value(SecretValue("text", {"value": value}))
        check_grant({"id": "new", "secret": one.secret or "new", **one.terms}, "text")
    except PolicyInvalid as error:
        raise _wrong(f"{key}.{name}", error.message) from None
    return one


def _check_one_for_each(placed: Sequence[Placed]) -> None:
    """Raise where two rules would place one header into one request: which of them did would be chance."""
    for number, one in enumerate(placed):
        for other in placed[:number]:
            meets = host_matches(one.host, other.host) or host_matches(other.host, one.host)
            if meets and (one.port, one.header) == (other.port, other.header):
                raise _wrong(one.host, f"The rules of {other.host} place the header {one.header}, too.")


async def grants(control: Control, project_id: str, placed: Sequence[Placed]) -> list[NewGrant]:
    """Return what is to be granted; values that were written out are kept from here on. Raises ``InvalidRequest``."""
    wanted: list[NewGrant] = []
    for one in placed:
        name = one.secret
        if name is None:
            name = await unnamed.keep(control, project_id, one.value)
        else:
            await _check_secret(control, project_id, one, name)
        wanted.append(NewGrant(name, one.terms))
    return wanted


async def _check_secret(control: Control, project_id: str, one: Placed, name: str) -> None:
    try:
        found = await secrets.get(control, project_id, name)
    except NotFound as error:
        raise _wrong(f"{one.host}.{one.header}", f"There is no secret {name[:63]!r}.") from error
    if found.secret.kind == "oauth":
        return  # What is placed of it is a text, a token.
    try:
        check_grant({"id": "new", "secret": name, **one.terms}, found.secret.kind)
    except PolicyInvalid as error:
        raise _wrong(f"{one.host}.{one.header}", error.message) from None


def ends(network: Mapping[str, Any], terms: Mapping[str, Any]) -> bool:
    """Whether a grant came with the rules that ``network``, as it is kept, tells of."""
    for key, ordered in (network.get("rules") or {}).items():
        host, port = split(key)
        headers = {name.lower() for rule in ordered for name in ((rule.get("transform") or {}).get("headers") or {})}
        place = {"hosts": [normalise_pattern(host)], "ports": [port], "placement": "header", "scrub": False}
        if terms.get("name") in headers and all(terms.get(name) == value for name, value in place.items()):
            return True
    return False


def hidden(network: Network) -> dict[str, Any]:
    """Return a configuration as it is kept and told: without the values of headers."""
    told = network.model_dump(exclude_none=True, exclude_unset=True)
    for ordered in (told.get("rules") or {}).values():
        for rule in ordered:
            headers = (rule.get("transform") or {}).get("headers") or {}
            headers.update(dict.fromkeys(headers, HIDDEN))
    return told


def _wrong(at: str, message: str) -> InvalidRequest:
    shown = f"network.rules.{at[:300]}"
    return InvalidRequest(f"{shown}: {message}", field=shown)
