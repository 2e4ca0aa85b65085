"""The first schema."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("last_event", sa.BigInteger(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "templates",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("defaults", sa.JSON(), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", Time(), nullable=False),
        sa.PrimaryKeyConstraint("name", "tag", name=op.f("pk_templates")),
    )
    op.create_index(op.f("ix_templates_digest"), "templates", ["digest"], unique=False)
    op.create_table(
        "events",
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_events_project_id")),
        sa.PrimaryKeyConstraint("project_id", "number", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_created_at"), "events", ["created_at"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("subject_id", sa.String(length=24), nullable=False),
        sa.Column("operation_id", sa.String(length=24), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_idempotency_project_id")),
        sa.PrimaryKeyConstraint("project_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_created_at"), "idempotency", ["created_at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("last_used_at", Time(), nullable=True),
        sa.Column("revoked_at", Time(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_keys_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_keys_hash")),
    )
    op.create_index(op.f("ix_keys_project_id"), "keys", ["project_id"], unique=False)
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=True),
        sa.Column("template", sa.String(length=200), nullable=False),
        sa.Column("template_digest", sa.String(length=80), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=True),
        sa.Column("on_timeout", sa.String(length=16), nullable=False),
        sa.Column("deadline_at", Time(), nullable=True),
        sa.Column("idle_timeout_s", sa.Float(), nullable=True),
        sa.Column("on_idle", sa.String(length=16), nullable=False),
        sa.Column("wake_on_request", sa.Boolean(), nullable=False),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("operation_id", sa.String(length=24), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_sandboxes_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sandboxes")),
    )
    op.create_index(op.f("ix_sandboxes_deadline_at"), "sandboxes", ["deadline_at"], unique=False)
    op.create_index(
        op.f("ix_sandboxes_project_id_created_at_id"), "sandboxes", ["project_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_sandboxes_state"), "sandboxes", ["state"], unique=False)
    op.create_table(
        "commands",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("shown", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_commands_project_id")),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name=op.f("fk_commands_sandbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
    )
    op.create_index(
        op.f("ix_commands_sandbox_id_created_at_id"), "commands", ["sandbox_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("lease_owner", sa.String(length=200), nullable=True),
        sa.Column("lease_until", Time(), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("started_at", Time(), nullable=True),
        sa.Column("finished_at", Time(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_operations_project_id")),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name=op.f("fk_operations_sandbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
    )
    op.create_index(
        op.f("ix_operations_project_id_created_at_id"), "operations", ["project_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_operations_sandbox_id"), "operations", ["sandbox_id"], unique=False)
    op.create_index(op.f("ix_operations_state"), "operations", ["state"], unique=False)
    op.create_table(
        "sandbox_metadata",
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name=op.f("fk_sandbox_metadata_sandbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sandbox_id", "key", name=op.f("pk_sandbox_metadata")),
    )
