"""The JSON of the operators' HTTP interface. Times are unix seconds, shares are of 100,000."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.bundle.manifest import Name, Sha256

from ..rollout.rollout import Rollout
from ..rollout.verdict import ROLLED_BACK, SILENT, Verdict
from ..store.devices import Device, DeviceEvent
from ..store.rollouts import LookRecord, RolloutRecord

Reason = Annotated[str, Meta(max_length=500)]


# --- requests --------------------------------------------------------------------------------------------------------


class NewRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout to begin. Both permissions need the role approver.

    `allow_leaving`: requests may leave the device that stayed on it in the records. `without_replay`: there may be no
    records to replay.
    """

    cohort: Name
    to_bundle: Sha256
    allow_leaving: bool = False
    without_replay: bool = False


class OperatorReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bundle: Sha256
    reason: Reason = ""


class NewJoinToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cohort` "": the one that matches the box's labels. The labels win over what a box says of itself."""

    cohort: Annotated[str, Meta(max_length=64)] = ""
    uses: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    expires_s: Annotated[float, Meta(gt=0, le=366 * 86400)] = 86400.0
    labels: Annotated[dict[str, str], Meta(max_length=32)] = {}
    tenant: Name = "fleet"


class SignInRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Annotated[str, Meta(max_length=256)]


# --- answers ---------------------------------------------------------------------------------------------------------


class SessionAnswer(msgspec.Struct, frozen=True):
    name: str
    role: str


class CohortAnswer(msgspec.Struct, frozen=True):
    """Boxes of one cohort.

    `recently_seen`: boxes of the last 15 minutes. `running`: bundle, "" for the factory's files → boxes. `ahead`: boxes
    that have newer metadata than the control plane, as after a restored backup.
    """

    name: str
    boxes: int
    recently_seen: int
    running: dict[str, int]
    rollout: str | None
    ahead: int = 0


class FleetAnswer(msgspec.Struct, frozen=True):
    """`problems`: the reasons for which the controller does not publish."""

    name: str
    cohorts: tuple[CohortAnswer, ...]
    problems: tuple[str, ...] = ()


class MetricAnswer(msgspec.Struct, frozen=True):
    """Shares of requests or boxes; null where nothing was compared. `low`, `high`: of the canary minus the control.

    `margin`: the largest worsening that the rollout accepts; null where there is none.
    """

    name: str
    outcome: str
    reason: str
    canary: float | None
    control: float | None
    low: float | None
    high: float | None
    p: float
    margin: float | None


class LookAnswer(msgspec.Struct, frozen=True):
    at: float
    stage: int
    outcome: str
    metrics: tuple[MetricAnswer, ...]


class RolloutEventAnswer(msgspec.Struct, frozen=True):
    at: float
    actor: str
    action: str
    reason: str


class _Rollout(msgspec.Struct, frozen=True):
    id: str
    cohort: str
    state: str
    stage: int
    stages: tuple[int, ...]
    share: int
    began: float
    entered: float
    reason: str
    to_bundle: str
    from_bundle: str | None
    author: str
    created: float


class RolloutAnswer(_Rollout, frozen=True):
    """`stage`: index into `stages`; their number is the soak. `looks`: how many at this stage."""

    looks: int


class RolloutDetail(_Rollout, frozen=True):
    """As `RolloutAnswer`, with all looks, the members by their state, and what happened."""

    looks: tuple[LookAnswer, ...]
    members: dict[str, int]
    events: tuple[RolloutEventAnswer, ...]


class DeviceAnswer(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    cohort: str
    labels: dict[str, str]
    site: str
    enrolled: float
    revoked: float | None
    held: bool
    pin: str | None
    last_seen: float
    cloned: bool
    daemon: str
    state: str
    state_since: float
    running: str | None
    running_since: float
    wanted: str | None
    rollout: str
    code: str
    reason: str
    quarantined: tuple[str, ...]
    unproven: bool
    history: tuple[DeviceEvent, ...] = ()


class DevicePage(msgspec.Struct, frozen=True):
    """`next`: the value of `after` for the next page; null: this is the last."""

    devices: tuple[DeviceAnswer, ...]
    next: str | None


class JoinTokenAnswer(msgspec.Struct, frozen=True):
    """`token` is shown once."""

    token: str
    expires: float
    uses: int


class AuditAnswer(msgspec.Struct, frozen=True):
    """`what` is JSON; its exact text is what the hash covers."""

    n: int
    at: float
    actor: str
    action: str
    what: msgspec.Raw
    previous: str
    hash: str


class AuditPage(msgspec.Struct, frozen=True):
    rows: tuple[AuditAnswer, ...]


class PolicyPair(msgspec.Struct, frozen=True):
    """The policies of two bundles; `from_` is `from` in JSON."""

    from_: str = msgspec.field(name="from")
    to: str


def rollout_answer(record: RolloutRecord) -> RolloutAnswer:
    return RolloutAnswer(**_common(record), looks=record.rollout.looks)


def rollout_detail(
    record: RolloutRecord,
    looks: tuple[LookRecord, ...],
    members: dict[str, int],
    events: tuple[RolloutEventAnswer, ...],
) -> RolloutDetail:
    settings = record.rollout.settings
    margins = {limit.name: limit.margin for limit in settings.metrics}
    margins |= {ROLLED_BACK: settings.lost_margin, SILENT: settings.lost_margin}
    return RolloutDetail(
        **_common(record), looks=tuple(_look(look, margins) for look in looks), members=members, events=events
    )


def device_answer(device: Device, history: tuple[DeviceEvent, ...] = ()) -> DeviceAnswer:
    same = {name: getattr(device, name) for name in DeviceAnswer.__struct_fields__ if name != "history"}
    return DeviceAnswer(**same, history=history)


def _common(record: RolloutRecord) -> dict[str, Any]:
    rollout: Rollout = record.rollout
    names = ("id", "cohort", "stage", "share", "began", "entered", "reason", "to_bundle", "from_bundle")
    return {name: getattr(rollout, name) for name in names} | {
        "state": rollout.state.value,
        "stages": tuple(stage.share for stage in rollout.settings.stages),
        "author": record.author,
        "created": record.created,
    }


def _look(record: LookRecord, margins: dict[str, float]) -> LookAnswer:
    verdict = msgspec.json.decode(record.verdict_json, type=Verdict)
    metrics = []
    for metric in verdict.metrics:
        found = metric.difference
        metrics.append(
            MetricAnswer(
                metric.name,
                metric.outcome.value,
                metric.reason,
                None if found is None else found.canary,
                None if found is None else found.control,
                None if found is None else found.low,
                None if found is None else found.high,
                metric.p,
                margins.get(metric.name),
            )
        )
    return LookAnswer(record.at, record.stage, verdict.outcome.value, tuple(metrics))
