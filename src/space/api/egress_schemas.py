"""What answers about policies, secrets, grants and records look like."""

from datetime import datetime
from typing import Any, Literal

from space.api.schemas import FailureOut, Out, Page

Reference = str | dict[str, Any] | None
Source = Literal["sandbox", "template", "project", "installation"]


class PolicyOut(Out):
    """A named policy. `generation` counts its documents."""

    name: str
    generation: int
    document: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class PolicyPage(Page):
    items: list[PolicyOut]


class PolicyInForce(Out):
    """The policy that holds. `effective` has all of its rules, those of a preset too."""

    policy: Reference
    """What was said here; null: nothing, so it comes from further up."""
    source: Source
    """Who says what holds."""
    name: str | None
    """Of the named policy that is followed."""
    document: dict[str, Any] | str
    effective: dict[str, Any]


class SandboxPolicyOut(PolicyInForce):
    """`generation` counts the changes of what may leave the sandbox, those of its grants too."""

    generation: int


class RuleCheckOut(Out):
    rule: str
    action: str
    matches: bool
    decides: bool
    why: str


class CheckOut(Out):
    """What the policy says to a request. Which addresses a name may have is judged only when one is made."""

    allowed: bool
    rule: str | None
    reason: str
    source: Source
    name: str | None
    generation: int
    rules: list[RuleCheckOut]
    """Every rule, in order."""


class SuggestionOut(Out):
    """Rules that would have allowed what was denied."""

    rules: list[dict[str, Any]]
    networks: list[dict[str, Any]]


class SecretOut(Out):
    """A secret: everything about it but its value. `grants` says how many are in force."""

    name: str
    kind: Literal["text", "basic", "aws", "oauth"]
    version: int
    metadata: dict[str, str]
    grants: int
    token_expires_at: datetime | None
    """Of `oauth`: when the token ends that is placed now; the next one is fetched before."""
    failure: FailureOut | None
    """Of `oauth`: why the last attempt to fetch a token failed."""
    created_at: datetime
    updated_at: datetime


class SecretPage(Page):
    items: list[SecretOut]


class RotatedOut(Out):
    """`sealed` secrets are under the key `key_id` now; `failed` ones could not be opened, and are as they were."""

    key_id: str
    sealed: int
    failed: int


class GrantOut(Out):
    """A grant. `placeholder` is what a program in the sandbox is given in the secret's place."""

    id: str
    sandbox_id: str
    secret: str
    hosts: list[str]
    ports: list[int]
    methods: list[str]
    paths: list[str]
    placement: str
    name: str | None
    template: str
    cleartext: bool
    scrub: bool
    region: str | None
    service: str | None
    placeholder: str | None
    env: str | None
    created_at: datetime
    expires_at: datetime | None


class GrantPage(Page):
    items: list[GrantOut]
