"""Records and labels of devices, and where their requests were answered and at which cost."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    bind = op.get_bind()
    if "records" in sa.inspect(bind).get_table_names():
        return
    for name in ("temperature_c", "drift"):
        op.add_column("devices", sa.Column(name, sa.Float()))
    for table in ("telemetry", "telemetry_marks"):
        for name in ("on_device", "cached", "private", "micro_usd", "measured"):
            op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    for name in ("records", "labels"):
        op.get_context().opts["target_metadata"].tables[name].create(bind)


def downgrade() -> None:
    """Earlier versions leave it alone, so it stays for the next upgrade."""
