"""The shadow price of a budget: what a dollar must gain in quality now, so that the day's budget lasts, and is spent.

Each choice between targets is an offer: more quality for more money. The price is the least gain per dollar of the
recent offers that the rest of the budget still pays for, if the rest of the day is as usual. It is computed again as
the day goes (re-solving, Jasin and Kumar 2012), so that errors of the forecast do not add up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

HOURS: Final = 24
MAX_PRICE: Final = 1e9
"""The price once nothing is left."""
_OFFERS: Final = 1024  # the most recent ones, which stand for those to come
_DAYS: Final = 7.0  # memory of the usual day, days
_TRUST: Final = 50.0  # offers after which today's pace counts as much as the usual one
_FIRST_DAY: Final = 1000.0  # offers a day before anything is known


class Steps(msgspec.Struct, frozen=True, gc=False):
    """The gains of an offer for more money, the best step first. `usd`: the price of its cheapest choice."""

    usd: float
    steps: tuple[tuple[float, float], ...]  # (gain per dollar, dollars)


class Demand(msgspec.Struct, frozen=True):
    """State to restore after a restart. `hours`: offers by local hour on a usual day, seen on `days` days."""

    hours: tuple[float, ...] = ()
    days: float = 0.0
    recent: tuple[Steps, ...] = ()
    day: str = ""
    today: tuple[int, ...] = (0,) * HOURS


def steps_of(choices: Iterable[tuple[float, float]]) -> Steps:
    """Return the steps of choices (pairs of quality and dollars) that are on their upper hull, from the cheapest on."""
    hull: list[tuple[float, float]] = []
    for quality, usd in sorted(choices, key=lambda one: (one[1], -one[0])):
        if hull and quality <= hull[-1][0]:
            continue
        while len(hull) > 1 and _ratio(hull[-2], hull[-1]) <= _ratio(hull[-1], (quality, usd)):
            hull.pop()
        hull.append((quality, usd))
    found = tuple((_ratio(one, more), more[1] - one[1]) for one, more in pairwise(hull))
    return Steps(hull[0][1] if hull else 0.0, found)


def _ratio(less: tuple[float, float], more: tuple[float, float]) -> float:
    return (more[0] - less[0]) / (more[1] - less[1])


class Pacer:
    """The price of a budget that is renewed at local midnight."""

    def __init__(self, known: Demand = Demand()) -> None:  # noqa: B008 - frozen
        self._usual = list(known.hours) or [_FIRST_DAY / HOURS] * HOURS
        self._days = known.days
        self._recent = deque(known.recent, _OFFERS)
        self._today = list(known.today)
        self._day = known.day

    def offer(self, steps: Steps, day: str, hour: int) -> None:
        """Take note of a choice between targets. `day`: local, ISO 8601; `hour`: local."""
        self.turn(day)
        self._recent.append(steps)
        self._today[hour] += 1

    def turn(self, day: str) -> None:
        """Begin a day, if it is another one."""
        if day == self._day:
            return
        if self._day and any(self._today):
            self._days = min(self._days + 1.0, _DAYS)
            pairs = zip(self._usual, self._today, strict=True)
            self._usual = [usual + (now - usual) / self._days for usual, now in pairs]
        self._day, self._today = day, [0] * HOURS

    def price(self, left_usd: float, day: str, hours: float) -> float:
        """Return the price, quality a dollar. `hours`: local hours of the day that have passed, 0 to 24."""
        self.turn(day)
        if left_usd <= 0.0:
            return MAX_PRICE
        count = self.expected(hours)
        if not self._recent or count <= 0.0:
            return 0.0
        each = count / len(self._recent)  # the offers to come that a recent one stands for
        left_usd -= each * sum(one.usd for one in self._recent)
        for ratio, usd in sorted((step for one in self._recent for step in one.steps), reverse=True):
            left_usd -= each * usd
            if left_usd <= 0.0:
                return min(ratio, MAX_PRICE)
        return 0.0

    def expected(self, hours: float) -> float:
        """Return the number of offers that are expected until midnight."""
        passed = _until(self._usual, hours)
        seen = float(sum(self._today))
        pace = (seen + _TRUST) / (passed + _TRUST)
        return pace * (sum(self._usual) - passed)

    def state(self) -> Demand:
        return Demand(tuple(self._usual), self._days, tuple(self._recent), self._day, tuple(self._today))


def _until(hourly: Sequence[float], hours: float) -> float:
    """Return the sum of the first `hours`."""
    whole = min(int(hours), HOURS - 1)
    return sum(hourly[:whole]) + hourly[whole] * (hours - whole)
