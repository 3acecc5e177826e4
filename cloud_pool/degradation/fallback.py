"""The tiers' order and how they stand. Owns footings, breakers and times to first token; the plan itself is pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from router.decision.breaker import Breaker
from router.decision.latency import Ewma
from router.errors import BackendError, CausewayError, CloudRejected

from ..admission import RANK, Priority
from .config import DegradationConfig
from .demand import ArrivalRate, fits
from .fallback_plan import FallbackRequest, FallbackStep, plan
from .tier_health import FULL_SHARE, Stress, TierHealth, TierSnapshot, next_tier_health, stress_of

_PATIENCE: dict[Priority, float] = {"interactive": 1.0, "standard": 2.0, "bulk": 10.0}
_THESE_DAYS_S = 2.0
_HALF_LIFE_S = 0.5  # short: an overload that is over must be forgotten within seconds


class EndpointAvailability(Protocol):
    """Of a tier's endpoints: pool.Pool."""

    @property
    def healthy(self) -> int: ...


class QueuePressure(Protocol):
    """Of a tier's queue: admission.Admission."""

    @property
    def saturated(self) -> bool: ...

    @property
    def running(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def held_s(self) -> float | None: ...

    def queue_seconds(self, priority: Priority) -> float: ...


class TierSignals(msgspec.Struct, frozen=True):
    """What a tier's state is read from."""

    health: EndpointAvailability
    pressure: QueuePressure
    objective_s: float = 0.0  # of the time to first token; 0: none


class _Tier:
    def __init__(self, sense: TierSignals, breaker: Breaker) -> None:
        self.sense = sense
        self.breaker = breaker
        self.ttft = Ewma(_HALF_LIFE_S)
        self.asked_at = dict.fromkeys(RANK, -math.inf)  # when somebody of a priority last asked
        self.asked = {priority: ArrivalRate() for priority in RANK}
        self.warm = True
        self.spoke_at = -math.inf


class TierFallback:
    """`senses` by the tier's name; a tier that is not in the ladder's order stands alone."""

    def __init__(
        self,
        config: DegradationConfig,
        senses: Mapping[str, TierSignals],
        *,
        clock: Callable[[], float] = time.monotonic,
        breaker: Callable[[], Breaker] = Breaker,
    ) -> None:
        self.config = config
        self._clock = clock
        self._tiers = {name: _Tier(sense, breaker()) for name, sense in senses.items()}
        self._below = {name: _from(config.tiers, name) for name in senses}
        # Each priority has its own: a crowd of bulk work says nothing about who goes in before it.
        self._footings: dict[Priority, dict[str, TierHealth]] = {priority: {} for priority in RANK}

    def fallback_steps(self, asked: FallbackRequest, priority: Priority) -> tuple[FallbackStep, ...]:
        """What to try for this request, in order; never empty."""
        now = self._clock()
        names = (asked.tier,) if asked.stays else self._below[asked.tier]
        views = [self._seen(name, priority, now) for name in names]
        tier_healths = self._footings[priority]
        made = plan(asked, views, tier_healths, self.config.share_ramp, now)
        tier_healths.update(made.tier_healths)
        return made.fallback_steps

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._tiers)

    def is_open(self, tier: str) -> bool:
        """Whether the breaker keeps requests away."""
        return self._tiers[tier].breaker.state(self._clock()) != "closed"

    def tier_health(self, tier: str, priority: Priority = "standard") -> TierHealth:
        return self._footings[priority].get(tier, FULL_SHARE)

    def first_token_timeout_s(self, fallback_step: FallbackStep, priority: Priority, left_s: float) -> float:
        """How long a rung may take to its first token, the wait for a place included."""
        objective_s = self._tiers[fallback_step.tier].sense.objective_s
        if fallback_step.last or not objective_s:
            return left_s
        # Of a short deadline the next rung keeps its half.
        return min(_PATIENCE[priority] * self.config.first_token_timeout_factor * objective_s, left_s / 2.0)

    # --- what became of a rung ---------------------------------------------------------------------------------------

    def may_try(self, fallback_step: FallbackStep) -> bool:
        """Asks the breaker: whoever got True says exactly one of `spoke`, `failed`, `overdue` and `left`."""
        return self._tiers[fallback_step.tier].breaker.allow(self._clock()) or fallback_step.forced

    def is_late(self, tier: str, seconds: float) -> bool:
        """Whether a first token that is not there `seconds` after it was handed to Triton should be."""
        objective_s = self._tiers[tier].sense.objective_s
        return bool(objective_s) and seconds >= objective_s

    def retry_after_s(self, tier: str) -> float:
        """Until the breaker lets somebody try."""
        return self._tiers[tier].breaker.retry_after_s(self._clock())

    def spoke(self, tier: str, seconds: float) -> None:
        """Its first token came `seconds` after it was handed to Triton. The wait before that is the door's matter: how
        full a tier is shows there, and bulk work that waits says nothing about how fast the tier is."""
        now, found = self._clock(), self._tiers[tier]
        found.breaker.success(now)
        found.spoke_at = now
        if found.warm:
            found.ttft.add(seconds, now)

    def failed(self, tier: str, error: CausewayError) -> Stress:
        """No token came. What that says of the tier; "": nothing, the fault is the request's."""
        now, found = self._clock(), self._tiers[tier]
        stress = stress_of_error(error)
        (found.breaker.failure if stress == "broken" else found.breaker.cancelled)(now)
        return stress

    def overdue(self, tier: str, seconds: float | None) -> Stress:
        """No token came, `seconds` after it was handed to Triton; None: there was not even a place. Held against the
        tier only after its own time: callers may be in a hurry."""
        now, found = self._clock(), self._tiers[tier]
        if seconds is None:
            found.breaker.cancelled(now)
            return "saturated"
        if self.is_late(tier, seconds) and found.warm:
            found.ttft.add(seconds, now)
        own = self.is_late(tier, seconds / self.config.first_token_timeout_factor)
        (found.breaker.failure if own else found.breaker.cancelled)(now)
        return "slow"

    def left(self, tier: str) -> None:
        """The caller went away before the first token."""
        self._tiers[tier].breaker.cancelled(self._clock())

    # --- warmth ------------------------------------------------------------------------------------------------------

    def cool(self, tier: str) -> None:
        """Its model was loaded: what its first answers take says nothing about it, until one was warmed up."""
        self._tiers[tier].warm = False

    def warmed(self, tier: str) -> None:
        found = self._tiers[tier]
        found.warm, found.spoke_at = True, self._clock()

    def is_warm(self, tier: str) -> bool:
        return self._tiers[tier].warm

    def idle_s(self, tier: str) -> float:
        """Since it last said anything."""
        return self._clock() - self._tiers[tier].spoke_at

    def _seen(self, name: str, priority: Priority, now: float) -> TierSnapshot:
        """The tier as this priority has to take it: under stress the least urgent work that there is moves first, and
        comes back last. Without this order all priorities would be on all tiers."""
        self._tiers[name].asked_at[priority] = now
        self._tiers[name].asked[priority].add(now)
        view = self._view(name, priority, now)
        stress = stress_of(view, self.tier_health(name, priority))
        if stress in ("saturated", "slow"):
            below = next((one for one in reversed(self._others(name, priority, now, below=True))), None)
            if below is not None:
                moved = next_tier_health(
                    self.tier_health(name, below), stress, view, self.config.share_ramp, now, gives_way=True
                )
                self._footings[below][name] = moved
                return msgspec.structs.replace(view, saturated=False, ttft_s=None, waits=True)
        elif self._others(name, priority, now, below=False):
            return msgspec.structs.replace(view, waits=True)
        return view

    def _others(self, name: str, priority: Priority, now: float, *, below: bool) -> list[Priority]:
        """Priorities of which somebody asks these days: those below that could still move, or those above that have
        not come back yet."""
        asked_at, rank, floor = self._tiers[name].asked_at, RANK[priority], self.config.share_ramp.min_share
        there = [one for one in RANK if now - asked_at[one] < _THESE_DAYS_S]
        if below:
            return [one for one in there if RANK[one] > rank and self.tier_health(name, one).share > floor]
        return [one for one in there if RANK[one] < rank and self.tier_health(name, one).share < 1.0]

    def _view(self, name: str, priority: Priority, now: float) -> TierSnapshot:
        tier = self._tiers[name]
        sense = tier.sense
        queue_s = sense.pressure.queue_seconds(priority)
        return TierSnapshot(
            name,
            broken=sense.health.healthy == 0 or tier.breaker.state(now) == "open",
            saturated=_is_saturated(sense, priority, queue_s),
            queue_s=queue_s,
            first_token_timeout_s=_PATIENCE[priority] * self.config.first_token_timeout_factor * sense.objective_s
            or math.inf,
            busy=sense.pressure.running / max(1, sense.pressure.limit),
            fits=fits(
                tier.asked[priority].per_s(now), sense.pressure.held_s, sense.pressure.running, sense.pressure.limit
            ),
            ttft_s=tier.ttft.value(now),
            objective_s=sense.objective_s,
        )


def _is_saturated(sense: TierSignals, priority: Priority, queue_s: float) -> bool:
    """Who goes in first is not moved by a crowd behind; who goes in last is moved first."""
    if priority == "interactive":
        return sense.pressure.saturated and queue_s > sense.objective_s
    if priority == "bulk" and sense.objective_s:
        return sense.pressure.saturated or queue_s > _PATIENCE["standard"] * sense.objective_s
    return sense.pressure.saturated


def stress_of_error(error: CausewayError) -> Stress:
    """What an error before the first token says of its tier; "": the next tier would say the same."""
    if isinstance(error, BackendError) and not isinstance(error, CloudRejected):
        return "broken"
    return "saturated" if error.status in (429, 503) else ""


def _from(order: Sequence[str], name: str) -> tuple[str, ...]:
    """The tier and those below it."""
    return tuple(order[order.index(name) :]) if name in order else (name,)
