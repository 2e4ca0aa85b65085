"""Every table, on one page. SQL for each lives in the module named after it; what the rows mean is in ``space.model``.

Times are whole microseconds since 1970 UTC in a BIGINT: both databases compare them exactly. Nothing here is a
secret in the clear: API keys are stored as SHA-256, values of secrets sealed with a key that is not in the store.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Time(TypeDecorator[datetime]):
    """An aware datetime, stored as microseconds since 1970 UTC."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:  # noqa: ARG002
        return None if value is None else (value - EPOCH) // MICROSECOND

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return None if value is None else EPOCH + value * MICROSECOND


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

ID = String(24)


def _owned() -> tuple[Column[Any], ...]:
    return Column("id", ID, primary_key=True), Column("project_id", ID, ForeignKey("projects.id"), nullable=False)


def _times() -> tuple[Column[Any], ...]:
    return Column("created_at", Time, nullable=False), Column("updated_at", Time, nullable=False)


projects = Table(
    "projects",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    # The number of the project's latest event. Counted here, under the row's lock, so that numbers appear in the
    # order of commits: a sequence would let a reader pass an event that commits late.
    Column("last_event", BigInteger, nullable=False, default=0),
    Column("created_at", Time, nullable=False),
    # What all of it together may use; null: as much as there is.
    Column("quota_sandboxes", Integer),
    Column("quota_cpus", Float),
    Column("quota_memory_mib", BigInteger),
    Column("quota_disk_mib", BigInteger),
    # What may leave sandboxes that have no policy of their own: a document, or a name.
    Column("policy", JSON),
)

keys = Table(
    "keys",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", Time, nullable=False),
    Column("last_used_at", Time),
    Column("revoked_at", Time),
    Index(None, "project_id"),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    *_owned(),
    Column("name", String(64)),
    Column("template", String(200), nullable=False),
    Column("template_digest", String(80), nullable=False),
    Column("driver", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("resources", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("timeout_s", Float),
    Column("on_timeout", String(16), nullable=False),
    Column("deadline_at", Time),
    Column("idle_timeout_s", Float),
    Column("on_idle", String(16), nullable=False),
    Column("wake_on_request", Boolean, nullable=False),
    Column("failure", JSON),
    # The operation that holds the sandbox, or the last one that did: half of every compare-and-set.
    Column("operation_id", ID),
    Column("details", JSON, nullable=False),
    # Where it began, if not from a template: a snapshot, and the sandbox it was forked from. Both may be gone by now.
    Column("snapshot_id", ID),
    Column("forked_from", ID),
    Column("policy", JSON),
    Column("egress_generation", BigInteger, nullable=False),
    *_times(),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "state"),
    Index(None, "deadline_at"),
    Index(None, "snapshot_id"),
)

# The same pairs as `sandboxes.metadata`, one row each, so that a filter is an index look-up in both databases and a
# key never becomes part of a JSON path.
sandbox_metadata = Table(
    "sandbox_metadata",
    metadata,
    Column("sandbox_id", ID, ForeignKey("sandboxes.id", ondelete="CASCADE"), nullable=False),
    Column("key", String(128), nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("sandbox_id", "key"),
)

operations = Table(
    "operations",
    metadata,
    *_owned(),
    Column("sandbox_id", ID, ForeignKey("sandboxes.id", ondelete="CASCADE"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", JSON),
    Column("timings", JSON, nullable=False),
    Column("request", JSON, nullable=False),
    Column("lease_owner", String(200)),
    Column("lease_until", Time),
    Column("created_at", Time, nullable=False),
    Column("started_at", Time),
    Column("finished_at", Time),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "sandbox_id"),
    Index(None, "state"),
)

snapshots = Table(
    "snapshots",
    metadata,
    *_owned(),
    Column("name", String(64)),
    Column("kind", String(8), nullable=False),
    Column("state", String(16), nullable=False),
    # Whose it is a point of. No foreign key: a snapshot outlives its sandbox.
    Column("sandbox_id", ID, nullable=False),
    Column("template", String(200), nullable=False),
    Column("template_digest", String(80), nullable=False),
    Column("driver", String(32), nullable=False),
    Column("resources", JSON, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("failure", JSON),
    # The operation that makes it; a hidden one is a fork's own and goes with it.
    Column("operation_id", ID, nullable=False),
    Column("hidden", Boolean, nullable=False),
    # Whether the node has been told to drop it and has.
    Column("dropped", Boolean, nullable=False),
    Column("details", JSON, nullable=False),
    *_times(),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "sandbox_id"),
    Index(None, "operation_id"),
    Index(None, "state"),
)

commands = Table(
    "commands",
    metadata,
    *_owned(),
    Column("sandbox_id", ID, ForeignKey("sandboxes.id", ondelete="CASCADE"), nullable=False),
    # How the node described it last; the node forgets a command some time after its end.
    Column("shown", JSON, nullable=False),
    Column("created_at", Time, nullable=False),
    Index(None, "sandbox_id", "created_at", "id"),
)

templates = Table(
    "templates",
    metadata,
    Column("name", String(64), nullable=False),
    Column("tag", String(64), nullable=False),
    Column("digest", String(80), nullable=False),
    Column("defaults", JSON, nullable=False),
    Column("driver", String(32)),
    Column("bytes", BigInteger, nullable=False),
    Column("seen_at", Time, nullable=False),
    PrimaryKeyConstraint("name", "tag"),
    Index(None, "digest"),
)

releases = Table(
    "releases",
    metadata,
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("digest", String(80), nullable=False),
    Column("defaults", JSON, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("source", JSON, nullable=False),
    Column("base", JSON),
    Column("lineage", JSON, nullable=False),
    Column("packages", JSON),
    Column("build_id", ID),
    Column("created_at", Time, nullable=False),
    Column("untagged_at", Time),
    Column("deleted_at", Time),
    PrimaryKeyConstraint("project_id", "digest"),
    Index(None, "digest"),
)

tags = Table(
    "tags",
    metadata,
    Column("project_id", ID, nullable=False),
    Column("name", String(64), nullable=False),
    Column("tag", String(64), nullable=False),
    Column("digest", String(80), nullable=False),
    Column("moved_at", Time, nullable=False),
    PrimaryKeyConstraint("project_id", "name", "tag"),
    ForeignKeyConstraint(["project_id", "digest"], ["releases.project_id", "releases.digest"]),
    Index(None, "project_id", "digest"),
)

# What became of each name's tags, numbered per name. Without a foreign key to the releases: they may be gone.
tag_moves = Table(
    "tag_moves",
    metadata,
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("tag", String(64), nullable=False),
    Column("digest", String(80)),
    Column("previous", String(80)),
    Column("build_id", ID),
    Column("created_at", Time, nullable=False),
    PrimaryKeyConstraint("project_id", "name", "number"),
)

# Which templates the node is being told to drop, or has been; a row is also what their publishers and droppers lock.
template_drops = Table(
    "template_drops",
    metadata,
    Column("digest", String(80), primary_key=True),
    Column("began_at", Time),
    Column("ended_at", Time),
)

builds = Table(
    "builds",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("tag", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("resources", JSON, nullable=False),
    Column("timeout_s", Float, nullable=False),
    Column("source", JSON, nullable=False),
    # What the node is told. Never the credentials for a registry: whoever accepted the build has them in memory.
    Column("spec", JSON, nullable=False),
    Column("needs_auth", Boolean, nullable=False),
    Column("snapshot_id", ID),
    Column("uploads", JSON, nullable=False),
    Column("digests", JSON, nullable=False),
    Column("sent", Boolean, nullable=False),
    Column("cancelling", Boolean, nullable=False),
    Column("step", Integer),
    Column("steps", Integer),
    Column("digest", String(80)),
    Column("bytes", BigInteger, nullable=False),
    Column("base", JSON),
    Column("failure", JSON),
    Column("timings", JSON, nullable=False),
    Column("lease_owner", String(200)),
    Column("lease_until", Time),
    *_times(),
    Column("started_at", Time),
    Column("finished_at", Time),
    # Whether it is over for us while the node may still be at it.
    Column("abandoned", Boolean, nullable=False),
    Column("policy", JSON),
    Column("template_policy", JSON),
    # Further tags of the name that point to what was made.
    Column("more_tags", JSON, nullable=False, server_default="[]"),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "state"),
    Index(None, "snapshot_id"),
)

# What a client of E2B has asked for in the first of its two requests for a build. Its build, if any, has the same id.
asked_builds = Table(
    "asked_builds",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("tags", JSON, nullable=False),
    Column("resources", JSON, nullable=False),
    # The client's own number of each step that the node was told of.
    Column("numbers", JSON, nullable=False),
    Column("created_at", Time, nullable=False, index=True),
    Index(None, "project_id"),
)

uploads = Table(
    "uploads",
    metadata,
    *_owned(),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Time, nullable=False),
    Column("expires_at", Time, nullable=False),
    Column("deleted", Boolean, nullable=False),
    # What a client of E2B calls its content; set once all of it has come.
    Column("files_hash", String(64)),
    Index(None, "project_id"),
)

events = Table(
    "events",
    metadata,
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", Time, nullable=False),
    PrimaryKeyConstraint("project_id", "number"),
    Index(None, "created_at"),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("key", String(255), nullable=False),
    # SHA-256 of method, path and body: the same key with another request is refused.
    Column("fingerprint", String(64), nullable=False),
    # What the first request made; its answer is rendered from these rows again.
    Column("subject_id", ID, nullable=False),
    Column("operation_id", ID),
    Column("created_at", Time, nullable=False),
    PrimaryKeyConstraint("project_id", "key"),
    Index(None, "created_at"),
)

webhooks = Table(
    "webhooks",
    metadata,
    *_owned(),
    Column("url", String(2000), nullable=False),
    Column("events", JSON, nullable=False),
    Column("description", String(256), nullable=False),
    # The number of the last event that is done with: delivered, given up, or none of this webhook's.
    Column("cursor", BigInteger, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("failing_since", Time),
    Column("next_at", Time),
    Column("lease_until", Time),
    Column("given_up", BigInteger, nullable=False),
    Column("disabled_at", Time),
    Column("disabled_reason", String(32)),
    Column("created_at", Time, nullable=False),
    Index(None, "project_id", "created_at", "id"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", ID, primary_key=True),
    Column("webhook_id", ID, ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("message_id", String(64), nullable=False),
    Column("type", String(48), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("reason", String(32)),
    Column("status", Integer),
    Column("seconds", Float, nullable=False),
    Column("created_at", Time, nullable=False),
    Index(None, "webhook_id", "created_at", "id"),
    Index(None, "created_at"),
)

# What a sandbox used, at most once a slot of 15 s. Without a foreign key: a sample may come when its sandbox is gone.
samples = Table(
    "samples",
    metadata,
    Column("sandbox_id", ID, nullable=False),
    Column("slot", BigInteger, nullable=False),
    Column("at", Time, nullable=False),
    Column("cpu_s", Float),
    Column("memory_mib", Float),
    Column("memory_peak_mib", Float),
    Column("disk_mib", Float),
    Column("pids", BigInteger),
    Column("oom_kills", BigInteger),
    PrimaryKeyConstraint("sandbox_id", "slot"),
    Index(None, "slot"),
)

policies = Table(
    "policies",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("document", JSON, nullable=False),
    *_times(),
    UniqueConstraint("project_id", "name"),
    Index(None, "project_id", "created_at", "id"),
)

secrets = Table(
    "secrets",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    # Counts its values. It is sealed together with the value, as are the ids: none can be put in another's place.
    Column("version", BigInteger, nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("metadata", JSON, nullable=False, server_default="{}"),
    # What of an OAuth secret is to be fetched and when, and how that went.
    Column("refresh_at", Time),
    Column("token_expires_at", Time),
    Column("failures", Integer, nullable=False),
    Column("failure", JSON),
    *_times(),
    UniqueConstraint("project_id", "name"),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "refresh_at"),
    Index(None, "key_id"),
)

# Without a foreign key to the secret: what was granted is told of for a while after the secret is gone.
grants = Table(
    "grants",
    metadata,
    *_owned(),
    Column("sandbox_id", ID, ForeignKey("sandboxes.id", ondelete="CASCADE"), nullable=False),
    Column("secret_id", ID, nullable=False),
    Column("secret", String(64), nullable=False),
    # Where and how it is placed: hosts, ports, methods, paths, placement and so on, as the api takes them.
    Column("terms", JSON, nullable=False),
    Column("placeholder", String(64)),
    Column("env", String(128)),
    Column("created_at", Time, nullable=False),
    Column("expires_at", Time),
    Column("revoked_at", Time),
    Index(None, "sandbox_id", "created_at", "id"),
    Index(None, "secret_id"),
)

volumes = Table(
    "volumes",
    metadata,
    *_owned(),
    Column("name", String(64), nullable=False),
    Column("size_mib", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    *_times(),
    UniqueConstraint("project_id", "name"),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "state"),
)

# Which sandboxes need a volume to be there. What each has mounted where is in its details; a volume may be gone before
# the tombstone of a sandbox that had it.
mounts = Table(
    "mounts",
    metadata,
    Column("sandbox_id", ID, ForeignKey("sandboxes.id", ondelete="CASCADE"), nullable=False),
    Column("volume_id", ID, nullable=False),
    Column("path", String(255), nullable=False),
    PrimaryKeyConstraint("sandbox_id", "path"),
    Index(None, "volume_id"),
)
