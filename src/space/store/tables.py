"""Every table, on one page. SQL for each lives in the module named after it; what the rows mean is in ``space.model``.

Times are whole microseconds since 1970 UTC in a BIGINT: both databases compare them exactly. Nothing here is a
secret in the clear: API keys are stored as SHA-256.
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
    Index,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
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

projects = Table(
    "projects",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    # The number of the project's latest event. Counted here, under the row's lock, so that numbers appear in the
    # order of commits: a sequence would let a reader pass an event that commits late.
    Column("last_event", BigInteger, nullable=False, default=0),
    Column("created_at", Time, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", ID, primary_key=True),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
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
    Column("id", ID, primary_key=True),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
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
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    Index(None, "project_id", "created_at", "id"),
    Index(None, "state"),
    Index(None, "deadline_at"),
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
    Column("id", ID, primary_key=True),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
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

commands = Table(
    "commands",
    metadata,
    Column("id", ID, primary_key=True),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
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
