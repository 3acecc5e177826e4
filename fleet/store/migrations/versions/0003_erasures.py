"""Orders to erase what a device stores."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if "erasure_json" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("devices")}:
        op.add_column("devices", sa.Column("erasure_json", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Earlier versions leave it alone, so it stays for the next upgrade."""
