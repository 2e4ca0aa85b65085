"""Snapshots, where a sandbox came from, and what a project may use."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("template", sa.String(length=200), nullable=False),
        sa.Column("template_digest", sa.String(length=80), nullable=False),
        sa.Column("driver", sa.String(length=32), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("operation_id", sa.String(length=24), nullable=False),
        sa.Column("hidden", sa.Boolean(), nullable=False),
        sa.Column("dropped", sa.Boolean(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_snapshots_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    op.create_index(
        op.f("ix_snapshots_project_id_created_at_id"), "snapshots", ["project_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_snapshots_sandbox_id"), "snapshots", ["sandbox_id"], unique=False)
    op.create_index(op.f("ix_snapshots_operation_id"), "snapshots", ["operation_id"], unique=False)
    op.create_index(op.f("ix_snapshots_state"), "snapshots", ["state"], unique=False)
    op.add_column("sandboxes", sa.Column("snapshot_id", sa.String(length=24), nullable=True))
    op.add_column("sandboxes", sa.Column("forked_from", sa.String(length=24), nullable=True))
    op.create_index(op.f("ix_sandboxes_snapshot_id"), "sandboxes", ["snapshot_id"], unique=False)
    op.add_column("projects", sa.Column("quota_sandboxes", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("quota_cpus", sa.Float(), nullable=True))
    op.add_column("projects", sa.Column("quota_memory_mib", sa.BigInteger(), nullable=True))
    op.add_column("projects", sa.Column("quota_disk_mib", sa.BigInteger(), nullable=True))
