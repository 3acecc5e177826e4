"""The result of a replay. Every list has a fixed order: the same records and policies give the same report."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...types import Kind, SoundKind
from .latency import Interval

Cause = Literal["leaves", "may_leave", "unknown"]
"""Of a request that leaves the device.

- leaves: it goes to the cloud.
- may_leave: no target in the cloud could answer it; now one can, after a failure or a handoff.
- unknown: it may, and whether it does hangs on a signal that was not recorded.
"""


class LeavingRequest(msgspec.Struct, frozen=True):
    """A request that stayed on the device and would, or may, leave it."""

    position: int  # of its record, from 0
    id: str
    created: float  # Unix time, s
    kind: Kind | SoundKind
    client: str
    tags: tuple[str, ...]
    cause: Cause
    before: str  # the target
    after: str  # the target, or all possible ones
    rule: str  # of the new policy
    bound_by: tuple[str, ...]  # constraints, or the client's preference, that kept it on the device
    hangs_on: tuple[str, ...]


class Move(msgspec.Struct, frozen=True):
    """Requests with the same places and rules before and after. `moved` False: the same model at the same location."""

    before: str
    after: str
    rule_before: str
    rule_after: str
    requests: int
    moved: bool


class UnknownOutcome(msgspec.Struct, frozen=True):
    """Requests whose place hangs on what was not recorded."""

    before: str
    possible: tuple[str, ...]
    hangs_on: tuple[str, ...]
    requests: int


class CostChange(msgspec.Struct, frozen=True):
    """Cost in USD of the same tokens. Unknown outcomes count at their cheapest and at their dearest."""

    before_usd: float
    after_least_usd: float
    after_most_usd: float


class LatencyRow(msgspec.Struct, frozen=True):
    time: Literal["first token", "whole answer"]
    share: float  # 0.5: the median
    before: Interval  # ms
    after: Interval


class LatencyChange(msgspec.Struct, frozen=True):
    """Estimated from `requests` with a known outcome. `not_estimated`: moved to where too few answers were observed."""

    requests: int
    not_estimated: int
    rows: tuple[LatencyRow, ...]


class ObservedTarget(msgspec.Struct, frozen=True):
    """What a model at a location was observed to take, ms."""

    at: str
    model: str
    answers: int
    first_token_p50: Interval
    first_token_p95: Interval
    answer_p50: Interval
    answer_p95: Interval


class ReplayReport(msgspec.Struct, frozen=True):
    """What a policy would have done.

    Attributes:
        policy: The new policy, name@revision.
        old: The policy it is compared with; "" for what was recorded.
        requests: Number of replayed records.
        undecided: Records of requests that were refused before a decision (rate, queue); they are not replayed.
        leaving: Every request that stayed on the device and would leave it, in the order of the records.
        unchanged: Requests that stay where they were.
        moves: All known outcomes, those that moved first, largest first.
        unknown: Unknown outcomes, largest first.
    """

    policy: str
    old: str
    requests: int
    undecided: int
    leaving: tuple[LeavingRequest, ...]
    unchanged: int
    moves: tuple[Move, ...]
    unknown: tuple[UnknownOutcome, ...]
    cost: CostChange
    latency: LatencyChange
    targets: tuple[ObservedTarget, ...]
