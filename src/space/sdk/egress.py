"""What may leave sandboxes, and what did: policies, secrets, grants and records as the API tells of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self, TypedDict

from space.sdk.types import Failure, Json, parse_time

PolicyReference = str | Mapping[str, Any]
"""A policy's document, a preset (``none``, ``package-registries``, ``public-internet``), or the name of a policy."""
SecretKind = Literal["text", "basic", "aws", "oauth"]
Placement = Literal["header", "bearer", "basic", "query", "aws-sigv4", "placeholder"]
Decision = Literal["allow", "deny", "error"]


class GrantTerms(TypedDict, total=False):
    """Which requests a secret is placed into, and how. Whatever is left out is the server's default."""

    ports: Sequence[int]
    """Ports of the hosts; 443 otherwise."""
    methods: Sequence[str]
    """Methods; otherwise all."""
    paths: Sequence[str]
    """Paths, with ``*`` and ``**``; otherwise all."""
    placement: Placement
    """Where it goes: ``bearer`` otherwise, the header Authorization."""
    name: str
    """The name of the header or query parameter."""
    template: str
    """What that gets, with ``{}`` for the value."""
    cleartext: bool
    """Place it into requests over plain HTTP, too."""
    scrub: bool
    """Mask the value in answers that repeat it; on unless it is false."""
    region: str
    """Of ``aws-sigv4``; what the guest signed for otherwise."""
    service: str
    """Of ``aws-sigv4``; what the guest signed for otherwise."""
    expires_in_s: float
    """Seconds until it ends by itself; otherwise never."""


class NewGrant(GrantTerms, total=False):
    """A grant that a sandbox is made with; it needs ``secret`` and ``hosts``."""

    secret: str
    """The name of the secret."""
    hosts: Sequence[str]
    """Host names, or ``*.suffix``."""
    env: str
    """A variable of the sandbox's environment that gets the placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A named policy. ``generation`` counts its documents."""

    name: str
    document: Json = field(default_factory=dict)
    generation: int = 1
    created_at: datetime | None = None
    updated_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            name=data["name"],
            document=data.get("document") or {},
            generation=data.get("generation") or 1,
            created_at=parse_time(data.get("created_at")),
            updated_at=parse_time(data.get("updated_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """The policy that holds, who says so (``source``), and all of its rules (``effective``)."""

    source: str
    policy: str | Json | None = None
    """What was said here; None: nothing, so it comes from further up."""
    name: str | None = None
    document: str | Json = "none"
    effective: Json = field(default_factory=dict)
    generation: int | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            source=data["source"],
            policy=data.get("policy"),
            name=data.get("name"),
            document=data.get("document") or "none",
            effective=data.get("effective") or {},
            generation=data.get("generation"),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """What a policy says to a request. ``rules`` has every rule with why it is for the request or not."""

    allowed: bool
    reason: str
    rule: str | None = None
    source: str = ""
    rules: tuple[Json, ...] = ()
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            allowed=bool(data["allowed"]),
            reason=data["reason"],
            rule=data.get("rule"),
            source=data.get("source") or "",
            rules=tuple(data.get("rules") or ()),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret that SPACE keeps: everything about it but its value, which no answer has."""

    name: str
    kind: SecretKind = "text"
    version: int = 1
    grants: int = 0
    """How many grants of it are in force."""
    token_expires_at: datetime | None = None
    failure: Failure | None = None
    """Why the last attempt to fetch a token failed."""
    created_at: datetime | None = None
    updated_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        return cls(
            name=data["name"],
            kind=data.get("kind") or "text",
            version=data.get("version") or 1,
            grants=data.get("grants") or 0,
            token_expires_at=parse_time(data.get("token_expires_at")),
            failure=Failure.parse(data.get("failure")),
            created_at=parse_time(data.get("created_at")),
            updated_at=parse_time(data.get("updated_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A secret that is placed into a sandbox's requests. ``placeholder`` stands for it in the sandbox."""

    id: str
    secret: str
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    placement: Placement = "bearer"
    placeholder: str | None = None
    env: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        lists = {name: tuple(data.get(name) or ()) for name in ("hosts", "ports", "methods", "paths")}
        return cls(
            id=data["id"],
            secret=data["secret"],
            **lists,
            placement=data.get("placement") or "bearer",
            placeholder=data.get("placeholder"),
            env=data.get("env"),
            created_at=parse_time(data.get("created_at")),
            expires_at=parse_time(data.get("expires_at")),
            raw=data,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRecord:
    """What became of one request. ``secrets`` are the names of those that were placed; ``path`` has no query."""

    n: int
    at: datetime
    sandbox_id: str
    kind: str
    decision: Decision
    reason: str = ""
    rule: str | None = None
    host: str | None = None
    address: str | None = None
    """What was connected to, where there was no name."""
    port: int | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    duration_s: float = 0.0
    secrets: tuple[str, ...] = ()
    raw: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, data: Json) -> Self:
        names = ("rule", "host", "address", "port", "method", "path", "status")
        return cls(
            n=data["n"],
            at=datetime.fromisoformat(data["at"]),
            sandbox_id=data["sandbox_id"],
            kind=data["kind"],
            decision=data["decision"],
            reason=data.get("reason") or "",
            **{name: data.get(name) for name in names},
            request_bytes=data.get("request_bytes") or 0,
            response_bytes=data.get("response_bytes") or 0,
            duration_s=data.get("duration_s") or 0.0,
            secrets=tuple(data.get("secrets") or ()),
            raw=data,
        )
