"""A budget of money that is paced, beside hindsight and beside spending it in the order of arrival.

Ten days each of 12 devices: requests with a time of day, the quality of both answers, and an expected, an actual and
a greatest price. Numbers of requests, hard questions and budgets differ from device to device and from day to day; a
third of the devices has a day with three times the requests, a third a week's end with more hard questions.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from causeway_server.router.decision.pacing import Pacer, steps_of

from .rows import Row

CHOSEN, REPORTED = range(100, 112), range(5000, 5012)  # seeds
DAYS = 10
_REPRICED = 16  # requests, as the daemon does


class Asked(NamedTuple):
    hours: float  # since midnight
    gain: float  # of the cloud's answer
    device: float  # quality of the device's
    expected: float  # USD
    actual: float
    most: float


class Day(NamedTuple):
    requests: list[Asked]
    budget: float


def days(seed: int) -> Iterator[Day]:
    chance = random.Random(seed)
    peak = chance.uniform(10, 15)
    shape = [1 + 4 * math.exp(-(((hour - peak) / 4) ** 2)) for hour in range(24)]
    hard = chance.uniform(0.2, 0.7), chance.uniform(0.1, 0.5)  # share of hard questions by day, by night
    usual, share = int(math.exp(chance.uniform(math.log(300), math.log(3000)))), chance.uniform(0.1, 0.7)
    for number in range(DAYS):
        count = max(20, int(usual * chance.lognormvariate(0, 0.25) * (0.5 if number % 7 > 4 else 1)))
        if number == 6 and seed % 3 == 0:
            count *= 3
        if number == 8 and seed % 3 == 1:
            hard = min(0.95, hard[0] * 1.8), hard[1]
        hours = sorted(hour + chance.random() for hour in chance.choices(range(24), weights=shape, k=count))
        yield Day([_asked(hour, hard, chance) for hour in hours], share * usual * 0.00173)


def _asked(hours: float, hard: tuple[float, float], chance: random.Random) -> Asked:
    is_hard = chance.random() < hard[0 if 8 <= hours < 18 else 1]
    device = chance.betavariate(3, 3) if is_hard else chance.betavariate(9, 1.5)
    cloud = min(1.0, max(0.0, chance.gauss(0.9, 0.05)))
    expected = math.exp(chance.gauss(math.log(0.002), 0.7))
    actual = min(expected * math.exp(chance.gauss(-0.03, 0.25)), 4 * expected)
    return Asked(hours, cloud - device, device, expected, actual, 4 * expected)


def hindsight(day: Day) -> float:
    """Return the most that the budget can gain, with parts of an answer allowed."""
    gained, left = 0.0, day.budget
    for one in sorted((one for one in day.requests if one.gain > 0), key=lambda one: -one.gain / one.actual):
        part = min(1.0, left / one.actual)
        gained, left = gained + part * one.gain, left - part * one.actual
        if left <= 0:
            break
    return gained


def stopped(day: Day) -> float:
    """Return what spending in the order of arrival gains."""
    gained = spent = 0.0
    for one in day.requests:
        if one.gain > 0 and spent + one.most <= day.budget:
            gained, spent = gained + one.gain, spent + one.actual
    return gained


def paced(
    day: Day,
    pacer: Pacer,
    name: str,
    expects: Callable[[int], float | None] = lambda _: None,
    learns: Callable[[int], None] = lambda _: None,
) -> tuple[float, float]:
    """Return what the price gains, and what was spent.

    Args:
        expects: Returns the expected price of the request with a number, if it is another one than that of the day.
        learns: Takes note of what the cloud answered to it.
    """
    gained = spent = price = 0.0
    for number, one in enumerate(day.requests):
        if (expected := expects(number)) is not None:
            one = one._replace(expected=expected)  # noqa: PLW2901 - the same request, better known
        if number % _REPRICED == 0:
            price = pacer.price(day.budget - spent, name, one.hours)
        pacer.offer(steps_of(((one.device, 0.0), (one.device + one.gain, one.expected))), name, int(one.hours))
        if one.gain > price * one.expected and spent + one.most <= day.budget:
            gained, spent = gained + one.gain, spent + one.actual
            learns(number)
    return gained, spent


def main(seeds: Sequence[int] = REPORTED) -> list[Row]:
    shares, firsts, over_stop, overruns = [], [], [], 0
    for seed in seeds:
        pacer = Pacer()
        for number, day in enumerate(days(seed)):
            gained, spent = paced(day, pacer, str(number))
            share = gained / hindsight(day)
            shares.append(share)
            firsts += [share] if not number else []
            over_stop.append(gained / stopped(day))
            overruns += spent > day.budget
    ordered = sorted(shares)
    low, first = ordered[len(ordered) // 20], statistics.mean(firsts)
    note = f"mean of {len(shares)} days; 5 % of them have less than {low:.3f}, and first days have {first:.3f}"
    return [
        Row("gain of a paced budget ÷ the gain with hindsight", statistics.mean(shares), "x", 0.95, "higher", note),
        Row(
            "gain of a paced budget ÷ the gain if requests take the money in their order of arrival",
            statistics.mean(over_stop),
            "x",
            1.1,
            "higher",
        ),
        Row("budgets that were overrun", overruns, "days", 0.0),
    ]
