"""What may leave a sandbox: policies, secrets and grants; and what projects, sandboxes and builds say of it."""

import sqlalchemy as sa
from alembic import op

from space.store.tables import Time

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("projects", sa.Column("policy", sa.JSON(), nullable=True))
    op.add_column("sandboxes", sa.Column("policy", sa.JSON(), nullable=True))
    op.add_column("sandboxes", sa.Column("egress_generation", sa.BigInteger(), nullable=False, server_default="1"))
    op.add_column("builds", sa.Column("policy", sa.JSON(), nullable=True))
    op.add_column("builds", sa.Column("template_policy", sa.JSON(), nullable=True))
    _policies()
    _secrets()
    _grants()


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_policies_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_policies_project_id")),
    )
    op.create_index(
        op.f("ix_policies_project_id_created_at_id"), "policies", ["project_id", "created_at", "id"], unique=False
    )


def _secrets() -> None:
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("refresh_at", Time(), nullable=True),
        sa.Column("token_expires_at", Time(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("updated_at", Time(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_secrets_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_secrets")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_secrets_project_id")),
    )
    op.create_index(op.f("ix_secrets_key_id"), "secrets", ["key_id"], unique=False)
    op.create_index(op.f("ix_secrets_refresh_at"), "secrets", ["refresh_at"], unique=False)
    op.create_index(
        op.f("ix_secrets_project_id_created_at_id"), "secrets", ["project_id", "created_at", "id"], unique=False
    )


def _grants() -> None:
    op.create_table(
        "grants",
        sa.Column("id", sa.String(length=24), nullable=False),
        sa.Column("project_id", sa.String(length=24), nullable=False),
        sa.Column("sandbox_id", sa.String(length=24), nullable=False),
        sa.Column("secret_id", sa.String(length=24), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("terms", sa.JSON(), nullable=False),
        sa.Column("placeholder", sa.String(length=64), nullable=True),
        sa.Column("env", sa.String(length=128), nullable=True),
        sa.Column("created_at", Time(), nullable=False),
        sa.Column("expires_at", Time(), nullable=True),
        sa.Column("revoked_at", Time(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_grants_project_id")),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name=op.f("fk_grants_sandbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grants")),
    )
    op.create_index(op.f("ix_grants_secret_id"), "grants", ["secret_id"], unique=False)
    op.create_index(
        op.f("ix_grants_sandbox_id_created_at_id"), "grants", ["sandbox_id", "created_at", "id"], unique=False
    )
