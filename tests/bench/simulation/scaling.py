"""A tier's autoscaler over weeks, with the forecast of `cloud_pool/deploy/monitoring/forecast.yaml` and without it.

Steps of 15 s, at each of which the autoscaler runs with the defaults of Kubernetes' HorizontalPodAutoscaler: a target
of 70 % of the sequences, a tolerance of 10 %, at most twice or four more replicas a step, and the highest wish of the
last 300 s before it scales down. A replica is ready 90 s after it was wished for, and paid from then on. Requests wait
in one queue, first come first served.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

STEP_S = 15
DAY, WEEK = 86_400 // STEP_S, 7 * 86_400 // STEP_S
SEQUENCES, SERVICE_S, DEADLINE_S = 16, 2.0, 5.0
MIN_REPLICAS, MAX_REPLICAS = 2, 60
TARGET, TOLERANCE = 0.7, 0.1
_START, _WINDOW = 90 // STEP_S, 300 // STEP_S
_MINUTE, _QUARTER, _LEAD = 4, 60, 22  # 1m, 15m, 330s
_PEAK_RPS, _FLAT_RPS = 160.0, 60.0
_PER_REPLICA = SEQUENCES / SERVICE_S * STEP_S  # requests a step


class Load(NamedTuple):
    """What a scaler made of a trace. `late`: requests that waited longer than the deadline allows."""

    requests: float
    late: float
    replica_hours: float


def trace(seed: int, *, season: bool, weeks: int = 3) -> list[float]:
    """Return the requests of each step: business hours with a peak at noon, or a level; days and hours that vary."""
    rng = random.Random(seed)
    found, level, day = [], 0.0, 1.0
    for step in range(weeks * WEEK):
        if step % DAY == 0:
            day = rng.lognormvariate(0.0, 0.08)
        level = 0.995 * level + rng.gauss(0.0, 0.01)
        mean = (_PEAK_RPS * _shape(step * STEP_S) if season else _FLAT_RPS) * day * math.exp(level) * STEP_S
        found.append(max(0.0, rng.gauss(mean, math.sqrt(mean))))
    return found


def _shape(second: int) -> float:
    hour, weekend = second % 86_400 / 3600, second // 86_400 % 7 >= 5
    if weekend:
        return 0.12 + 0.2 * _rise(hour, 10.0, 1.5) * (1 - _rise(hour, 19.0, 2.0))
    office = 0.55 * _rise(hour, 8.0, 0.05) * (1 - _rise(hour, 18.0, 1.0))
    return 0.08 + office + 0.37 * _rise(hour, 12.0, 0.05) * (1 - _rise(hour, 13.5, 0.3))


def _rise(hour: float, start: float, hours: float) -> float:
    part = min(1.0, max(0.0, (hour - start) / hours))
    return part * part * (3 - 2 * part)


class Forecast:
    """The rules, one by one, over the sequences in progress at each step."""

    def __init__(self) -> None:
        self._demand: list[float] = []
        self._sums, self._forecast_errors, self._today_errors = [0.0], [0.0], [0.0]
        self._waiting: deque[float | None] = deque([None] * _LEAD)

    def after(self, demand: float) -> float:
        """Return the most sequences that are expected within 330 s; 0.0: the forecast is silent."""
        now = len(self._demand) + 1
        self._demand.append(demand)
        self._sums.append(self._sums[-1] + demand)
        ratio = None
        if now >= WEEK + _QUARTER and (then := self._mean(now - WEEK, _QUARTER)) > 0:
            ratio = min(2.0, max(0.5, self._mean(now, _QUARTER) / then))
        self._waiting.append(None if ratio is None else ratio * self._mean(now - WEEK + _LEAD, _MINUTE))
        expected, forecast_error, today_error = self._waiting.popleft(), 0.0, 0.0
        if expected is not None:
            forecast_error = (expected - demand) ** 2
            today_error = (self._demand[-1 - _LEAD] - demand) ** 2
        self._forecast_errors.append(self._forecast_errors[-1] + forecast_error)
        self._today_errors.append(self._today_errors[-1] + today_error)
        if ratio is None or self._of_a_day(self._forecast_errors) >= 0.9 * self._of_a_day(self._today_errors):
            return 0.0
        return ratio * max(self._mean(now - WEEK + step, _MINUTE) for step in range(1, _LEAD + 1))

    def _mean(self, end: int, steps: int) -> float:
        return (self._sums[end] - self._sums[end - steps]) / steps

    def _of_a_day(self, sums: Sequence[float]) -> float:
        return sums[-1] - sums[max(0, len(sums) - 1 - DAY)]


def scale(requests: Sequence[float], *, ahead: bool) -> Load:
    """Run the autoscaler over a trace. `ahead`: it reads the forecast, too, and takes the larger wish."""
    forecast, replicas, queue, late, paid_steps = Forecast(), MIN_REPLICAS, 0.0, 0.0, 0
    starting: deque[int] = deque()  # the steps at which replicas become ready
    wishes: deque[int] = deque(maxlen=_WINDOW)
    for step, arriving in enumerate(requests):
        while starting and starting[0] <= step:
            starting.popleft()
            replicas += 1
        capacity = replicas * _PER_REPLICA
        served = min(queue + arriving, capacity)
        left = queue + arriving - served
        late += arriving * _share_late(queue / capacity * STEP_S, left / capacity * STEP_S)
        queue = left
        running = served / STEP_S * SERVICE_S
        sequences = max(running + queue, forecast.after(running) if ahead else 0.0)
        having = replicas + len(starting)
        paid_steps += having
        wish = sequences / (SEQUENCES * TARGET)
        count = having if abs(wish / having - 1) <= TOLERANCE else math.ceil(wish)
        wishes.append(min(MAX_REPLICAS, max(MIN_REPLICAS, count)))
        if wishes[-1] > having:
            starting.extend([step + _START] * (min(wishes[-1], max(2 * having, having + 4)) - having))
        for _ in range(having - max(wishes)):
            if starting:
                starting.pop()
            else:
                replicas -= 1
    return Load(sum(requests), late, paid_steps * STEP_S / 3600)


def _share_late(first_s: float, last_s: float) -> float:
    """Return the share of a step's requests that wait too long, where the first and the last one wait so long."""
    low, high = sorted((first_s, last_s))
    if high <= DEADLINE_S:
        return 0.0
    return 1.0 if low >= DEADLINE_S else (high - DEADLINE_S) / (high - low)
