"""The tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
_COUNTERS = ("requests", "errors", "degraded", *(f"latency_{bucket}" for bucket in range(9)))


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("what_json", sa.Text(), nullable=False),
        sa.Column("previous", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("n", name=op.f("pk_audit")),
    )
    op.create_table(
        "device_events",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("running", sa.String(length=64), nullable=True),
        sa.Column("wanted", sa.String(length=64), nullable=True),
        sa.Column("rollout", sa.String(length=64), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("n", name=op.f("pk_device_events")),
    )
    op.create_index(op.f("ix_device_events_device_n"), "device_events", ["device", "n"], unique=False)
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("cohort", sa.String(length=64), nullable=False),
        sa.Column("labels_json", sa.Text(), nullable=False),
        sa.Column("site", sa.String(length=128), nullable=False),
        sa.Column("public_key", sa.String(length=43), nullable=False),
        sa.Column("join_token", sa.String(length=64), nullable=False),
        sa.Column("enrolled", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("pin", sa.String(length=64), nullable=True),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.Column("token_sent", sa.Float(), nullable=False),
        sa.Column("boots_json", sa.Text(), nullable=False),
        sa.Column("cloned", sa.Boolean(), nullable=False),
        sa.Column("daemon", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("state_since", sa.Float(), nullable=False),
        sa.Column("running", sa.String(length=64), nullable=True),
        sa.Column("running_since", sa.Float(), nullable=False),
        sa.Column("wanted", sa.String(length=64), nullable=True),
        sa.Column("rollout", sa.String(length=64), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("quarantined_json", sa.Text(), nullable=False),
        sa.Column("unproven", sa.Boolean(), nullable=False),
        sa.Column("weekday", sa.Integer(), nullable=False),
        sa.Column("minute", sa.Integer(), nullable=False),
        sa.Column("granted", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("public_key", name=op.f("uq_devices_public_key")),
    )
    op.create_index(op.f("ix_devices_cohort"), "devices", ["cohort"], unique=False)
    op.create_index(op.f("ix_devices_site"), "devices", ["site"], unique=False)
    op.create_table(
        "generations",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("counter", sa.BigInteger(), nullable=False),
        sa.Column("nonce", sa.String(length=16), nullable=False),
        sa.Column("pace_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_generations")),
    )
    op.create_table(
        "join_tokens",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("cohort", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("labels_json", sa.Text(), nullable=False),
        sa.Column("uses_left", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_join_tokens")),
    )
    op.create_table(
        "looks",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rollout", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("verdict_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("n", name=op.f("pk_looks")),
    )
    op.create_index(op.f("ix_looks_rollout"), "looks", ["rollout"], unique=False)
    op.create_table(
        "revocations",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_revocations")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("cohort", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("begun", sa.Boolean(), nullable=False),
        sa.Column("body_json", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("author", sa.String(length=256), nullable=False),
        sa.Column("allow_leaving", sa.Boolean(), nullable=False),
        sa.Column("acknowledged_json", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index(op.f("ix_rollouts_cohort"), "rollouts", ["cohort"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("operator", sa.String(length=256), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("began", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_sessions")),
    )
    op.create_table(
        "telemetry",
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), server_default="0", nullable=False) for name in _COUNTERS),
        sa.PrimaryKeyConstraint("device", "bundle", name=op.f("pk_telemetry")),
    )
    op.create_table(
        "telemetry_marks",
        sa.Column("rollout", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), server_default="0", nullable=False) for name in _COUNTERS),
        sa.PrimaryKeyConstraint("rollout", "device", "bundle", name=op.f("pk_telemetry_marks")),
    )
