"""One tier's standing: which share of the work that may go elsewhere it is offered, and why not all of it.

Pure: a footing, what is seen and `now` give the next footing. A tier under stress loses its share step by step, so
that an overload settles near what the tier can do, where on and off would make it flap. It comes back only after a
time of being well (`stable_for_s`), and then step by step as well, as far as there is room for it: a load that swings
faster than that never moves it up. A share that it had to give up again right after it came back is its ceiling: it
goes back to the share before. The next time it comes half as near to the ceiling, and that after twice as long, up to
`max_backoff_s`, unless there is room for twice the work that would come back.

A share is of the requests, but who gets it is told by the caller: each has a place in a line that is the same at
every gateway, and those before the share's end stay. So a caller sees another tier only when the share moves across
its place, and not with every request. Where callers ask for more or less than an even part, the end moves until the
requests are the share (`credit`); a caller that is most of the load is then spread evenly, for it stands there alone.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from .config import ShareRamp

Stress = Literal["", "broken", "saturated", "slow", "unable"]
"""`unable` is found out by a try only: the request is not one for that tier (no chat template, a shorter context)."""
BUSY = 0.7
"""Of its places: from there on a tier has no room that would be seen at once."""
CLEAR = 0.8
"""A tier whose share was cut for slowness is slow until it is this far below its objective."""
_SHORTER = 0.9
_NEARLY = 0.99
_FINE = 0.04  # of a share: nearer to the ceiling than twice this, the ceiling itself is tried
_EVENLY = 32.0  # requests too few, or too many, move the end of the line from one end to the other


class TierSnapshot(msgspec.Struct, frozen=True):
    """A tier as it is right now."""

    name: str
    broken: bool = False  # nobody healthy, or the breaker is open
    saturated: bool = False  # of its admission
    queue_s: float = 0.0  # the wait for a place that somebody of this priority has ahead
    first_token_timeout_s: float = math.inf  # nobody of this priority should wait longer
    busy: float = 0.0  # share of its places that are taken
    fits: float = math.inf  # share of the work that would find a place, besides what runs there
    waits: bool = False  # work of another priority has to move first: this footing stays as it is
    ttft_s: float | None = None  # mean of late; None: nothing was asked of late
    objective_s: float = 0.0  # of the time to first token; 0: none


class TierHealth(msgspec.Struct, frozen=True):
    share: float = 1.0  # 0..1
    credit: float = 0.0  # requests that are owed of it; moves the end of the line
    why: Stress = ""  # what took the share; "": it is whole
    stressed_at: float = -math.inf  # monotonic, s: last seen under stress
    stepped_at: float = -math.inf  # when the share last changed
    queue_s: float = 0.0  # the wait at the last step down: while it becomes shorter, there is no further one
    ceiling: float = math.inf  # the share that was too much right after it came back
    before: float = 0.0  # the share before the last step up
    relapses: int = 0  # how often that was


FULL_SHARE = TierHealth()


def stress_of(view: TierSnapshot, tier_health: TierHealth) -> Stress:
    if view.broken:
        return "broken"
    if view.saturated:
        return "saturated"
    if view.objective_s and view.ttft_s is not None:
        limit_s = view.objective_s * (CLEAR if tier_health.why == "slow" else 1.0)
        if view.ttft_s > limit_s:
            return "slow"
    return ""


def next_tier_health(
    tier_health: TierHealth, stress: Stress, view: TierSnapshot, pace: ShareRamp, now: float, *, gives_way: bool = False
) -> TierHealth:
    """The footing at `now`. Called as often as one likes: what has not changed for a step stays. `gives_way`: it is the
    stress of more urgent work that moves this one, and quickly."""
    if stress == "broken":
        return TierHealth(share=0.0, why=stress, stressed_at=now, stepped_at=now)
    if view.waits:
        return tier_health
    if stress:
        settles_s = max(
            2.0 * pace.stable_for_s, pace.step_interval_s
        )  # by then a queue has shown what the last step did
        return _lowered(tier_health, stress, view.queue_s, pace.step_interval_s if gives_way else settles_s, pace, now)
    if tier_health.share >= 1.0:
        return tier_health
    if view.busy < BUSY and view.fits >= min(pace.increase_step, 1.0 - tier_health.share):
        return _raised(tier_health, view, pace, now)
    return _probed(tier_health, pace, now)


def _lowered(
    tier_health: TierHealth, stress: Stress, queue_s: float, step_interval_s: float, pace: ShareRamp, now: float
) -> TierHealth:
    if now - max(tier_health.stressed_at, tier_health.stepped_at) > pace.max_backoff_s:
        tier_health = msgspec.structs.replace(tier_health, ceiling=math.inf, relapses=0)  # That is a new story.
    lower = msgspec.structs.replace(tier_health, why=stress, stressed_at=now)
    relapsed = tier_health.stepped_at > tier_health.stressed_at  # the last step was one up
    if not relapsed and now - tier_health.stepped_at < step_interval_s:
        return lower
    share = tier_health.share
    if relapsed or queue_s >= _SHORTER * tier_health.queue_s:
        # One step, however long nobody looked: the stress is known for this moment only.
        least = tier_health.before if relapsed else 0.0
        share = min(share, max(pace.min_share, share * pace.decrease_factor, least))
    lower = msgspec.structs.replace(lower, share=share, stepped_at=now, queue_s=queue_s)
    if relapsed:
        lower = msgspec.structs.replace(lower, ceiling=tier_health.share, relapses=tier_health.relapses + 1)
    return lower


def _raised(tier_health: TierHealth, view: TierSnapshot, pace: ShareRamp, now: float) -> TierHealth:
    since = max(tier_health.stressed_at + pace.stable_for_s, tier_health.stepped_at)
    # The steps of all the time that nobody looked: a tier that nobody asked for a minute is not taken for ill.
    steps = math.floor(min((now - since) / pace.step_interval_s + 1e-9, 1.0 / pace.increase_step + 1.0))
    share = tier_health.share + min(steps * pace.increase_step, view.fits)
    if view.fits < 2.0 * (1.0 - tier_health.share) and now < tier_health.stressed_at + _longer(
        pace.stable_for_s, tier_health, pace
    ):
        share = min(share, tier_health.ceiling * pace.decrease_factor)
    if steps < 1 or share <= tier_health.share:
        return tier_health
    return _up(tier_health, share, since + steps * pace.step_interval_s, now)


def _probed(tier_health: TierHealth, pace: ShareRamp, now: float) -> TierHealth:
    share, pause_s = max(tier_health.share, pace.min_share) / pace.decrease_factor, pace.busy_step_interval_s
    if share > _NEARLY * tier_health.ceiling:
        pause_s = _longer(pause_s, tier_health, pace)
        if tier_health.share < _NEARLY * tier_health.ceiling:
            middle = (tier_health.share + tier_health.ceiling) / 2.0
            share = middle if middle - tier_health.share >= _FINE else tier_health.ceiling
    if now - max(tier_health.stressed_at, tier_health.stepped_at) < pause_s:
        return tier_health
    return _up(tier_health, share, now, now)


def _longer(seconds: float, tier_health: TierHealth, pace: ShareRamp) -> float:
    return float(min(max(seconds, pace.max_backoff_s), seconds * 2.0 ** min(tier_health.relapses, 30)))


def _up(tier_health: TierHealth, share: float, stepped_at: float, now: float) -> TierHealth:
    before = tier_health.share
    if share >= 1.0 - 1e-9:
        return msgspec.structs.replace(tier_health, share=1.0, before=before, credit=0.0, why="", stepped_at=now)
    return msgspec.structs.replace(tier_health, share=share, before=before, stepped_at=stepped_at)


def offered(tier_health: TierHealth, place: float) -> tuple[bool, TierHealth]:
    """Whether the next request is one of the share, and the footing after it. `place`: of its caller in the line, 0 to
    1 (callers)."""
    share, credit = tier_health.share, tier_health.credit
    if share >= 1.0 or share <= 0.0:
        return share > 0.0, tier_health
    takes = place < share + credit / _EVENLY
    credit = min(_EVENLY, max(-_EVENLY, credit + share - takes))
    return takes, msgspec.structs.replace(tier_health, credit=credit)
