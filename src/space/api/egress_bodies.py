"""What requests about policies, secrets and grants look like. What a policy or a grant may say, the model decides."""

# ruff: noqa: RUF012 - pydantic copies defaults

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from fastapi import Path
from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, WithJsonSchema, model_validator

from space.api.bodies import NAME, Body, Metadata, Name, Seconds
from space.model.grant import GRANTS_MAX

SECRET_BYTES_MAX = 64 * 1024
SECRET_FIELDS_MAX = 16
LIST_MAX = 256
TEXT_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Hidden:
    """The fields of a value that nobody is shown."""

    fields: Mapping[str, str] = field(repr=False)


def _hidden(value: Any) -> Hidden:
    """Read a value; what is wrong with it is said without a word of it."""
    if isinstance(value, str):
        value = {"value": value}
    if not isinstance(value, dict) or not 0 < len(cast("dict[Any, Any]", value)) <= SECRET_FIELDS_MAX:
        raise ValueError("It must be a text, or an object of texts.")
    given = {key: text for key, text in cast("dict[str, Any]", value).items() if text is not None}
    if not all(isinstance(text, str) for text in given.values()):
        raise ValueError("It must be a text, or an object of texts.")
    try:
        size = sum(len(key.encode()) + len(text.encode()) for key, text in given.items())
    except UnicodeEncodeError:
        raise ValueError("It must be valid text.") from None
    if size > SECRET_BYTES_MAX:
        raise ValueError(f"It may have at most {SECRET_BYTES_MAX} bytes.")
    return Hidden(given)


def _named_or_object(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("must be a policy's name, a preset, or an object")  # noqa: TRY004
    return value


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
Value = Annotated[
    Hidden,
    PlainValidator(_hidden),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS], "writeOnly": True, "title": "Value"}),
]
Document = Annotated[dict[str, Any], Field(max_length=3)]
PolicyReference = Annotated[
    Annotated[str, StringConstraints(pattern=NAME)] | Document, BeforeValidator(_named_or_object)
]
Text = Annotated[str, StringConstraints(min_length=1, max_length=TEXT_CHARS_MAX)]
Texts = Annotated[list[Text], Field(max_length=LIST_MAX)]
Placement = Literal["header", "bearer", "basic", "query", "aws-sigv4", "placeholder"]
NameInPath = Annotated[str, Path(pattern=NAME)]
SecretKind = Literal["text", "basic", "aws", "oauth"]


class PolicyCreate(Body):
    """A policy that sandboxes can follow by its name."""

    name: Name
    document: Document
    """`{preset?, rules?, networks?}`; see the page on egress."""


class PolicyReplace(Body):
    document: Document


class PolicyChoice(Body):
    """Which policy holds: a document, a preset or the name of a policy. null: the one from further up."""

    policy: PolicyReference | None


class CheckBody(Body):
    """One request, to be judged by a sandbox's policy; nothing is sent."""

    host: Text
    """A name; or an address, of which the rules for networks are asked."""
    method: Text = "GET"
    path: Annotated[str, StringConstraints(min_length=1, max_length=8192)] = "/"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """443, or 80 for http, otherwise."""
    scheme: Literal["https", "http"] = "https"


class _Silent(Body):
    """A body of which no word is repeated, not even the name of a field that does not exist."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and set(cast("dict[Any, Any]", value)) - set(cls.model_fields):
            raise ValueError(f"has a field that does not exist; there are {', '.join(cls.model_fields)}")
        return value


class SecretCreate(_Silent):
    """A value to be kept. It is in no answer, ever.

    `text`: a text. `basic`: `{username, password}`. `aws`: `{access_key_id, secret_access_key, session_token?}`.
    `oauth`: `{token_url, client_id, client_secret?, refresh_token?, scope?, audience?, client_auth?}`, with which
    tokens are fetched: with the refresh token if there is one, else as the client itself.
    """

    name: Name
    kind: SecretKind = "text"
    value: Value
    metadata: Metadata = {}


class SecretReplace(_Silent):
    """The next value of a secret, or the first."""

    kind: SecretKind = "text"
    value: Value
    metadata: Metadata | None = None
    """None: as it was."""


class GrantBody(Body):
    """Which requests a secret is placed into, and how."""

    secret: Name
    """Its name."""
    hosts: Annotated[Texts, Field(min_length=1)]
    """Names, or `*.suffix`."""
    ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(max_length=64)] = [443]
    methods: Texts = []
    """Which; none: all."""
    paths: Texts = []
    """Which, with `*` and `**`; none: all."""
    placement: Placement = "bearer"
    """`bearer` and `basic`: the header Authorization; `placeholder`: wherever the placeholder stands."""
    name: Text | None = None
    """Of the header or query parameter."""
    template: Text = "{}"
    """What the header or parameter gets, with `{}` for the value."""
    cleartext: bool = False
    """Whether requests over plain HTTP get it, too."""
    scrub: bool = True
    """Whether answers that repeat the value are masked."""
    region: Text | None = None
    service: Text | None = None
    expires_in_s: Seconds | None = None
    """After so long it ends by itself; null: never."""

    def terms(self) -> dict[str, Any]:
        """Return what the model takes: where and how."""
        return self.model_dump(exclude={"secret", "env", "expires_in_s"}, exclude_none=True)


class NewGrantBody(GrantBody):
    """A grant that a sandbox is made with."""

    env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = None
    """A variable of the sandbox's environment that gets the placeholder."""


Grants = Annotated[list[NewGrantBody], Field(max_length=GRANTS_MAX)]
