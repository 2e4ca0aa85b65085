"""Volumes, and which sandboxes mount them."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "volumes",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("size_mib", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_volumes_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_volumes")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_volumes_project_id")),
    )
    op.create_index(
        op.f("ix_volumes_project_id_created_at_id"), "volumes", ["project_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_volumes_state"), "volumes", ["state"], unique=False)
    op.create_table(
        "mounts",
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("volume_id", sa.String(length=24), nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name=op.f("fk_mounts_sandbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sandbox_id", "path", name=op.f("pk_mounts")),
    )
    op.create_index(op.f("ix_mounts_volume_id"), "mounts", ["volume_id"], unique=False)
