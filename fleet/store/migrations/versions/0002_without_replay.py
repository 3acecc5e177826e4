"""Rollouts that may continue without records to replay."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    if "without_replay" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("rollouts")}:
        op.add_column("rollouts", sa.Column("without_replay", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Earlier versions leave it alone, so it stays for the next upgrade."""
