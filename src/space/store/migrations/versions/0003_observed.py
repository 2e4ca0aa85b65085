"""Webhooks and their deliveries, and what sandboxes used."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("description", sa.String(length=256), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", Time(), nullable=True),
        sa.Column("next_at", Time(), nullable=True),
        sa.Column("lease_until", Time(), nullable=True),
        sa.Column("given_up", sa.BigInteger(), nullable=False),
        sa.Column("disabled_at", Time(), nullable=True),
        sa.Column("disabled_reason", sa.String(length=32), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_webhooks_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index(
        op.f("ix_webhooks_project_id_created_at_id"), "webhooks", ["project_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("webhook_id", sa.String(length=24), nullable=False),
        sa.Column("message_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=48), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
    )
    op.create_index(
        op.f("ix_deliveries_webhook_id_created_at_id"), "deliveries", ["webhook_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_deliveries_created_at"), "deliveries", ["created_at"], unique=False)
    op.create_table(
        "samples",
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("at", Time(), nullable=False),
        sa.Column("cpu_s", sa.Float(), nullable=True),
        sa.Column("memory_mib", sa.Float(), nullable=True),
        sa.Column("memory_peak_mib", sa.Float(), nullable=True),
        sa.Column("disk_mib", sa.Float(), nullable=True),
        sa.Column("pids", sa.BigInteger(), nullable=True),
        sa.Column("oom_kills", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("sandbox_id", "slot", name=op.f("pk_samples")),
    )
    op.create_index(op.f("ix_samples_slot"), "samples", ["slot"], unique=False)
