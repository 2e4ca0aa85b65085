"""What the request for a new sandbox looks like."""

# ruff: noqa: RUF012 - pydantic copies defaults

from typing import Annotated, Literal

from pydantic import StringConstraints

from space.api.bodies import Body, Env, Metadata, Name, ResourcesBody, Seconds
from space.api.egress_bodies import Grants, PolicyReference
from space.api.volume_bodies import Volumes
from space.model.sandbox import OnIdle, OnTimeout


class SandboxCreate(Body):
    """A sandbox to be made."""

    template: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """`name`, `name:tag`, `sha256:…`, or `snapshot:ID`."""
    name: Name | None = None
    metadata: Metadata = {}
    env: Env = {}
    """Environment of every command; kept to the byte, never expanded, not shown again."""
    resources: ResourcesBody = ResourcesBody()
    driver: Literal["gvisor", "firecracker", "qemu"] | None = None
    timeout_s: Seconds | None = None
    """Seconds that the sandbox may run before `on_timeout`; begins again at wake and start. null: for ever."""
    on_timeout: OnTimeout = "delete"
    idle_timeout_s: Seconds | None = None
    """Seconds without a command, an attached client or a transfer before `on_idle`; however silent it is, a command
    that runs is activity. Counted while the sandbox runs. null: it is never idle."""
    on_idle: OnIdle = "suspend"
    wake_on_request: bool = False
    """Whether a command or file request wakes the sandbox when it is paused, suspended or stopped, or becomes so."""
    policy: PolicyReference | None = None
    """What may leave it: a document, a preset, or a policy's name. null: as its template, its project or the
    installation has it."""
    volumes: Volumes = []
    """What of the project's volumes is mounted in it, and where. Not with a snapshot that has memory: what was mounted
    there is there again."""
    grants: Grants = []
    """Secrets that its requests get, without being in it."""
