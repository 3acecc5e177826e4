"""The verdict of a trial on this device's own requests."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.agent.trial import Trial, TrialSettings
from causeway_server.edge_node.observability.metrics import DeviceCondition, Traffic
from causeway_server.router.bundle.manifest import binomial_tail
from causeway_server.router.bundle.refusals import UpdateRefused

SETTINGS = TrialSettings()
LATENCY = (0, 0, 900, 60, 40, 0, 0, 0, 0)
BEFORE = DeviceCondition(
    Traffic(requests=1000, errors=5, degraded=20, latency=LATENCY), temperature_c=60.0, throttled=False
)


def condition(requests: int = 300, **changes: Any) -> DeviceCondition:
    latency = (0, 0, requests, *(0,) * 6)
    traffic = Traffic(requests=requests, latency=latency)
    names = set(Traffic.__struct_fields__)
    traffic = msgspec.structs.replace(traffic, **{name: value for name, value in changes.items() if name in names})
    device = msgspec.structs.replace(BEFORE, traffic=traffic)
    return msgspec.structs.replace(device, **{name: value for name, value in changes.items() if name not in names})


def trial() -> Trial:
    return Trial(SETTINGS, BEFORE, Traffic(), began=0.0)


def refused(one: Trial, now: float, found: DeviceCondition) -> str:
    with pytest.raises(UpdateRefused) as caught:
        one.judge(now, found)
    return caught.value.code


def test_it_is_proven_after_time_and_requests() -> None:
    assert not trial().judge(599.0, condition())
    assert not trial().judge(601.0, condition(requests=199))
    assert trial().judge(601.0, condition())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"errors": 15}, "errors_rose"),
        ({"degraded": 45}, "degraded_rose"),
        ({"latency": (0, 0, 200, 0, 0, 100, 0, 0, 0)}, "latency_rose"),
        ({"restarts": 3}, "unhealthy"),
    ],
)
def test_what_rose_is_named(changes: dict[str, Any], code: str) -> None:
    assert refused(trial(), 60.0, condition(**changes)) == code


@pytest.mark.parametrize(
    "changes", [{"errors": 4}, {"degraded": 12}, {"latency": (0, 0, 270, 0, 0, 30, 0, 0, 0)}, {"restarts": 2}]
)
def test_what_happens_by_chance_is_no_reason(changes: dict[str, Any]) -> None:
    assert trial().judge(601.0, condition(**changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"problem": "no target"}, "unhealthy"),
        ({"temperature_c": 85.0}, "heat_rose"),
        ({"throttled": True}, "heat_rose"),
    ],
)
def test_only_what_lasts_counts(changes: dict[str, Any], code: str) -> None:
    bad, one = condition(**changes), trial()
    one.judge(10.0, bad)
    one.judge(50.0, condition())
    one.judge(100.0, bad)
    assert refused(one, 111.0, bad) == code


def test_a_hot_day_before_is_no_reason() -> None:
    before = msgspec.structs.replace(BEFORE, temperature_c=79.0)
    one = Trial(SETTINGS, before, Traffic(), began=0.0)
    assert one.judge(601.0, condition(temperature_c=85.0))


@pytest.mark.slow
def test_a_bundle_that_changes_nothing_is_hardly_ever_undone() -> None:
    """1,000 trials of 600 s with a look every 5 s: as many errors as before, and the same latencies."""
    chance, undone = random.Random(7), 0
    for _ in range(1000):
        one, requests, errors, slow = trial(), 0, 0, 0
        try:
            for look in range(1, 121):
                for _ in range(3):
                    requests += 1
                    errors += chance.random() < 0.005
                    slow += chance.random() < 0.04
                latency = (0, 0, requests - slow, 0, slow, 0, 0, 0, 0)
                one.judge(5.0 * look, condition(requests, errors=errors, latency=latency))
        except UpdateRefused:
            undone += 1
    assert undone <= 2


def test_five_percent_errors_are_found_within_a_few_hundred_requests() -> None:
    chance, found = random.Random(7), 0
    for _ in range(300):
        errors = 0
        for requests in range(1, 501):
            errors += chance.random() < 0.05
            if binomial_tail(requests, errors, 0.015) < SETTINGS.false_alarm:
                found += 1
                break
    assert found >= 285


@pytest.mark.parametrize(("count", "total", "share", "expected"), [(0, 10, 0.1, 1.0), (10, 10, 0.5, 0.5**10)])
def test_tail(count: int, total: int, share: float, expected: float) -> None:
    assert binomial_tail(total, count, share) == pytest.approx(expected)


def test_the_tail_is_that_of_a_fair_die() -> None:
    """At least two sixes of four: 1 - (5/6)^4 - 4 (1/6)(5/6)^3."""
    assert binomial_tail(4, 2, 1 / 6) == pytest.approx(1 - (5 / 6) ** 4 - 4 / 6 * (5 / 6) ** 3)
