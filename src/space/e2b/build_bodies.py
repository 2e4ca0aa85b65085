"""What requests for builds of templates and for their tags look like."""

# ruff: noqa: N815, RUF012 - pydantic copies defaults; the names are E2B's

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from space.e2b.bodies import Body, without_nul

STEPS_MAX = 256
ARGUMENTS_MAX = 512
ARGUMENT_CHARS_MAX = 64 * 1024
TAGS_MAX = 64
SERVICE_ACCOUNT_CHARS_MAX = 32 * 1024

Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(without_nul)]
Tags = Annotated[list[Name], Field(max_length=TAGS_MAX)]
Text = Annotated[str, StringConstraints(max_length=ARGUMENT_CHARS_MAX), AfterValidator(without_nul)]
Hash = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class NewTemplate(Body):
    """A build that is about to be described."""

    name: Name
    tags: Tags = []
    cpuCount: Annotated[int, Field(ge=1)] | None = None
    memoryMB: Annotated[int, Field(ge=64)] | None = None
    minFreeDiskMb: Annotated[int, Field(ge=0)] | None = None


class _Secretive(Body):
    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)


class GeneralRegistry(_Secretive):
    type: Literal["registry"]
    username: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    password: Annotated[str, StringConstraints(max_length=64 * 1024)] = Field(repr=False)


class AwsRegistry(_Secretive):
    type: Literal["aws"]


class GcpRegistry(_Secretive):
    type: Literal["gcp"]
    serviceAccountJson: Annotated[str, StringConstraints(min_length=1, max_length=SERVICE_ACCOUNT_CHARS_MAX)] = Field(
        repr=False
    )


Registry = Annotated[GeneralRegistry | AwsRegistry | GcpRegistry, Field(discriminator="type")]


class Step(Body):
    type: Literal["COPY", "RUN", "ENV", "WORKDIR", "USER"]
    args: Annotated[list[Text], Field(max_length=ARGUMENTS_MAX)] = []
    filesHash: Hash | None = None
    force: bool | None = False


class BuildStart(Body):
    """What is to be built: what it begins with, the steps, and what runs in the end."""

    fromImage: Name | None = None
    fromTemplate: Name | None = None
    fromImageRegistry: Registry | None = None
    force: bool | None = False
    steps: Annotated[list[Step], Field(max_length=STEPS_MAX)] = []
    startCmd: Text | None = None
    readyCmd: Text | None = None


class TemplateChange(Body):
    public: bool | None = None


class NewTags(Body):
    """Where ``target`` (``name:tag``) points, ``tags`` are to point as well."""

    target: Name
    tags: Annotated[Tags, Field(min_length=1)]


class GoneTags(Body):
    name: Name
    tags: Annotated[Tags, Field(min_length=1)]
