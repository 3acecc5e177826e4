"""The JSON structs of the operators' HTTP interface. Times are unix seconds, shares of 100,000."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.bundle.manifest import Name, Sha256
from causeway_server.router.checks.replay import DraftReport

from ..prover.proof import Proof
from ..store.history import AuditRow, CohortFigures, DeviceEvent, Happened

Reason = Annotated[str, Meta(max_length=500)]


# --- requests --------------------------------------------------------------------------------------------------------


class NewRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request to begin a rollout. Both permissions need the role approver. `allow_leaving`: requests that stayed on
    the device in the records may leave it. `without_replay`: the rollout may begin without records to replay.
    """

    cohort: Name
    to_bundle: Sha256
    allow_leaving: bool = False
    without_replay: bool = False


class OperatorReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""


class ErasureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to erase what a device stores. `client`: None for all its clients."""

    client: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    reason: Reason = ""


class ErasureAnswer(msgspec.Struct, frozen=True):
    """The last order to erase. `finished`: when the device's receipt (a compact JWS) came; None: not yet."""

    client: str
    ordered: float
    finished: float | None
    receipt: str


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bundle: Sha256
    reason: Reason = ""


class PolicyDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draft to try. `bundle`: the signed bundle whose policy it would replace."""

    bundle: Sha256
    policy: str


class NewJoinToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request for a join token. `cohort`: "" for the cohort that matches the device's labels. The token's labels
    override the device's own.
    """

    cohort: Annotated[str, Meta(max_length=64)] = ""
    uses: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    expires_s: Annotated[float, Meta(gt=0, le=366 * 86400)] = 86400.0
    labels: Annotated[dict[str, str], Meta(max_length=32)] = {}
    tenant: Name = "fleet"


class SignInRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: Annotated[str, Meta(max_length=256)]


# --- answers ---------------------------------------------------------------------------------------------------------


class CohortAnswer(msgspec.Struct, frozen=True):
    """The devices of a cohort, counted. `recently_seen`: devices seen in the last 15 minutes. `running`: number by
    bundle, "" for the factory's files. `ahead`: devices with newer metadata than the control plane, as after a restored
    backup. `figures`: of their requests.
    """

    name: str
    devices: int
    recently_seen: int
    running: dict[str, int]
    rollout: str | None
    ahead: int = 0
    figures: CohortFigures = CohortFigures()


class FleetAnswer(msgspec.Struct, frozen=True):
    """The whole fleet. `problems`: the reasons for which the controller does not publish."""

    name: str
    cohorts: tuple[CohortAnswer, ...]
    problems: tuple[str, ...] = ()


class MetricAnswer(msgspec.Struct, frozen=True):
    """A metric as shares of requests or devices; null if nothing was compared. `low`, `high`: interval of the canary
    minus the control. `margin`: the largest worsening that the rollout accepts; null if there is none.
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


class RolloutStatus(msgspec.Struct, frozen=True):
    """The state of a rollout. `stage`: index into `stages`; the number of stages means the soak."""

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


class RolloutAnswer(RolloutStatus, frozen=True):
    """A rollout. `looks`: the number of looks at this stage."""

    looks: int


class RolloutDetail(RolloutStatus, frozen=True):
    """The fields of `RolloutAnswer`, with all looks, the members by state, the history, and the checks' findings and
    predictions.
    """

    looks: tuple[LookAnswer, ...]
    members: dict[str, int]
    events: tuple[RolloutEventAnswer, ...]
    notes: tuple[str, ...] = ()
    predictions: tuple[Happened, ...] = ()


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
    erasure: ErasureAnswer | None = None


class DevicePage(msgspec.Struct, frozen=True):
    """A page of devices. `next`: the value of `after` for the next page; null on the last page."""

    devices: tuple[DeviceAnswer, ...]
    next: str | None


class JoinTokenAnswer(msgspec.Struct, frozen=True):
    """A new join token. `token` is shown only once."""

    token: str
    expires: float
    uses: int


class AuditPage(msgspec.Struct, frozen=True):
    rows: tuple[AuditRow, ...]


class ProvedDraft(DraftReport, frozen=True, kw_only=True):
    """A draft with its proofs, also that no more may leave than under the policy that it would replace."""

    proofs: tuple[Proof, ...]


class PolicyPair(msgspec.Struct, frozen=True):
    """The policies of two bundles; `from_` is `from` in JSON."""

    from_: str = msgspec.field(name="from")
    to: str
