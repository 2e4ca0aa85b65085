"""What owners note about their secrets."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("secrets", sa.Column("metadata", sa.JSON(), nullable=False, server_default="{}"))
