"""What answers about templates, builds and uploads look like."""

from datetime import datetime
from typing import Any, Literal

from space.api.schemas import FailureOut, Out, Page
from space.control.catalog import Shown
from space.model.build import Build, BuildState
from space.model.upload import Upload


class BaseOut(Out):
    """What a template began with: an image, another template or a snapshot, and its digest where it has one."""

    ref: str | None = None
    digest: str | None = None


class TemplateOut(Out):
    """A template that the project sees: its own, or one that the installation brings along (`builtin`)."""

    name: str | None
    tag: str | None
    """What was asked for, or listed; null where that was a digest."""
    digest: str
    builtin: bool
    bytes: int
    defaults: dict[str, Any]
    driver: str | None
    source: dict[str, Any]
    """What the last build that made it was given: `kind`, and `reference`, `template`, `snapshot` or `dockerfile`."""
    base: BaseOut | None
    build_id: str | None
    created_at: datetime
    untagged_at: datetime | None
    """Since when no tag points to it."""
    deleted_at: datetime | None


class TemplateDetail(TemplateOut):
    """A template with all that is known of it."""

    tags: list[str]
    """Everything of the project that points to it."""
    lineage: dict[str, Any]
    """How it came about, as the build told; `images` are those that it and what it was made from came from."""
    packages: list[dict[str, Any]] | None
    """What is installed in it, as its own lists say; null: not known."""


class TemplatePage(Page):
    items: list[TemplateOut]


class TagMoveOut(Out):
    """A tag became `digest` and was `previous`; null: there is none, was none."""

    number: int
    tag: str
    digest: str | None
    previous: str | None
    build_id: str | None
    created_at: datetime


class HistoryPage(Page):
    items: list[TagMoveOut]


class AuditedOut(Out):
    """A release, the images that it and its bases came from, and those of them that the installation does not trust."""

    digest: str
    tags: list[str]
    images: list[str]
    untrusted: list[str]


class AuditOut(Out):
    trusted: list[str] | None
    """The registries that images may come from; null: any."""
    items: list[AuditedOut]


class WarmOut(Out):
    """What was prepared. `timings` maps a phase to seconds."""

    digest: str
    timings: dict[str, float]


class BuilderResourcesOut(Out):
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int


class BuildOut(Out):
    """A build. When it has `succeeded`, `name:tag` was moved to `digest`."""

    id: str
    name: str
    tag: str
    state: BuildState
    source: dict[str, Any]
    step: int | None
    steps: int | None
    """How far it is."""
    digest: str | None
    bytes: int
    base: BaseOut | None
    failure: FailureOut | None
    resources: BuilderResourcesOut
    timeout_s: float
    cancelling: bool
    """Whether it was asked to end."""
    timings: dict[str, float]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class BuildPage(Page):
    items: list[BuildOut]


class LogLine(Out):
    """One line of a build's log, as it is streamed; the last one has the type `end`, or `error`."""

    type: Literal["log"]
    n: int
    at: float
    stream: Literal["step", "stdout", "stderr", "info"]
    text: str


class UploadOut(Out):
    """Something that a build is to read: `bytes` of its `size` have come."""

    id: str
    size: int
    bytes: int
    created_at: datetime
    expires_at: datetime
    """When it goes if nothing more comes."""


class Uploaded(Out):
    """How much of an upload has come."""

    bytes: int


def template_out(shown: Shown) -> TemplateOut:
    return TemplateOut.model_validate(shown)


def template_detail(shown: Shown) -> TemplateDetail:
    return TemplateDetail.model_validate(shown)


def build_out(build: Build) -> BuildOut:
    return BuildOut.model_validate(build)


def upload_out(upload: Upload, came: int) -> UploadOut:
    return UploadOut(
        id=upload.id, size=upload.size, bytes=came, created_at=upload.created_at, expires_at=upload.expires_at
    )
