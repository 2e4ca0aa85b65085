"""Builds as clients of E2B ask for them: in two requests, with several tags, and with files known by their hash."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("builds", sa.Column("more_tags", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("uploads", sa.Column("files_hash", sa.String(length=64), nullable=True))
    op.create_table(
        "asked_builds",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_asked_builds_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_asked_builds")),
    )
    for column in ("project_id", "created_at"):
        op.create_index(op.f(f"ix_asked_builds_{column}"), "asked_builds", [column], unique=False)
