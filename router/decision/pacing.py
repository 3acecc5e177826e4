"""The shadow price of a budget: what a dollar, or a watt-hour, must gain in quality now, so that the budget lasts, and
is spent.

Each choice between targets is an offer: more quality for a higher cost, in the budget's unit. The price is the least
gain per unit of the recent offers that the rest of the budget still pays for, if the rest of the day is as usual. It is
computed again as the day goes (re-solving, Jasin and Kumar 2012), so that errors of the forecast do not add up.
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
    """The gains of an offer for a higher cost, the best step first. `least`: the cost of its cheapest choice."""

    least: float = msgspec.field(name="usd")  # as it was first stored
    steps: tuple[tuple[float, float], ...] = ()  # (gain per unit of the budget, units)


class Demand(msgspec.Struct, frozen=True):
    """State to restore after a restart. `hours`: offers by local hour on a usual day, seen on `days` days."""

    hours: tuple[float, ...] = ()
    days: float = 0.0
    recent: tuple[Steps, ...] = ()
    day: str = ""
    today: tuple[int, ...] = (0,) * HOURS


class EnergyState(msgspec.Struct, frozen=True):
    """State to restore after a restart: the demand, and what the device's energy was measured to be."""

    demand: Demand = Demand()
    drawn_wh: float = 0.0  # while the charge fell by `fallen`
    fallen: float = 0.0
    excess_wh: float = 0.0  # above the draw without work, for `tokens`
    tokens: float = 0.0


def steps_of(choices: Iterable[tuple[float, float]]) -> Steps:
    """Return the steps of choices (pairs of quality and cost) that are on their upper hull, from the cheapest on."""
    hull: list[tuple[float, float]] = []
    for quality, cost in sorted(choices, key=lambda one: (one[1], -one[0])):
        if hull and quality <= hull[-1][0]:
            continue
        while len(hull) > 1 and _ratio(hull[-2], hull[-1]) <= _ratio(hull[-1], (quality, cost)):
            hull.pop()
        hull.append((quality, cost))
    found = tuple((_ratio(one, more), more[1] - one[1]) for one, more in pairwise(hull))
    return Steps(hull[0][1] if hull else 0.0, found)


def finite(price: float | None) -> float:
    """Return the price in which another budget's offers are reckoned; 0 while nothing is left."""
    return 0.0 if price is None or price >= MAX_PRICE else price


def _ratio(less: tuple[float, float], more: tuple[float, float]) -> float:
    return (more[0] - less[0]) / (more[1] - less[1])


class Pacer:
    """The price of a budget that is renewed each day, at an hour from which the caller counts."""

    def __init__(self, known: Demand = Demand()) -> None:  # noqa: B008 - frozen
        self._usual = list(known.hours) or [_FIRST_DAY / HOURS] * HOURS
        self._days = known.days
        self._recent = deque(known.recent, _OFFERS)
        self._steps = [step for one in self._recent for step in one.steps]  # nearly sorted, so that sorting is cheap
        self._least = sum(one.least for one in self._recent)
        self._today = list(known.today)
        self._day = known.day

    def offer(self, steps: Steps, day: str, hour: int) -> None:
        """Take note of a choice between targets. `day`: local, ISO 8601; `hour`: of that day."""
        self.turn(day)
        if len(self._recent) == _OFFERS:
            self._least -= self._recent[0].least
            for step in self._recent[0].steps:
                self._steps.remove(step)
        self._recent.append(steps)
        self._least += steps.least
        self._steps += steps.steps
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

    def price(self, left: float, day: str, hours: float, until: float = HOURS) -> float:
        """Return the price, quality per unit of what is `left` for the hours of the day from `hours` to `until`."""
        self.turn(day)
        if left <= 0.0:
            return MAX_PRICE
        count = self.expected(hours, until)
        if not self._recent or count <= 0.0:
            return 0.0
        each = count / len(self._recent)  # the offers to come that a recent one stands for
        left -= each * self._least
        self._steps.sort(reverse=True)
        for ratio, cost in self._steps:
            left -= each * cost
            if left <= 0.0:
                return min(ratio, MAX_PRICE)
        return 0.0

    def expected(self, hours: float, until: float = HOURS) -> float:
        """Return the number of offers that are expected from `hours` to `until`, which may be on the next day."""
        passed = _until(self._usual, hours)
        seen = float(sum(self._today))
        pace = (seen + _TRUST) / (passed + _TRUST)
        return pace * (_until(self._usual, until) - passed)

    def state(self) -> Demand:
        return Demand(tuple(self._usual), self._days, tuple(self._recent), self._day, tuple(self._today))


def _until(hourly: Sequence[float], hours: float) -> float:
    """Return the sum of the first `hours`, as if each day were alike."""
    days, hours = divmod(hours, HOURS)
    whole = int(hours)
    return days * sum(hourly) + sum(hourly[:whole]) + hourly[whole] * (hours - whole)
