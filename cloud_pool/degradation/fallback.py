"""The order of the tiers, the state of each, and the fallback steps of one request, each with its reason.

`TierFallback` owns health, breakers and times to first token; `plan` is pure:

1. Tiers at or below the requested one that are healthy enough and offer this request a share, best first.
2. Tiers whose lowered share excludes this request, which is better than an error if all of (1) refuse.
3. If all tiers are broken, they are tried nevertheless, because a tier that looks broken may just have recovered.
4. When every working tier is under stress, answers that may be truncated are.
5. A critical request has exactly one step: the tier that it names, whatever its state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry, Gauge

from causeway_server.router.errors import BackendError, CausewayError, CloudRejected
from causeway_server.router.serving.metrics import Counter, described
from causeway_server.router.trackers import Breaker, Ewma

from ..admission import RANK, Priority
from .config import DegradationConfig, ShareRamp
from .tier_health import (
    FULL_SHARE,
    ArrivalRate,
    Stress,
    TierHealth,
    TierSnapshot,
    fitting_share,
    next_tier_health,
    offer_share,
    stress_of,
)

REQUESTED = "requested"
"""The reason that stands for the requested tier itself, in headers and metrics."""
_TIMEOUT_FACTOR: dict[Priority, float] = {"interactive": 1.0, "standard": 2.0, "bulk": 10.0}
_PRESENT_S = 2.0  # a priority with a request in this time is present
_HALF_LIFE_S = 0.5  # short: an overload that is over must be forgotten within seconds
Kind = Literal["tier", "partial", "stale"]


class FallbackRequest(msgspec.Struct, frozen=True):
    tier: str
    left_s: float
    position: float = 0.5  # caller's position in the line, 0 to 1
    critical: bool = False  # whether no other tier may answer
    allowed: frozenset[str] | None = None  # tiers that may answer; None for all
    pinned: str = ""  # tier of the request's session, which is tried first; "": that of the request
    may_truncate: bool = False  # whether the answer may be truncated


class FallbackStep(msgspec.Struct, frozen=True):
    tier: str
    skipped: tuple[tuple[str, Stress], ...] = ()  # skipped tiers above this one, with the stress of each
    truncated: bool = False  # whether the answer is truncated
    last: bool = False  # whether no step follows, so that this one has all the remaining time
    forced: bool = False  # whether the tier is tried although it seems broken; the breaker is bypassed
    trial: bool = False  # whether a variant is tried before the tier's own model; its faults are not the tier's

    def reason(self, failed: Mapping[str, Stress]) -> str:
        """Return `requested`, or skipped tiers and their stress, `failed` included: "large=slow; medium=saturated"."""
        if not self.skipped:
            return REQUESTED
        return "; ".join([f"{name}={failed.get(name) or stress or 'saturated'}" for name, stress in self.skipped])

    def nearest_reason(self, failed: Mapping[str, Stress]) -> str:
        """Return the stress of the tier directly above this one; `requested` for the requested tier."""
        if not self.skipped:
            return REQUESTED
        name, stress = self.skipped[-1]
        return failed.get(name) or stress or "saturated"


class FallbackPlan(msgspec.Struct, frozen=True):
    fallback_steps: tuple[FallbackStep, ...]
    tier_healths: tuple[tuple[str, TierHealth], ...]  # health of each tier in the plan, after this request


def plan(
    request: FallbackRequest,
    views: Sequence[TierSnapshot],
    tier_healths: Mapping[str, TierHealth],
    share_ramp: ShareRamp,
    now: float,
) -> FallbackPlan:
    """Plan the steps of one request. `views`: the requested tier, then those below it, best first."""
    assessments = [_assess(view, tier_healths.get(view.name, FULL_SHARE), share_ramp, now) for view in views]
    if request.critical or len(assessments) == 1:  # (5)
        truncated = request.may_truncate and not request.critical and _is_under_stress(assessments[0])
        only = FallbackStep(views[0].name, truncated=truncated, last=True, forced=True)
        return FallbackPlan(
            (only,), tuple((assessment.view.name, assessment.tier_health) for assessment in assessments)
        )
    offered: list[_TierAssessment] = []
    excluded: list[_TierAssessment] = []
    after: list[tuple[str, TierHealth]] = []
    for assessment in assessments:
        if assessment.stress == "broken" or assessment.view.queue_s >= min(
            request.left_s, assessment.view.first_token_timeout_s
        ):
            after.append((assessment.view.name, assessment.tier_health))
            continue
        is_offered, tier_health = offer_share(assessment.tier_health, request.position)
        (offered if is_offered else excluded).append(assessment)
        after.append((assessment.view.name, tier_health))
    working = [*offered, *excluded]  # (1), (2)
    truncated = (
        request.may_truncate and bool(working) and all(_is_under_stress(assessment) for assessment in working)
    )  # (4)
    order = working or assessments  # (3)
    return FallbackPlan(_steps(order, assessments, truncated=truncated, forced=not working), tuple(after))


class _TierAssessment(msgspec.Struct, frozen=True):
    view: TierSnapshot
    stress: Stress
    tier_health: TierHealth


def _assess(view: TierSnapshot, tier_health: TierHealth, share_ramp: ShareRamp, now: float) -> _TierAssessment:
    stress = stress_of(view, tier_health)
    return _TierAssessment(view, stress, next_tier_health(tier_health, stress, view, share_ramp, now))


def _is_under_stress(assessment: _TierAssessment) -> bool:
    """Return whether the tier is overloaded, or was until a moment ago."""
    return (assessment.stress or assessment.tier_health.stress) in ("saturated", "slow")


def _steps(
    order: Sequence[_TierAssessment], assessments: Sequence[_TierAssessment], *, truncated: bool, forced: bool
) -> tuple[FallbackStep, ...]:
    stresses = [(one.view.name, one.stress or one.tier_health.stress) for one in assessments]
    return tuple(
        FallbackStep(one.view.name, tuple(stresses[: assessments.index(one)]), truncated, at == len(order) - 1, forced)
        for at, one in enumerate(order)
    )


class EndpointAvailability(Protocol):
    """A tier's endpoints: `dispatch.pool.Pool`."""

    @property
    def healthy(self) -> int: ...


class QueuePressure(Protocol):
    """A tier's queue: `admission.scheduler.AdmissionScheduler`."""

    @property
    def running(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def held_s(self) -> float | None: ...

    def saturated(self, now: float) -> bool: ...

    def expected_wait_s(self, priority: Priority) -> float: ...


class TierSignals(msgspec.Struct, frozen=True):
    """The sources of a tier's snapshot."""

    availability: EndpointAvailability
    pressure: QueuePressure
    objective_s: float = 0.0  # objective of the time to first token, seconds; 0 for none


class _Tier:
    def __init__(self, signals: TierSignals) -> None:
        self.signals = signals
        self.breaker = Breaker()
        self.ttft = Ewma(_HALF_LIFE_S)
        self.arrived_at = dict.fromkeys(RANK, -math.inf)  # the last request of each priority
        self.arrivals = {priority: ArrivalRate() for priority in RANK}
        self.warm = True
        self.first_token_at = -math.inf


class TierFallback:
    """Plans each request's fallback steps, and records their outcomes.

    `signals`: signals by the tier's name; a tier outside the configured order has no fallback. `chains`: the tiers that
    may answer for each, in order. `sole`: the steps of the tiers without fallback.
    """

    def __init__(
        self,
        config: DegradationConfig,
        signals: Mapping[str, TierSignals],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self._tiers = {name: _Tier(each) for name, each in signals.items()}
        self.chains = {name: _from(config.tiers, name) for name in signals}
        # Outside the order there is nothing to choose, and so nothing to observe.
        self.sole = {
            name: (FallbackStep(name, last=True, forced=True),) for name in signals if name not in config.tiers
        }
        # By priority: many bulk requests say nothing about the more urgent ones, which are admitted before them.
        self._tier_healths: dict[Priority, dict[str, TierHealth]] = {priority: {} for priority in RANK}

    def fallback_steps(self, request: FallbackRequest, priority: Priority) -> tuple[FallbackStep, ...]:
        """Return the steps to try for this request, in order; never empty."""
        if not request.may_truncate and (sole := self.sole.get(request.tier)) is not None:
            return sole
        now = self._clock()
        first = request.pinned or request.tier
        names = (first,) if request.critical else self.chains[request.tier]
        if request.allowed is not None:
            names = tuple(name for name in names if name == request.tier or name in request.allowed)
        if request.pinned:
            names = (first, *[name for name in names if name != first])
        views = [self._observe(name, priority, now) for name in names]
        tier_healths = self._tier_healths[priority]
        planned = plan(request, views, tier_healths, self.config.share_ramp, now)
        tier_healths.update(planned.tier_healths)
        return planned.fallback_steps

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._tiers)

    def is_open(self, tier: str) -> bool:
        """Return whether the breaker is open or half open."""
        return self._tiers[tier].breaker.state(self._clock()) != "closed"

    def tier_health(self, tier: str, priority: Priority = "standard") -> TierHealth:
        return self._tier_healths[priority].get(tier, FULL_SHARE)

    def share(self, tier: str, priority: Priority) -> float:
        """Return the share of the movable requests that the tier is offered, 0 to 1."""
        return self.tier_health(tier, priority).share

    def first_token_timeout_s(self, fallback_step: FallbackStep, priority: Priority, left_s: float) -> float:
        """Return the maximum time to the first token of a step, including the wait for a permit."""
        objective_s = self._tiers[fallback_step.tier].signals.objective_s
        if fallback_step.last or not objective_s:
            return left_s
        # The next step keeps half of a short deadline.
        return min(_TIMEOUT_FACTOR[priority] * self.config.first_token_timeout_factor * objective_s, left_s / 2.0)

    # --- outcomes of a step ------------------------------------------------------------------------------------------

    def may_try(self, fallback_step: FallbackStep) -> bool:
        """Ask the breaker whether an attempt is allowed. If so, the caller must report exactly one outcome (`on_…`)."""
        return self._tiers[fallback_step.tier].breaker.allow(self._clock()) or fallback_step.forced

    def is_late(self, tier: str, seconds: float) -> bool:
        """Return whether the first token is overdue `seconds` after the request was handed to Triton."""
        objective_s = self._tiers[tier].signals.objective_s
        return bool(objective_s) and seconds >= objective_s

    def retry_after_s(self, tier: str) -> float:
        """Return the time until the breaker allows an attempt."""
        return self._tiers[tier].breaker.retry_after_s(self._clock())

    def on_first_token(self, tier: str, seconds: float) -> None:
        """Record the first token, `seconds` after the hand-over: waits before do not show the tier's speed."""
        now, known = self._clock(), self._tiers[tier]
        known.breaker.success(now)
        known.first_token_at = now
        if known.warm:
            known.ttft.add(seconds, now)

    def on_failure(self, tier: str, error: CausewayError, *, trial: bool = False) -> Stress:
        """Record an error before the first token; return its stress, "" if the request itself is invalid.

        `trial`: whether a variant failed, which the tier's breaker does not count.
        """
        now, known = self._clock(), self._tiers[tier]
        stress = stress_of_error(error)
        (known.breaker.failure if stress == "broken" and not trial else known.breaker.cancelled)(now)
        return stress

    def on_timeout(self, tier: str, seconds: float | None) -> Stress:
        """Record that the step's time ended without a first token, and return the tier's stress.

        `seconds`: since the hand-over to Triton; None: it got no permit. The breaker counts the timeout only after the
        tier's own limit, because callers may have short deadlines.
        """
        now, known = self._clock(), self._tiers[tier]
        if seconds is None:
            known.breaker.cancelled(now)
            return "saturated"
        if self.is_late(tier, seconds) and known.warm:
            known.ttft.add(seconds, now)
        is_tiers_fault = self.is_late(tier, seconds / self.config.first_token_timeout_factor)
        (known.breaker.failure if is_tiers_fault else known.breaker.cancelled)(now)
        return "slow"

    def on_cancel(self, tier: str) -> None:
        """Record that the caller left before the first token."""
        self._tiers[tier].breaker.cancelled(self._clock())

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def mark_cold(self, tier: str) -> None:
        """Ignore the tier's times to first token until it is warmed up, because its model was just loaded."""
        self._tiers[tier].warm = False

    def mark_warm(self, tier: str) -> None:
        known = self._tiers[tier]
        known.warm, known.first_token_at = True, self._clock()

    def is_warm(self, tier: str) -> bool:
        return self._tiers[tier].warm

    def idle_s(self, tier: str) -> float:
        """Return the time since the tier's last first token."""
        return self._clock() - self._tiers[tier].first_token_at

    def _observe(self, name: str, priority: Priority, now: float) -> TierSnapshot:
        """Return the snapshot for this priority: the least urgent one present moves first, and comes back last."""
        self._tiers[name].arrived_at[priority] = now
        self._tiers[name].arrivals[priority].add(now)
        view = self._snapshot(name, priority, now)
        stress = stress_of(view, self.tier_health(name, priority))
        if stress in ("saturated", "slow"):
            below = next((other for other in reversed(self._others(name, priority, now, below=True))), None)
            if below is not None:
                self._tier_healths[below][name] = next_tier_health(
                    self.tier_health(name, below), stress, view, self.config.share_ramp, now, is_displaced=True
                )
                return msgspec.structs.replace(view, saturated=False, ttft_s=None, waits=True)
        elif self._others(name, priority, now, below=False):
            return msgspec.structs.replace(view, waits=True)
        return view

    def _others(self, name: str, priority: Priority, now: float, *, below: bool) -> list[Priority]:
        """Return the present priorities: those below this one that could move, or those above that are not back."""
        arrived_at, rank, min_share = self._tiers[name].arrived_at, RANK[priority], self.config.share_ramp.min_share
        present = [other for other in RANK if now - arrived_at[other] < _PRESENT_S]
        if below:
            return [
                other for other in present if RANK[other] > rank and self.tier_health(name, other).share > min_share
            ]
        return [other for other in present if RANK[other] < rank and self.tier_health(name, other).share < 1.0]

    def _snapshot(self, name: str, priority: Priority, now: float) -> TierSnapshot:
        tier = self._tiers[name]
        signals, pressure = tier.signals, tier.signals.pressure
        queue_s = pressure.expected_wait_s(priority)
        timeout_s = _TIMEOUT_FACTOR[priority] * self.config.first_token_timeout_factor * signals.objective_s
        return TierSnapshot(
            name,
            broken=signals.availability.healthy == 0 or tier.breaker.state(now) == "open",
            saturated=_is_saturated(signals, priority, queue_s, now),
            queue_s=queue_s,
            first_token_timeout_s=timeout_s or math.inf,
            busy=pressure.running / max(1, pressure.limit),
            fitting_share=fitting_share(
                tier.arrivals[priority].per_s(now), pressure.held_s, pressure.running, pressure.limit
            ),
            ttft_s=tier.ttft.value(now),
            objective_s=signals.objective_s,
        )


def _is_saturated(signals: TierSignals, priority: Priority, queue_s: float, now: float) -> bool:
    """Return whether the tier is saturated for this priority. A queue of less urgent work does not count."""
    is_saturated = signals.pressure.saturated(now)
    if priority == "interactive":
        return is_saturated and queue_s > signals.objective_s
    if priority == "bulk" and signals.objective_s:
        return is_saturated or queue_s > _TIMEOUT_FACTOR["standard"] * signals.objective_s
    return is_saturated


def stress_of_error(error: CausewayError) -> Stress:
    """Return the stress that an error before the first token indicates; "" if every tier would return it."""
    if isinstance(error, BackendError) and not isinstance(error, CloudRejected):
        return "broken"
    return "saturated" if error.status in (429, 503) else ""


def _from(order: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the tier and those below it in the order."""
    return tuple(order[order.index(name) :]) if name in order else (name,)


class DegradationMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry)
        self._answers = counter("causeway_gateway_tier_answers", ("requested", "tier", "reason"))
        self._degraded = counter("causeway_gateway_degraded_answers", ("kind",))
        self._share = described(Gauge, registry, "causeway_gateway_tier_share", ("tier", "priority"))
        self._breaker = described(Gauge, registry, "causeway_gateway_breaker_open", ("tier",))

    def watch(self, fallback: TierFallback) -> None:
        """Read the tiers' state at each scrape."""
        for name in fallback.names:
            for priority in RANK:
                self._share.labels(name, priority).set_function(partial(fallback.share, name, priority))
            self._breaker.labels(name).set_function(partial(fallback.is_open, name))

    def answered(self, requested: str, tier: str, reason: str) -> None:
        self._answers.add((requested, tier, reason))

    def degraded(self, kind: Kind) -> None:
        self._degraded.add((kind,))


_TICK_S = 0.25
_PAUSE_S = 1.0  # after a warm-up that failed


class EndpointCheck(Protocol):
    """A tier's endpoints: `dispatch.pool.Pool`."""

    async def check(self) -> Mapping[str, str]:
        """Send each endpoint a tiny request; return the error code by address, "" for an endpoint that answered."""
        ...


class TierWarmer(msgspec.Struct, frozen=True):
    """Warm-up of tiers while `watch` runs: an idle or reloaded tier answers a tiny request.

    The first answer after a pause pays for cold caches, connections and pages. Callers should not wait for that, and a
    tier must not look slow because of it: until a warm-up succeeds, times to first token are ignored.
    """

    fallback: TierFallback
    pools: Mapping[str, EndpointCheck]  # endpoints by tier
    models: Mapping[str, str]  # name of the model in Triton, by tier
    idle_s: float  # idle time after which a tier is warmed up, seconds; 0: never
    clock: Callable[[], float] = time.monotonic  # monotonic clock, seconds
    not_before: dict[str, float] = {}  # earliest time of the next attempt, by tier
    busy: set[str] = set()  # tiers whose warm-up is running

    def __post_init__(self) -> None:
        if self.idle_s:
            for tier in self.pools:
                self.fallback.mark_cold(tier)

    def loaded(self, model: str) -> None:
        """Record that Triton has reloaded the model."""
        for tier, name in self.models.items():
            if name == model and self.idle_s:
                self.fallback.mark_cold(tier)
                self.not_before.pop(tier, None)

    async def watch(self) -> None:
        """Warm up tiers that are due, until cancelled."""
        if not self.idle_s:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                self.start_due(tasks)
                await anyio.sleep(_TICK_S)

    def start_due(self, tasks: TaskGroup) -> None:
        """Start the warm-ups that are due."""
        now = self.clock()
        for tier in self.pools:
            is_idle = self.fallback.idle_s(tier) >= self.idle_s
            is_due = (is_idle or not self.fallback.is_warm(tier)) and now >= self.not_before.get(tier, 0.0)
            if is_due and tier not in self.busy:
                self.busy.add(tier)
                tasks.start_soon(self._warm_up, tier)

    async def _warm_up(self, tier: str) -> None:
        try:
            if "" in (await self.pools[tier].check()).values():
                self.fallback.mark_warm(tier)
        finally:
            self.not_before[tier] = self.clock() + _PAUSE_S
            self.busy.discard(tier)
