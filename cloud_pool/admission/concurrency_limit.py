"""A tier's concurrency limit, the rate of released permits, and the detection of overload. Pure.

The limit, how many requests may be in a tier's Triton at once, is found from their times to first token, and followed.

A server of S sequences answers up to S requests without any of them waiting; one more waits inside it, where we can
neither reorder nor shed it. The time to first token (TTFT) shows that, not the whole latency, which is mostly the
length of the answer. So the requests that wait inside are counted by Little's law (Little 1961):

    excess = first tokens a second · (TTFT − TTFT of a server that is not full)

and kept near zero, as TCP Vegas keeps its packets in the routers' queues (Brakmo, O'Malley and Peterson 1994). AIMD
against an objective would fill Triton's queue up to the objective at the expense of every waiting request; Netflix's
Gradient2 (concurrency-limits) lets its long-term average drift up with the very queue that it is to find. A delay that
lowering the limit does not cure was not ours: longer prompts, a slower server. So each cut is a trial, as BBR's
ProbeRTT (Cardwell et al. 2016), and the TTFT of a server that is full, and not more, is measured where it matters.

    window    TTFTs of requests handed over since the last change, until their median is good to a fraction of a request
    1. trial  the cut relieved: it was our queue. If it did not, and after a large cut nor did a second one, this TTFT
              is the base from now on, and the limit is restored
    2. cut    clear excess while full, or excess in two windows in a row, while more than half was in use: the limit
              falls by the excess, at most by half; the limit that was too high is remembered as the ceiling
    3. doubt  full for DOUBT_S without a cut: a cut by an eighth, to verify the base
    4. grow   full and no excess: by 1, 2, 4 … a window; over the ceiling only every PROBE_S
    5. hold   else: an idle or half empty tier teaches nothing about its limit

The objective, if any, bounds the base from above, so that a gateway that starts before a crowded server notices.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from causeway_server.router.jobs.submission import RANK
from causeway_server.router.types import Priority

DOUBT_S = 30.0
PROBE_S = 10.0
UNTRIED_S = 30.0
_HELD_S = 15.0
_MIN_WINDOW_S = 0.2  # of a window; shorter ones see bursts
_MAX_WINDOW_S = 5.0  # of a window; then a few samples are enough
_FEW, _MANY = 3, 8
_PRECISE = 0.7  # of a request
_TOLERATED = 1.15  # times the base: an increase that no caller notices is left alone
_UNNOTICED = 1.1
_SURE = 2.0  # times the noise, which is two standard errors itself
_FULL = 0.03  # share of the permits that may be free
_FAILED = 0.9
_LARGE = 4  # permits of a large cut
_SPARED = 8  # limit from which on one permit may be free
_LATE_S = 5.0  # how long a window with late first tokens counts
INTERVAL_S = 1.0  # in which every request waits too long: then a queue is a standing one
_TARGETS: Final[dict[Priority, float]] = {"interactive": 0.5, "standard": 1.0, "bulk": 5.0}
"""Queueing target per priority, as a multiple of the TTFT objective; the queue may use half of it."""
MEMORY_S = 5.0  # of time with waiters, for the rate of releases; older releases count less and less
_MIN_RELEASES = 8.0  # the memory is extended to this many releases where they are slow
_MIN_SPAN_S = 0.05
_SMOOTHING = 0.1  # of the times for which a permit is held, and held without a first token
_RECENT = 50  # permits whose single times are kept
_SHORT_QUANTILE = 0.2  # share of the answers that take less than `short_s`


class Window(msgspec.Struct):
    """Samples of requests that were handed over under one limit."""

    opened: float = 0.0  # s, the first sample
    ttfts: list[float] = msgspec.field(default_factory=list)  # s, in the order of the first tokens
    peak: int = 0  # in Triton at once
    running: int = 0  # summed over the samples


class WindowSummary(msgspec.Struct, frozen=True):
    """Statistics of a window."""

    ttft_s: float  # median
    least_s: float
    noise_s: float  # uncertainty of the median
    late_s: float  # what the next requests will see: a queue that builds up is longer at the window's end
    rate: float  # first tokens a second
    peak: int
    running: float  # on average

    @property
    def grows(self) -> bool:
        """Whether the queue inside Triton grew during the window."""
        return self.late_s > self.ttft_s + 2 * self.noise_s


class LimitTrial(msgspec.Struct, frozen=True):
    """A cut of the limit whose effect is being measured."""

    limit: int  # before it
    ttft_s: float  # before it
    expected_s: float  # the expected decrease, if it was our queue
    doubted: bool  # made in doubt: the base stays as it is
    final: bool  # a small cut, or the one before was in vain too

    def is_vain(self, ttft_s: float) -> bool:
        """Return whether less than half of the expected decrease came; a much larger TTFT has another cause."""
        return -self.expected_s <= self.ttft_s - ttft_s < self.expected_s / 2


class ConcurrencyLimit:
    """The limit, between `lower` and `upper`, starting in the middle. Times are monotonic seconds.

    If `lower` is 0, the limit is the upper bound, and times to first token only tell whether they are late.
    """

    def __init__(self, lower: int, upper: int, objective_s: float = 0.0, now: float = 0.0) -> None:
        self._fixed = lower == 0
        self._lower, self._upper = min(lower, upper), upper
        self._endpoints: float | None = None
        self._objective_s = objective_s or math.inf
        self.value = upper if self._fixed else max(self._lower, -(-upper // 2))
        self._exact = float(self.value)  # In proportion to the endpoints, without drift by rounding.
        self.base_s: float | None = None  # TTFT of requests that do not wait inside Triton
        self._changed_at = now
        self._settled_at = now  # neither cut nor half empty since
        self._step = 1
        self._ceiling = 0.0  # a limit that was too high when last tried; 0: unknown
        self._ceiling_at = now
        self._held_at = -math.inf  # last time that it was full, and the limit neither too high nor clearly too low
        self._trial: LimitTrial | None = None
        self._accepted_until = now  # until then the base may exceed the objective
        self._suspected = False  # excess in the last window, not yet certain
        self._late_at = -math.inf  # the last window with late first tokens; -inf: none since the last one in time
        self._window = Window()

    def set_upper_bound(self, upper: int, now: float, endpoints: float | None = None) -> None:
        """Change the upper bound (0: nothing may run); a limit at the old bound moves to the new one. `now`: monotonic
        s.

        `endpoints`: number of endpoints that serve the tier, to which the limit is proportional; None: unchanged.
        """
        before, self._upper = self._upper, max(self._lower, upper) if upper else 0
        exact = self._exact
        if endpoints is not None and self._endpoints is None:
            exact = max(exact, -(-self._upper // 2))  # The upper bound that it started with was a guess.
        elif endpoints is not None and self._endpoints is not None:
            exact *= endpoints / self._endpoints
            self._ceiling *= endpoints / self._endpoints
        self._endpoints = endpoints or self._endpoints
        self._set(now, self._upper if self._fixed or self.value == before else exact)

    def first_token(self, now: float, seconds: float, running: int) -> None:
        """Record a first token, `seconds` after the hand-over to Triton, where `running` requests are now."""
        if now - seconds < self._changed_at:
            return  # It was handed over under an earlier limit.
        window = self._window
        if not window.ttfts:
            window.opened = now
        window.ttfts.append(seconds)
        window.peak = max(window.peak, running)
        window.running += running
        if self._has_enough(now):
            self._window = Window()
            self._evaluate(now, summarize(window, now))

    def is_untried(self, now: float) -> bool:
        """Return whether a higher limit is untested; all permits must be in use to test it."""
        at_ceiling = self._ceiling and self.value >= self._ceiling - 1 and now - self._ceiling_at < UNTRIED_S
        return self.value < self._upper and not at_ceiling and now - self._held_at >= _HELD_S

    def is_late(self, now: float) -> bool:
        """Return whether first tokens come later now than those of a server that is not full."""
        return now - self._late_at < _LATE_S

    @property
    def headroom(self) -> int:
        """Permits that may be free while a higher limit is tested."""
        return max(int(_FULL * self.value), int(self.value >= _SPARED))

    def failed(self, now: float, handed_at: float) -> None:
        """Record that the tier refused a request, or was late with its first token."""
        if self._fixed or handed_at < self._changed_at:
            return
        self._set_ceiling(now, self._window.peak or self.value)
        self._trial = None
        self._set(now, int(self.value * _FAILED))

    def _has_enough(self, now: float) -> bool:
        """Return whether the window has enough samples."""
        long_s, count = now - self._window.opened, len(self._window.ttfts)
        if long_s < _MIN_WINDOW_S or count < _FEW:
            return False
        enough = max(_MANY, self.value // 2)
        if long_s >= _MAX_WINDOW_S or count >= 8 * enough:
            return True
        # Checked at each fourth sample: computing the noise takes time in proportion to the window.
        return count >= enough and count % 4 == 0 and noise(self._window.ttfts) * (count - 1) / long_s <= _PRECISE

    def _evaluate(self, now: float, summary: WindowSummary) -> None:
        trial, self._trial = self._trial, None
        vain = trial if trial is not None and trial.is_vain(summary.ttft_s) else None
        if vain is not None and (vain.doubted or vain.final):
            self._undo(now, vain, summary.ttft_s)  # (1)
            return
        base_s = self._updated_base(now, summary)
        late = summary.ttft_s > max(_TOLERATED * base_s, base_s + summary.noise_s)
        self._late_at = now if late else -math.inf
        if self._fixed:
            return
        excess = summary.rate * ((summary.late_s if summary.grows else summary.ttft_s) - base_s)
        allowed = max(0.5, 0.04 * self.value)
        full = summary.running >= self.value - max(0.5, self.headroom, _FULL * self.value)
        if not full:
            self._settled_at = now
        seen = late and excess > allowed and not self._is_lightly_loaded(summary)
        # With free permits the limit hardly caused a queue: one window is not proof.
        sure = seen and (
            self._suspected
            or (summary.peak >= self.value - self.headroom and summary.ttft_s > base_s + _SURE * summary.noise_s)
        )
        self._suspected = seen and not sure
        if sure:
            self._set_ceiling(now, summary.peak)
            at = min(self.value, summary.peak)
            self._cut(now, at - min(max(1, round(excess)), at // 2), summary, base_s, vain)  # (2)
        elif full and now - self._settled_at >= DOUBT_S:
            self._cut(now, self.value - max(1, self.value // 8), summary, None)  # (3)
        elif full and not seen and (excess <= allowed / 2 or summary.ttft_s <= _UNNOTICED * base_s):
            self._grow(now)  # (4)
        else:
            self._step = 1  # (5)
            if full:
                self._held_at = now

    def _is_lightly_loaded(self, summary: WindowSummary) -> bool:
        """Return whether so little ran that this limit cannot have caused a queue inside Triton."""
        return summary.running <= self.value / 2

    def _updated_base(self, now: float, summary: WindowSummary) -> float:
        """Update the base: at once where the window is clearly lower, else slowly, and slowest upwards while full."""
        base_s, is_light = self.base_s, self._is_lightly_loaded(summary)
        if base_s is None:
            base_s = summary.ttft_s if is_light else summary.least_s  # The server may be full of other gateways' work.
        elif summary.ttft_s < base_s - summary.noise_s:
            base_s = summary.ttft_s + summary.noise_s  # No lower than is certain: noise would lower it step by step.
        elif summary.ttft_s < base_s + summary.noise_s or is_light:
            base_s += (summary.ttft_s - base_s) / (8 if summary.ttft_s < base_s or is_light else 32)
        self.base_s = base_s
        return base_s if now < self._accepted_until else min(base_s, self._objective_s)

    def _undo(self, now: float, trial: LimitTrial, ttft_s: float) -> None:
        """Restore the limit before a trial that was in vain."""
        if not trial.doubted:
            self.base_s, self._accepted_until, self._ceiling = ttft_s, now + DOUBT_S, 0
        self._set(now, trial.limit)

    def _cut(
        self, now: float, value: int, summary: WindowSummary, base_s: float | None, vain: LimitTrial | None = None
    ) -> None:
        """Lower the limit and start a trial; `base_s` None: the base is in doubt. A large cut without effect is
        followed by a second one before it counts, because a queue that was still building up hides the relief.
        """
        before = self.value
        self._set(now, value)
        self._settled_at, self._step = now, 1
        fewer = min(before, summary.peak) - self.value
        if fewer > 0 and summary.rate > 0.0:
            expected_s = min(fewer / summary.rate, summary.late_s - (base_s or 0.0))
            limit = before if vain is None else vain.limit
            final = vain is not None or not (summary.grows or fewer > max(_LARGE, before // 4))
            self._trial = LimitTrial(limit, summary.late_s, expected_s, base_s is None, final)

    def _grow(self, now: float) -> None:
        grown = self.value + self._step
        if not self._ceiling or grown < self._ceiling:
            self._step = min(2 * self._step, max(1, self.value // 4))
        elif now - self._ceiling_at < PROBE_S:
            grown = max(self.value, int(self._ceiling - 1))
        else:
            grown, self._step, self._ceiling = self.value + 1, 1, 0.0
        self._set(now, grown)

    def _set_ceiling(self, now: float, peak: int) -> None:
        self._ceiling, self._ceiling_at = max(1, min(self.value, peak)), now

    def _set(self, now: float, value: float) -> None:
        self._exact = min(self._upper, max(self._lower, value))
        if round(self._exact) != self.value:
            self.value, self._changed_at = round(self._exact), now
            self._window = Window()


def summarize(window: Window, now: float) -> WindowSummary:
    count = len(window.ttfts)
    rate = (count - 1) / (now - window.opened)
    ttft_s = statistics.median(window.ttfts)
    return WindowSummary(
        ttft_s=ttft_s,
        least_s=min(window.ttfts),
        noise_s=noise(window.ttfts),
        late_s=max(ttft_s, statistics.median(window.ttfts[-(count // 3) :])),
        rate=rate,
        peak=window.peak,
        running=window.running / count,
    )


def noise(ttfts: Sequence[float]) -> float:
    """Return two standard errors of the median (1.25 times the mean's, as for normal samples), s."""
    count, mean = len(ttfts), math.fsum(ttfts) / len(ttfts)
    return 2.5 * math.sqrt(math.fsum((ttft - mean) ** 2 for ttft in ttfts) / ((count - 1) * count))


class StandingQueue:
    """The waits in one priority's queue."""

    def __init__(self) -> None:
        self._above_since = math.inf
        self._since = math.inf
        self._long_wait_at = -math.inf

    def record_wait(self, now: float, seconds: float, target_s: float) -> None:
        """Record the wait of a request, which was admitted or predicted."""
        if seconds < target_s:
            self._above_since = math.inf
        else:
            self._above_since = min(self._above_since, now)
        if self._since < math.inf and self.since(now) is None:
            self._since = math.inf
        if seconds >= target_s / 2:
            self._long_wait_at = now
        if now - self._above_since >= INTERVAL_S:
            self._since = min(self._since, now)

    def since(self, now: float) -> float | None:
        """Return the monotonic time since which it is a standing queue; None if it is not."""
        return self._since if now - self._long_wait_at < INTERVAL_S and self._since < math.inf else None


class OverloadDetector:
    """Detector that distinguishes a standing queue from a burst, and selects the requests to shed.

    After CoDel (Nichols and Jacobson 2012, RFC 8289): a queue in which every request waits longer than a target for a
    whole interval is a standing queue, and only shedding shrinks it. A standing queue accepts only requests that are
    predicted to be admitted within the target. Work of lower priority is not accepted at all: bulk first, standard an
    interval later. To avoid flapping, the state ends only when for an interval no request has waited half as long.
    """

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._queues = {priority: StandingQueue() for priority in RANK}

    def target_s(self, priority: Priority) -> float:
        return self._objective_s * _TARGETS[priority]

    def record_wait(self, now: float, priority: Priority, seconds: float) -> None:
        self._queues[priority].record_wait(now, seconds, self._objective_s * _TARGETS[priority])

    def is_standing(self, now: float, priority: Priority) -> bool:
        return self._queues[priority].since(now) is not None

    def should_shed(self, now: float, priority: Priority) -> bool:
        """Return whether work of this priority is rejected because a queue above it is a standing one."""
        interactive = self._queues["interactive"].since(now)
        if priority == "bulk":
            return interactive is not None or self.is_standing(now, "standard")
        return priority == "standard" and interactive is not None and now - interactive >= INTERVAL_S


class ReleaseRate:
    """Rate of released permits, from decayed sums: releases, grants by priority, and the time with waiters.

    Time without waiters does not count: an idle tier releases nothing without being slow. A tier that is stuck with all
    permits held releases nothing either, and the rate shows it. When a queue begins after a time without one, Little's
    law gives the initial rate: permits over the time for which one is held.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._full_at = -math.inf
        self._memory_s = MEMORY_S
        self._full = False
        self._span_s = 0.0
        self._released = 0.0
        self._granted = dict.fromkeys(RANK, 0.0)
        self.held_s: float | None = None
        """Recent mean time for which a permit is held; None before the first sample."""
        self._pending_s: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._short_s: float | None = 0.0  # None: not computed since the last release
        self._permits = 1

    def tick(self, now: float, *, full: bool) -> None:
        """Account for the time since the last tick. Call it before each change; `full`: requests were waiting."""
        past_s, self._at = max(0.0, now - self._at), now
        self._full = full
        if not full:
            return
        if self._at - past_s - self._full_at > self._memory_s and self.held_s is not None:
            self._begin(self.held_s)
        self._full_at = now
        decay = math.exp(-past_s / self._memory_s)
        self._span_s = self._span_s * decay + self._memory_s * (1.0 - decay)
        self._released *= decay
        for priority in self._granted:
            self._granted[priority] *= decay

    def record_release(self, held_s: float, permits: int) -> None:
        """Record the release of one of `permits`, which was held for `held_s`."""
        self._released += self._full
        self.held_s = _smoothed(self.held_s, held_s)
        self._recent.append(held_s)
        self._short_s = None
        self._permits = max(1, permits)
        self._memory_s = max(MEMORY_S, _MIN_RELEASES * self.held_s / self._permits)

    def record_first_token(self, pending_s: float) -> None:
        """Record a first token, `pending_s` after its sequence got its permit."""
        self._pending_s = _smoothed(self._pending_s, pending_s)

    def record_grant(self, priority: Priority) -> None:
        self._granted[priority] += 1.0

    @property
    def pending_share(self) -> float | None:
        """Share of the held permits whose sequence has no first token, if requests came evenly; None: not known yet."""
        return self._pending_s / self.held_s if self._pending_s is not None and self.held_s else None

    @property
    def short_s(self) -> float:
        """Duration that hardly any complete answer undercuts, in seconds; 0 before the first sample."""
        if self._short_s is None:
            self._short_s = sorted(self._recent)[int(_SHORT_QUANTILE * len(self._recent))]
        return self._short_s

    @property
    def rate(self) -> float | None:
        """Permits released per second; None while nothing is known."""
        if (self._released >= 1.0 and self._span_s >= _MIN_SPAN_S) or self._span_s > 0.98 * self._memory_s:
            return self._released / self._span_s
        return self._permits / self.held_s if self.held_s else None

    def rate_for(self, priority: Priority, share: float) -> float | None:
        """Return the part of the rate for this priority: all but the grants to higher ones, and at least `share`."""
        rate = self.rate
        if rate is None:
            return None
        above = sum(granted for each, granted in self._granted.items() if RANK[each] < RANK[priority])
        return max(rate - above / self._span_s, share * rate) if self._span_s else rate

    def _begin(self, held_s: float) -> None:
        self._span_s = min(held_s, self._memory_s)
        self._released = self._permits * self._span_s / held_s if held_s else 0.0
        self._granted = dict.fromkeys(RANK, 0.0)


def _smoothed(mean_s: float | None, newest_s: float) -> float:
    return newest_s if mean_s is None else mean_s + _SMOOTHING * (newest_s - mean_s)
