"""Grants: which secret is placed into which requests of a sandbox, and how. The sandbox holds a placeholder at most."""

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from space.model.hosts import covers
from space.model.paths import canonical_path, glob_matches
from space.model.policy_fields import (
    PolicyInvalid,
    one_of,
    parse_hosts,
    parse_methods,
    parse_object,
    parse_paths,
    parse_ports,
)

GRANTS_MAX = 64
"""Of one sandbox: each request is held against them."""
VALUE_CHARS_MAX = 8192
PLACEHOLDER = re.compile(r"space-placeholder-[a-z2-7]{26}")

_FIELDS = {
    "text": (("value",), ()),
    "basic": (("username", "password"), ()),
    "aws": (("access_key_id", "secret_access_key"), ("session_token",)),
}
"""Of each kind of secret: the fields that it has, and those that it may have."""
_TERMS = (
    "id",
    "secret",
    "hosts",
    "ports",
    "methods",
    "paths",
    "placement",
    "name",
    "template",
    "placeholder",
    "expires_at",
    "cleartext",
    "scrub",
    "region",
    "service",
)
_PORTS_DEFAULT = (443,)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_SCOPE = re.compile(r"[a-z0-9-]{1,63}")
# What is sent in a header: no control characters, nothing that is not ASCII, no spaces around it.
_VISIBLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_NOT_PLACED = {
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}


class Placement(StrEnum):
    """Where a value goes: ``placeholder`` is wherever in the head of a request the guest put the placeholder."""

    HEADER = "header"
    BEARER = "bearer"
    BASIC = "basic"
    QUERY = "query"
    AWS_SIGV4 = "aws-sigv4"
    PLACEHOLDER = "placeholder"


_KINDS = {
    Placement.HEADER: ("text",),
    Placement.BEARER: ("text",),
    Placement.BASIC: ("basic", "text"),
    Placement.QUERY: ("text",),
    Placement.AWS_SIGV4: ("aws",),
    Placement.PLACEHOLDER: ("text", "basic"),
}


@dataclass(frozen=True, slots=True, repr=False)
class SecretValue:
    """What a secret is: a text (``value``), a pair (``username``, ``password``), or a cloud's keys. Never shown."""

    kind: str
    fields: Mapping[str, str]

    @property
    def text(self) -> str:
        """The part that stands for the whole where there is room for one: the text, or the password."""
        return self.fields["password" if self.kind == "basic" else "value"]


@dataclass(frozen=True, slots=True, repr=False)
class Grant:
    """One secret for the requests it covers. ``secret`` is its name; ``name`` that of the header or query parameter.

    ``template`` has ``{}`` where the value goes. ``region`` and ``service`` are taken from what the guest signed if not
    given. Without ``cleartext`` requests that are not over verified TLS are not covered.
    """

    id: str
    secret: str
    hosts: tuple[str, ...]
    placement: Placement
    value: SecretValue = field(hash=False)
    ports: tuple[int, ...] = _PORTS_DEFAULT
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    name: str | None = None
    template: str = "{}"
    placeholder: str | None = None
    expires_at: float | None = None
    cleartext: bool = False
    scrub: bool = True
    region: str | None = None
    service: str | None = None

    def covers(self, *, scheme: str, host: str, port: int, method: str, target: str) -> bool:
        """Whether it is for such a request, whenever that is. ``host`` is normalised; ``target`` may have a query."""
        if not (scheme == "https" or self.cleartext) or port not in self.ports or not covers(self.hosts, host):
            return False
        if self.methods and method.upper() not in self.methods:
            return False
        if not self.paths:
            return True
        path = canonical_path(target)
        return path is not None and any(glob_matches(glob, path) for glob in self.paths)

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


def new_placeholder() -> str:
    """Return a fresh placeholder, 130 random bits long. All have one form, so one pattern finds every one of them."""
    return "space-placeholder-" + base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


def check_grant(document: Mapping[str, Any], kind: str) -> None:
    """Raise ``PolicyInvalid`` unless a grant of a secret of that kind may be so, whatever the value is."""
    _terms({key: value for key, value in document.items() if key != "value"}, kind)


def check_value(value: SecretValue) -> None:
    """Raise ``PolicyInvalid`` unless a secret may have that value; the message does not show it."""
    for name, text in value.fields.items():
        at = f"value.{name}"
        if not 0 < len(text) <= VALUE_CHARS_MAX:
            raise PolicyInvalid(at, f"It must have 1 to {VALUE_CHARS_MAX} characters.")
        if _VISIBLE.fullmatch(text) is None:
            raise PolicyInvalid(
                at, "It must be ASCII, without line breaks or other control characters, and without spaces around it."
            )
    if value.kind == "basic" and ":" in value.fields["username"]:
        raise PolicyInvalid("value.username", "It must have no colon.")


def parse_value(document: object, at: str = "value") -> SecretValue:
    """Read ``{"kind": …}`` and the fields of that kind. Raises ``PolicyInvalid``, which does not show them."""
    known = sorted({"kind", *(name for needed, more in _FIELDS.values() for name in needed + more)})
    given = parse_object(document, at, known)
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise PolicyInvalid(f"{at}.kind", f"It must be one of {', '.join(_FIELDS)}.")
    needed, more = _FIELDS[kind]
    fields: dict[str, str] = {}
    for name in (*needed, *more):
        text = given.get(name)
        if text is None and name in more:
            continue
        if not isinstance(text, str):
            raise PolicyInvalid(f"{at}.{name}", "It must be a text.")
        fields[name] = text
    if set(given) - set(fields) - {"kind", *more}:
        raise PolicyInvalid(at, f"A secret of the kind {kind} has {', '.join(needed + more)}, and nothing else.")
    value = SecretValue(kind, fields)
    check_value(value)
    return value


def parse_grant(document: Mapping[str, Any]) -> Grant:
    """Read a grant with its value, as the gateway is told it. Raises ``PolicyInvalid``, which shows no value."""
    value = parse_value(document.get("value"))
    terms = _terms({key: given for key, given in document.items() if key != "value"}, value.kind)
    return Grant(value=value, **terms)


def render_grant(grant: Grant) -> dict[str, Any]:
    """Return the document of a grant **with its value**: ``parse_grant`` makes the same of it."""
    return {
        "id": grant.id,
        "secret": grant.secret,
        "hosts": [*grant.hosts],
        "ports": [*grant.ports],
        "methods": [*grant.methods],
        "paths": [*grant.paths],
        "placement": str(grant.placement),
        "name": grant.name,
        "template": grant.template,
        "value": {"kind": grant.value.kind, **grant.value.fields},
        "placeholder": grant.placeholder,
        "expires_at": grant.expires_at,
        "cleartext": grant.cleartext,
        "scrub": grant.scrub,
        "region": grant.region,
        "service": grant.service,
    }


def _terms(document: Mapping[str, Any], kind: str) -> dict[str, Any]:
    given = {key: value for key, value in parse_object(document, "grant", _TERMS).items() if value is not None}
    placement = one_of(given, "placement", Placement, Placement.BEARER)
    if kind not in _KINDS[placement]:
        fitting = " or ".join(_KINDS[placement])
        raise PolicyInvalid("placement", f"{placement} is for secrets of the kind {fitting}; this one is {kind}.")
    expires_at = given.get("expires_at")
    if expires_at is not None and (isinstance(expires_at, bool) or not isinstance(expires_at, int | float)):
        raise PolicyInvalid("expires_at", "It must be a number of seconds since 1970.")
    return {
        "id": _text(given, "id", _ID, "an id", needed=True),
        "secret": _text(given, "secret", _ID, "the name of a secret", needed=True),
        "hosts": _hosts(given),
        "ports": parse_ports(given, "", _PORTS_DEFAULT),
        "methods": parse_methods(given),
        "paths": parse_paths(given),
        "placement": placement,
        "name": _place(given, placement),
        "template": _template(given, placement),
        "placeholder": _text(given, "placeholder", PLACEHOLDER, "made by SPACE", needed=placement == "placeholder"),
        "expires_at": expires_at,
        "cleartext": _flag(given, "cleartext", default=False),
        "scrub": _flag(given, "scrub", default=True),
        "region": _text(given, "region", _SCOPE, "a region's name, such as `eu-central-1`"),
        "service": _text(given, "service", _SCOPE, "a service's name, such as `s3`"),
    }


def _hosts(given: Mapping[str, Any]) -> tuple[str, ...]:
    hosts = parse_hosts(given)
    for number, host in enumerate(hosts):
        if host == "*" or (host.startswith("*.") and "." not in host[2:]):
            raise PolicyInvalid(f"hosts[{number}]", f"{host!r} is too wide: a secret goes to hosts that are named.")
    return hosts


def _place(given: Mapping[str, Any], placement: Placement) -> str | None:
    """Return the name of the header (in lower case) or of the query's parameter."""
    if placement not in {Placement.HEADER, Placement.QUERY}:
        if "name" in given:
            raise PolicyInvalid("name", f"{placement} has no name; header and query have.")
        return None
    what = "the query's parameter" if placement is Placement.QUERY else "the header"
    name = _text(given, "name", _TOKEN, f"the name of {what}", needed=True)
    if placement is Placement.QUERY or name is None:
        return name
    if name.lower() in _NOT_PLACED or name.lower().startswith(("proxy-", "sec-websocket-")):
        raise PolicyInvalid("name", f"The header {name!r} is the connection's own: no secret can go there.")
    return name.lower()


def _template(given: Mapping[str, Any], placement: Placement) -> str:
    template = given.get("template", "{}")
    if (
        not isinstance(template, str)
        or len(template) > 256
        or template.count("{}") != 1
        or not _VISIBLE.match(template)
    ):
        raise PolicyInvalid(
            "template", "It must be ASCII and have `{}` once, where the value goes, such as `token {}`."
        )
    if template != "{}" and placement not in {Placement.HEADER, Placement.BASIC, Placement.QUERY}:
        raise PolicyInvalid("template", f"{placement} has no template; header, basic and query have.")
    if _VISIBLE.fullmatch(template) is None:
        raise PolicyInvalid("template", "It must have no control characters, and no spaces around it.")
    return template


def _text(given: Mapping[str, Any], name: str, form: re.Pattern[str], what: str, *, needed: bool = False) -> str | None:
    text = given.get(name)
    if text is None and not needed:
        return None
    if not isinstance(text, str) or form.fullmatch(text) is None:
        raise PolicyInvalid(name, f"It must be {what}.")
    return text


def _flag(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    flag = given.get(name, default)
    if not isinstance(flag, bool):
        raise PolicyInvalid(name, "It must be true or false.")
    return flag
