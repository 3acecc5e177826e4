"""The health of a tier: the share of the movable requests that it is offered, and the reason for a lowered share.

Pure: a TierHealth, a snapshot and `now` give the next TierHealth. A tier under stress loses its share step by step, so
that an overload settles near the tier's capacity; switching it on and off would make it flap. The share returns only
after the tier was stable (`stable_for_s`), and again step by step, as far as there is room. A load that swings faster
than that never raises it. If the share has to be lowered right after it was raised, the raised value becomes its
ceiling and the share before is restored. After such a relapse the next step goes half the way to the ceiling, after
twice the pause, up to `max_backoff_s`, unless there is room for twice the work that would come back.

The share counts requests, but callers select which ones: each caller has a position in a line that is the same at every
gateway, and the callers before the share's end keep the tier. So a caller changes tiers only when the share moves
across its position, and not with every request. If callers send unequal numbers of requests, the share's end moves
until the requests match the share (`credit`). Those of a caller that makes most of the load are then spread evenly.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

from .config import ShareRamp

Stress = Literal["", "broken", "saturated", "slow", "unable"]
"""The reason for a lowered share. `unable`, which only an attempt finds: the tier cannot serve the request."""
BUSY = 0.7
"""Share of used permits above which free capacity does not count as room."""
CLEAR = 0.8
"""Share of the objective below which a tier that was slow no longer counts as slow."""
_QUEUE_SHORTENS = 0.9
_NEARLY = 0.99
_FINE = 0.04  # of a share: nearer to the ceiling than twice this, the ceiling itself is tried
_CREDIT_RANGE = 32.0  # requests too few, or too many, that move the end of the line from one end to the other
_POSITION_BYTES = 8
MEMORY_S = 1.5
"""Time constant of the arrival rate in seconds; short, so that requests that no longer arrive are forgotten soon."""
ROOM = 0.9
"""Share of a tier's permits that may be in use after requests have come back, because arrivals are uneven."""


class TierSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of a tier's current state."""

    name: str
    broken: bool = False  # whether no endpoint is healthy, or the breaker is open
    saturated: bool = False  # whether its admission is saturated
    queue_s: float = 0.0  # expected wait for a permit at this priority
    first_token_timeout_s: float = math.inf  # longest acceptable wait at this priority
    busy: float = 0.0  # share of its permits that are in use
    # share of the arriving requests that would find a permit, in addition to the running ones
    fitting_share: float = math.inf
    waits: bool = False  # whether requests of another priority must move first, so that this health does not change
    ttft_s: float | None = None  # recent mean; None without a recent request
    objective_s: float = 0.0  # objective of the time to first token, seconds; 0 for none


class TierHealth(msgspec.Struct, frozen=True):
    share: float = 1.0  # 0 to 1
    credit: float = 0.0  # requests owed to the share; moves the share's end
    stress: Stress = ""  # what lowered the share; "" for a full share
    stressed_at: float = -math.inf  # last time under stress, monotonic seconds
    stepped_at: float = -math.inf  # time of the last change of the share
    queue_s: float = 0.0  # wait at the last step down; there is no further step while it shrinks
    ceiling: float = math.inf  # share that was too high right after it was raised
    before: float = 0.0  # share before the last step up
    relapses: int = 0


FULL_SHARE = TierHealth()


def stress_of(view: TierSnapshot, tier_health: TierHealth) -> Stress:
    if view.broken:
        return "broken"
    if view.saturated:
        return "saturated"
    if view.objective_s and view.ttft_s is not None:
        limit_s = view.objective_s * (CLEAR if tier_health.stress == "slow" else 1.0)
        if view.ttft_s > limit_s:
            return "slow"
    return ""


def next_tier_health(
    tier_health: TierHealth,
    stress: Stress,
    view: TierSnapshot,
    share_ramp: ShareRamp,
    now: float,
    *,
    is_displaced: bool = False,
) -> TierHealth:
    """Return the health at `now`. It may be called at any rate: the steps depend on time, not on calls.

    `is_displaced`: the stress comes from more urgent work, which lowers this share quickly.
    """
    if stress == "broken":
        return TierHealth(share=0.0, stress=stress, stressed_at=now, stepped_at=now)
    if view.waits:
        return tier_health
    if stress:
        # By then the queue shows the effect of the last step.
        settles_s = max(2.0 * share_ramp.stable_for_s, share_ramp.step_interval_s)
        interval_s = share_ramp.step_interval_s if is_displaced else settles_s
        return _lowered(tier_health, stress, view.queue_s, interval_s, share_ramp, now)
    if tier_health.share >= 1.0:
        return tier_health
    if view.busy < BUSY and view.fitting_share >= min(share_ramp.increase_step, 1.0 - tier_health.share):
        return _raised(tier_health, view, share_ramp, now)
    return _raised_while_busy(tier_health, share_ramp, now)


def _lowered(
    tier_health: TierHealth, stress: Stress, queue_s: float, interval_s: float, share_ramp: ShareRamp, now: float
) -> TierHealth:
    if now - max(tier_health.stressed_at, tier_health.stepped_at) > share_ramp.max_backoff_s:
        tier_health = msgspec.structs.replace(tier_health, ceiling=math.inf, relapses=0)  # Too old to be a relapse.
    lower = msgspec.structs.replace(tier_health, stress=stress, stressed_at=now)
    is_relapse = tier_health.stepped_at > tier_health.stressed_at  # the last step was one up
    if not is_relapse and now - tier_health.stepped_at < interval_s:
        return lower
    share = tier_health.share
    if is_relapse or queue_s >= _QUEUE_SHORTENS * tier_health.queue_s:
        # One step, however long ago the last call was: only the stress of this moment is known.
        least = tier_health.before if is_relapse else 0.0
        share = min(share, max(share_ramp.min_share, share * share_ramp.decrease_factor, least))
    lower = msgspec.structs.replace(lower, share=share, stepped_at=now, queue_s=queue_s)
    if is_relapse:
        lower = msgspec.structs.replace(lower, ceiling=tier_health.share, relapses=tier_health.relapses + 1)
    return lower


def _raised(tier_health: TierHealth, view: TierSnapshot, share_ramp: ShareRamp, now: float) -> TierHealth:
    since = max(tier_health.stressed_at + share_ramp.stable_for_s, tier_health.stepped_at)
    # All steps since then at once: a tier without requests for a minute must not count as unhealthy.
    passed = (now - since) / share_ramp.step_interval_s + 1e-9
    steps = math.floor(min(passed, 1.0 / share_ramp.increase_step + 1.0))
    share = tier_health.share + min(steps * share_ramp.increase_step, view.fitting_share)
    pause_s = _backed_off(share_ramp.stable_for_s, tier_health, share_ramp)
    if view.fitting_share < 2.0 * (1.0 - tier_health.share) and now < tier_health.stressed_at + pause_s:
        share = min(share, tier_health.ceiling * share_ramp.decrease_factor)
    if steps < 1 or share <= tier_health.share:
        return tier_health
    return _stepped_up(tier_health, share, since + steps * share_ramp.step_interval_s, now)


def _raised_while_busy(tier_health: TierHealth, share_ramp: ShareRamp, now: float) -> TierHealth:
    share = max(tier_health.share, share_ramp.min_share) / share_ramp.decrease_factor
    pause_s = share_ramp.busy_step_interval_s
    if share > _NEARLY * tier_health.ceiling:
        pause_s = _backed_off(pause_s, tier_health, share_ramp)
        if tier_health.share < _NEARLY * tier_health.ceiling:
            middle = (tier_health.share + tier_health.ceiling) / 2.0
            share = middle if middle - tier_health.share >= _FINE else tier_health.ceiling
    if now - max(tier_health.stressed_at, tier_health.stepped_at) < pause_s:
        return tier_health
    return _stepped_up(tier_health, share, now, now)


def _backed_off(seconds: float, tier_health: TierHealth, share_ramp: ShareRamp) -> float:
    return float(min(max(seconds, share_ramp.max_backoff_s), seconds * 2.0 ** min(tier_health.relapses, 30)))


def _stepped_up(tier_health: TierHealth, share: float, stepped_at: float, now: float) -> TierHealth:
    before = tier_health.share
    if share >= 1.0 - 1e-9:
        return msgspec.structs.replace(tier_health, share=1.0, before=before, credit=0.0, stress="", stepped_at=now)
    return msgspec.structs.replace(tier_health, share=share, before=before, stepped_at=stepped_at)


def offer_share(tier_health: TierHealth, position: float) -> tuple[bool, TierHealth]:
    """Return whether the next request of a caller at `position`, 0 to 1, is in the share, and the health after it."""
    share, credit = tier_health.share, tier_health.credit
    if share >= 1.0 or share <= 0.0:
        return share > 0.0, tier_health
    is_offered = position < share + credit / _CREDIT_RANGE
    credit = min(_CREDIT_RANGE, max(-_CREDIT_RANGE, credit + share - is_offered))
    return is_offered, msgspec.structs.replace(tier_health, credit=credit)


def caller_position(tenant: str, client: str, conversation: bytes) -> float:
    """Return a caller's position in the line, 0 to 1, the same at every gateway, by its device or else conversation."""
    caller = f"{tenant}/{client}".encode() if client else conversation
    digest = hashlib.blake2b(caller, digest_size=_POSITION_BYTES).digest()
    return int.from_bytes(digest, "big") / 256.0**_POSITION_BYTES


class ArrivalRate:
    """Arrivals per second: a count that decays exponentially."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = -math.inf

    def add(self, now: float) -> None:
        self._count, self._at = self._decayed(now) + 1.0, now

    def per_s(self, now: float) -> float:
        return self._decayed(now) / MEMORY_S

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._at) / MEMORY_S)


def fitting_share(rate: float, held_s: float | None, running: int, limit: int) -> float:
    """Return the share of the arriving requests that would find a permit besides the running ones (Little's law).

    It is above 1 if there is room to spare; infinity if nothing is known.

    Args:
        rate: Arrivals per second.
        held_s: Time for which each request holds its permit; None: unknown.
        running, limit: Permits in use, and of all.
    """
    wanted = rate * (held_s or 0.0)
    return max(0.0, ROOM * limit - running) / wanted if wanted else math.inf
