"""The tables as this version has them. A later revision adds what an older database lacks, so it looks first."""

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.get_context().opts["target_metadata"].create_all(op.get_bind())
