"""Templates that projects build: releases, tags and their history, builds, and uploads for them."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    _releases()
    _tags()
    _builds()
    _uploads()


def _releases() -> None:
    op.create_table(
        "template_drops",
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("began_at", Time(), nullable=True),
        sa.Column("ended_at", Time(), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_template_drops")),
    )
    op.create_table(
        "releases",
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("defaults", sa.JSON(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("base", sa.JSON(), nullable=True),
        sa.Column("lineage", sa.JSON(), nullable=False),
        sa.Column("packages", sa.JSON(), nullable=True),
        sa.Column("build_id", sa.String(length=24), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("untagged_at", Time(), nullable=True),
        sa.Column("deleted_at", Time(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_releases_project_id")),
        sa.PrimaryKeyConstraint("project_id", "digest", name=op.f("pk_releases")),
    )
    op.create_index(op.f("ix_releases_digest"), "releases", ["digest"], unique=False)


def _tags() -> None:
    op.create_table(
        "tag_moves",
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=True),
        sa.Column("previous", sa.String(length=80), nullable=True),
        sa.Column("build_id", sa.String(length=24), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_tag_moves_project_id")),
        sa.PrimaryKeyConstraint("project_id", "name", "number", name=op.f("pk_tag_moves")),
    )
    op.create_table(
        "tags",
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("moved_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "digest"], ["releases.project_id", "releases.digest"], name=op.f("fk_tags_project_id")
        ),
        sa.PrimaryKeyConstraint("project_id", "name", "tag", name=op.f("pk_tags")),
    )
    op.create_index(op.f("ix_tags_project_id_digest"), "tags", ["project_id", "digest"], unique=False)


def _builds() -> None:
    op.create_table(
        "builds",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("needs_auth", sa.Boolean(), nullable=False),
        sa.Column("snapshot_id", sa.String(length=24), nullable=True),
        sa.Column("uploads", sa.JSON(), nullable=False),
        sa.Column("digests", sa.JSON(), nullable=False),
        sa.Column("sent", sa.Boolean(), nullable=False),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("steps", sa.Integer(), nullable=True),
        sa.Column("digest", sa.String(length=80), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("base", sa.JSON(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("lease_owner", sa.String(length=200), nullable=True),
        sa.Column("lease_until", Time(), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.Column("started_at", Time(), nullable=True),
        sa.Column("finished_at", Time(), nullable=True),
        sa.Column("abandoned", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_builds_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_builds")),
    )
    op.create_index(
        op.f("ix_builds_project_id_created_at_id"), "builds", ["project_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_builds_snapshot_id"), "builds", ["snapshot_id"], unique=False)
    op.create_index(op.f("ix_builds_state"), "builds", ["state"], unique=False)


def _uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("expires_at", Time(), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_uploads_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_project_id"), "uploads", ["project_id"], unique=False)
