"""The trial of a new bundle that already serves: this device's present requests, compared with earlier ones.

A share, such as that of errors, counts as risen if its number of requests had a probability below `false_alarm` at
the earlier share plus a margin (a one-sided exact binomial test). With 1 % margin and 200 requests, 5 % errors are
detected where there were none, and 1 % are not. The control plane compares devices; this trial protects each one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from causeway_server.router.bundle.manifest import binomial_tail
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S
from causeway_server.router.bundle.refusals import (
    DegradedRose,
    ErrorsRose,
    HeatRose,
    LatencyRose,
    Unhealthy,
    UpdateRefused,
)

from ..observability.metrics import DeviceCondition, Traffic

_MIN_BEFORE = 20  # minimum number of earlier requests for a comparison
_LOOKS_BEFORE = 4  # period whose requests are compared with the trial's
_DAY_S = 86400.0
_MAX_CHECKS = 512  # checks of one day; wakes add more than one each 15 minutes
_SLOW_SHARE = 0.05  # slow: beyond a bound that at most this share of the earlier requests exceeded


class TrialSettings(msgspec.Struct, frozen=True):
    """Limits of a trial."""

    least_s: float = 600.0  # minimum duration
    least_requests: int = 200  # minimum number of requests
    longest_s: float = 86400.0  # duration after which a device with too few requests commits as unproven
    poll_s: float = 5.0  # interval between two checks
    false_alarm: float = 1e-3  # probability of a false alarm at one check, for a share at its margin
    errors_margin: float = 0.01  # accepted rise of the share of failed requests; the other margins likewise
    degraded_margin: float = 0.05
    latency_margin: float = 0.1
    hot_c: float = 80.0  # temperature in °C up to which the device never counts as too hot
    heat_margin_c: float = 10.0  # accepted rise of the temperature above the maximum of the day before
    unhealthy_s: float = 60.0  # maximum continuous time in which a device may be unhealthy or too hot
    crashes: int = 2  # maximum number of crashes of engine children


class TrialProgress(msgspec.Struct, frozen=True):
    """The state of a trial at one moment."""

    elapsed_s: float  # seconds since the bundle began to serve
    settings: TrialSettings  # the trial's limits
    now: Traffic  # requests under the bundle
    before: Traffic  # earlier requests, for comparison; None if unknown


class ConditionHistory:
    """The device's condition at the checks of the last day, with which a trial compares."""

    def __init__(self) -> None:
        self._checks: deque[tuple[float, DeviceCondition]] = deque(maxlen=_MAX_CHECKS)

    def add(self, at: float, condition: DeviceCondition) -> None:
        """Record the condition at a check, in monotonic seconds."""
        self._checks.append((at, condition))

    def leave_out(self, part: Traffic) -> None:
        """Exclude the requests under a bundle that was rolled back from the comparison."""
        none = Traffic()
        shifted = [
            (at, msgspec.structs.replace(condition, traffic=condition.traffic - (none - part)))
            for at, condition in self._checks
        ]
        self._checks = deque(shifted, maxlen=_MAX_CHECKS)

    def before(self, at: float, now: DeviceCondition) -> DeviceCondition:
        """Return the requests since the fourth check before `at`, and the highest temperature of the day before it, if
        known. A device that changes its bundle in a quiet night gets warm by morning anyway.
        """
        since = at - _DAY_S
        earlier = [condition for _, condition in self._checks]
        known = bool(earlier) and self._checks[0][0] <= since
        day = [*(condition for checked_at, condition in self._checks if checked_at >= since), now] if known else []
        heat = [condition.temperature_c for condition in day if condition.temperature_c is not None]
        throttled = [condition.throttled for condition in day if condition.throttled is not None]
        return msgspec.structs.replace(
            now,
            traffic=now.traffic - earlier[-_LOOKS_BEFORE:][0].traffic if earlier else now.traffic,
            temperature_c=max(heat, default=None),
            throttled=any(throttled) if throttled else None,
        )


class Trial:
    """The trial of a bundle. `before`: the sums for comparison, with the highest temperature of the day before, if
    known; `start`: the sums when the bundle `began` to serve (monotonic seconds).
    """

    def __init__(self, settings: TrialSettings, before: DeviceCondition | None, start: Traffic, began: float) -> None:
        self._settings = settings
        self._before = before or DeviceCondition()
        self._start = start
        self._began = began
        self._well_at = began
        self._cool_at = began

    def judge(self, now: float, health: DeviceCondition) -> bool:
        """Return whether the bundle has passed its trial. Raises UpdateRefused; the subclass names why it failed."""
        traffic = health.traffic - self._start
        for refusal in (*self._health(now, health, traffic), *self._shares(traffic)):
            raise refusal
        elapsed_s = now - self._began
        proven = elapsed_s >= self._settings.least_s and traffic.requests >= self._settings.least_requests
        return proven and not health.problem

    def progress(self, now: float, health: DeviceCondition) -> TrialProgress:
        return TrialProgress(now - self._began, self._settings, health.traffic - self._start, self._before.traffic)

    def is_over(self, now: float) -> bool:
        """Return whether a device with too few requests commits now, unproven."""
        return now - self._began >= self._settings.longest_s

    def _health(self, now: float, health: DeviceCondition, traffic: Traffic) -> Iterator[UpdateRefused]:
        settings = self._settings
        if not health.problem:
            self._well_at = now
        if not self._is_hot(health):
            self._cool_at = now
        if now - self._well_at >= settings.unhealthy_s:
            yield Unhealthy(f"For {now - self._well_at:.0f} s: {health.problem}")
        if now - self._cool_at >= settings.unhealthy_s:
            yield HeatRose(f"{health.temperature_c} °C for {now - self._cool_at:.0f} s, {self._heat_before()} before.")
        if traffic.restarts > settings.crashes:
            yield Unhealthy(f"{traffic.restarts} engine processes crashed.")

    def _is_hot(self, health: DeviceCondition) -> bool:
        before = self._before
        if health.throttled and before.throttled is False:
            return True
        if health.temperature_c is None or before.temperature_c is None:
            return False
        rise = health.temperature_c - before.temperature_c
        return health.temperature_c >= self._settings.hot_c and rise >= self._settings.heat_margin_c

    def _heat_before(self) -> str:
        return "unknown" if self._before.temperature_c is None else f"{self._before.temperature_c} °C"

    def _shares(self, now: Traffic) -> Iterator[UpdateRefused]:
        settings, before = self._settings, self._before.traffic
        known = before.requests >= _MIN_BEFORE
        rows: list[tuple[type[UpdateRefused], str, int, int, float]] = [
            (ErrorsRose, "failed", now.errors, before.errors, settings.errors_margin),
            (DegradedRose, "were answered by a fallback", now.degraded, before.degraded, settings.degraded_margin),
        ]
        if known and any(before.latency):
            bound = _slow_bound(before)
            what = f"took longer than {LATENCY_BOUNDS_S[bound]:g} s"
            slow, slow_before = sum(now.latency[bound + 1 :]), sum(before.latency[bound + 1 :])
            rows.append((LatencyRose, what, slow, slow_before, settings.latency_margin))
        for refusal, what, count, count_before, margin in rows:
            share = count_before / before.requests if known else 0.0
            if binomial_tail(now.requests, count, min(1.0, share + margin)) < settings.false_alarm:
                yield refusal(f"{count} of {now.requests} requests {what}; before {count_before} of {before.requests}")


def _slow_bound(before: Traffic) -> int:
    """Return the first bound that at most `_SLOW_SHARE` of the requests exceeded."""
    return next(
        (
            bound
            for bound in range(len(LATENCY_BOUNDS_S))
            if sum(before.latency[bound + 1 :]) <= _SLOW_SHARE * sum(before.latency)
        ),
        len(LATENCY_BOUNDS_S) - 1,
    )
