"""The tables. Times are unix seconds by the control plane's clock; a column that ends in `_json` holds JSON text."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, false

from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

LATENCY_COLUMNS = tuple(f"latency_{index}" for index in range(len(LATENCY_BOUNDS_S) + 1))
COUNTERS = (
    *("requests", "errors", "degraded", "on_device", "cached", "private", "micro_usd"),
    "measured",  # requests of samples that have `on_device`, of which these four are
    *LATENCY_COLUMNS,
)
LABELS = ("good", "bad", "own_good", "own_bad")  # `protocol.LabelCounts`
_ID, _NAME, _HASH = String(128), String(64), String(64)
_Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only INTEGER primary keys


def _counters() -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False, server_default="0") for name in COUNTERS]


devices = Table(
    "devices",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant", _NAME, nullable=False),
    Column("cohort", _NAME, nullable=False, index=True),
    Column("labels_json", Text, nullable=False),
    Column("site", _ID, nullable=False, index=True),  # "": a site of its own
    Column("public_key", String(43), nullable=False, unique=True),
    Column("join_token", _HASH, nullable=False),  # the hash of the token that it enrolled with
    Column("enrolled", Float, nullable=False),
    # Set by operators.
    Column("revoked", Float),
    Column("held", Boolean, nullable=False),
    Column("pin", _HASH),
    # Set by the device's messages.
    Column("last_seen", Float, nullable=False),  # 0: never
    Column("token_sent", Float, nullable=False),  # `sent` of its newest token request: an older one is a replay
    Column("boots_json", Text, nullable=False),  # fleet.server.messages.BootHistory
    Column("cloned", Boolean, nullable=False),
    Column("daemon", _NAME, nullable=False),
    Column("state", String(16), nullable=False),
    Column("state_since", Float, nullable=False),  # when the state was first reported
    Column("running", _HASH),
    Column("running_since", Float, nullable=False),  # when `running` was first reported
    Column("wanted", _HASH),
    Column("rollout", _NAME, nullable=False),
    Column("code", _NAME, nullable=False),
    Column("reason", Text, nullable=False),
    Column("quarantined_json", Text, nullable=False),
    Column("unproven", Boolean, nullable=False),
    Column("weekday", Integer, nullable=False),  # at the device, ISO
    Column("minute", Integer, nullable=False),  # of the device's day
    Column("granted", Float, nullable=False),  # when it was last told that it may change
    Column("erasure_json", Text, nullable=False, server_default=""),  # fleet.store.devices.Erasure; "": none
    Column("temperature_c", Float),
    Column("drift", Float),
)

device_events = Table(
    "device_events",
    metadata,
    Column("n", _Serial, primary_key=True, autoincrement=True),
    Column("device", _ID, nullable=False),
    Column("at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("running", _HASH),
    Column("wanted", _HASH),
    Column("rollout", _NAME, nullable=False),
    Column("code", _NAME, nullable=False),
    Column("reason", Text, nullable=False),
    Index(None, "device", "n"),
)

join_tokens = Table(
    "join_tokens",
    metadata,
    Column("hash", _HASH, primary_key=True),
    Column("cohort", _NAME, nullable=False),  # "": by the device's labels
    Column("tenant", _NAME, nullable=False),
    Column("labels_json", Text, nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
)

telemetry = Table(
    "telemetry",  # all requests of a device under a bundle
    metadata,
    Column("device", _ID, primary_key=True),
    Column("bundle", _HASH, primary_key=True),  # "": the factory's files
    Column("last_seen", Float, nullable=False),
    *_counters(),
)

telemetry_marks = Table(
    "telemetry_marks",  # `telemetry` as it was at a rollout's last look
    metadata,
    Column("rollout", _NAME, primary_key=True),
    Column("device", _ID, primary_key=True),
    Column("bundle", _HASH, primary_key=True),
    *_counters(),
)

records = Table(
    "records",  # a sample of the devices' decisions, without content
    metadata,
    Column("n", _Serial, primary_key=True, autoincrement=True),
    Column("device", _ID, nullable=False),
    Column("arrived", Float, nullable=False, index=True),
    Column("weight", Float, nullable=False),  # the number of requests that it stands for
    Column("record_json", Text, nullable=False),  # router.types.DecisionRecord
    Index(None, "device", "n"),
)

labels = Table(
    "labels",  # all labelled answers of a device under a bundle, by cell of confidence
    metadata,
    Column("device", _ID, primary_key=True),
    Column("bundle", _HASH, primary_key=True),  # "": the factory's files
    Column("cell", Integer, primary_key=True),
    Column("last_seen", Float, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in LABELS),
)

revocations = Table(
    "revocations",
    metadata,
    Column("owner", String(200), primary_key=True),  # tenant/device
    Column("at", Float, nullable=False),  # tokens that were issued until then are refused
)

generations = Table(
    "generations",
    metadata,
    Column("name", _NAME, primary_key=True),  # a cohort, or REVOCATIONS
    Column("counter", BigInteger, nullable=False),
    Column("nonce", String(16), nullable=False),  # after a restored backup a counter repeats, a nonce does not
    Column("pace_json", Text, nullable=False),  # fleet.store.generations.CohortPace
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", _NAME, primary_key=True),
    Column("cohort", _NAME, nullable=False, index=True),
    Column("state", String(16), nullable=False),  # as in the body
    Column("begun", Boolean, nullable=False),  # it has reached its first stage: its plan is the cohort's
    Column("body_json", Text, nullable=False),  # fleet.rollout.rollout.Rollout
    Column("version", Integer, nullable=False),  # grows with each change; two writers cannot both change a version
    Column("author", String(256), nullable=False),
    Column("allow_leaving", Boolean, nullable=False),  # requests may leave the device that stayed on it before
    Column("without_replay", Boolean, nullable=False, server_default=false()),  # there may be no records to replay
    # Rollouts that only devices knew after a restored backup.
    Column("acknowledged_json", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
)

looks = Table(
    "looks",
    metadata,
    Column("n", _Serial, primary_key=True, autoincrement=True),
    Column("rollout", _NAME, nullable=False, index=True),
    Column("at", Float, nullable=False),
    Column("stage", Integer, nullable=False),
    Column("verdict_json", Text, nullable=False),
)

audit = Table(
    "audit",  # append-only; each row's hash covers the row before
    metadata,
    Column("n", _Serial, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("actor", String(256), nullable=False),
    Column("action", _NAME, nullable=False),
    Column("what_json", Text, nullable=False),
    Column("previous", _HASH, nullable=False),
    Column("hash", _HASH, nullable=False),
)

sessions = Table(
    "sessions",  # of operators
    metadata,
    Column("hash", _HASH, primary_key=True),  # of the session's secret
    Column("operator", String(256), nullable=False),
    Column("role", String(16), nullable=False),
    Column("began", Float, nullable=False),
    Column("expires", Float, nullable=False),
)
