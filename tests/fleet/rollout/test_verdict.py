"""The verdict: its error rates by Monte-Carlo with fixed seeds, its exactness by enumeration, and each of its cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.fleet.rollout.settings import LATENCY, MetricLimit, RolloutSettings, RolloutStage
from causeway_server.fleet.rollout.verdict import (
    Observations,
    difference_of_shares,
    judge,
    randomisation_p,
    sampling_tail,
)
from causeway_server.router.bundle.manifest import binomial_tail
from causeway_server.router.variants.verdict import VerdictOutcome, half_width

pytestmark = pytest.mark.slow

SETTINGS = RolloutSettings((RolloutStage(1_000),))
LEVEL = SETTINGS.level(1)


def fleet_of(
    rng: np.random.Generator, devices: int, *, worse: float = 0.0, slower: float = 1.0, lost: float = 0.01
) -> Observations:
    """Devices as they are: a few answer badly for reasons of their own, and some send far more requests than others."""
    requests = rng.poisson(rng.lognormal(4.0, 1.0, devices)).astype(np.int64)
    own = np.where(rng.random(devices) < 0.03, rng.random(devices), rng.beta(0.3, 30.0, devices))
    speed = rng.lognormal(0.0, 0.3, devices) * slower
    within = np.array([[0.5 * math.erfc(-math.log(bound / each)) for bound in (1, 2, 3, 4)] for each in speed])
    parts = np.diff(within, axis=1, prepend=0.0, append=1.0).clip(0)
    return Observations(
        requests,
        {
            "errors": rng.binomial(requests, np.minimum(1.0, own + worse)).astype(np.int64),
            "degraded": rng.binomial(requests, own / 2).astype(np.int64),
        },
        np.array([rng.multinomial(count, share) for count, share in zip(requests, parts, strict=True)], dtype=np.int64),
        rng.random(devices) < lost,
    )


def steady(devices: int, *, errors: int = 1, requests: int = 200) -> Observations:
    counts = np.full(devices, requests, dtype=np.int64)
    events = {"errors": np.full(devices, errors, dtype=np.int64), "degraded": np.zeros(devices, dtype=np.int64)}
    latency = np.tile(np.array([requests - requests // 20, requests // 20, 0, 0, 0], dtype=np.int64), (devices, 1))
    return Observations(counts, events, latency, np.zeros(devices, dtype=np.bool_))


def changed(side: Observations, **fields: object) -> Observations:
    values = {name: getattr(side, name) for name in Observations.__dataclass_fields__}
    return Observations(**(values | fields))


# --- the tests behind it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("canary", "devices"), [(1, 20), (5, 20), (10, 200), (50, 1000), (500, 1000)])
def test_a_random_split_of_unequal_devices_is_seldom_rejected(canary: int, devices: int) -> None:
    """Errors come in clusters here (3 % of devices fail by themselves); a test by requests would reject most splits."""
    rng = np.random.default_rng(canary)
    rejected = 0
    for _ in range(1_000):
        own = np.where(rng.random(devices) < 0.03, rng.random(devices), rng.beta(0.3, 30.0, devices))
        requests = rng.poisson(rng.lognormal(3.0, 1.0, devices)) + 1
        scores = rng.binomial(requests, own) / requests
        rejected += randomisation_p(scores[:canary], scores[canary:]) <= 0.02
    assert rejected <= 32  # 20 are allowed; 4.4 standard deviations more are 40


@given(st.lists(st.integers(0, 4), min_size=2, max_size=9), st.data())
def test_the_p_value_is_valid_for_every_set_of_scores(scores: list[int], data: st.DataObject) -> None:
    """Over all assignments of the same scores, p ≤ x has a probability of at most x, with ties and all."""
    drawn = data.draw(st.integers(1, len(scores) - 1))
    values = np.array(scores, dtype=np.float64)
    everywhere = range(len(scores))
    found = sorted(
        randomisation_p(values[list(chosen)], np.delete(values, list(chosen)))
        for chosen in itertools.combinations(everywhere, drawn)
    )
    assert all((index + 1) / len(found) <= p + 1e-9 for index, p in enumerate(found) if p not in found[index + 1 :])


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_the_tail_of_a_draw_is_exact(marked: int, drawn: int, found: int) -> None:
    total = 8
    exact = sum(
        math.comb(marked, count) * math.comb(total - marked, drawn - count)
        for count in range(found, min(marked, drawn) + 1)
        if drawn >= count
    ) / math.comb(total, drawn)
    tail = sampling_tail(marked, drawn, found, total)
    assert tail == pytest.approx(exact) if found * total > marked * drawn else tail == 1.0


def test_the_tail_of_a_draw_from_a_million_devices() -> None:
    """Finite and ordered where the terms are far below the smallest float."""
    tails = [sampling_tail(10_000, 10_000, found, 1_000_000) for found in (101, 200, 400, 9_999)]
    assert tails == sorted(tails, reverse=True)
    assert 0.3 < tails[0] < 0.6
    assert tails[-1] == 0.0


@pytest.mark.parametrize(("trials", "found"), [(5, 1), (5, 3), (50, 2), (1000, 30)])
def test_the_binomial_tail_is_exact(trials: int, found: int) -> None:
    exact = sum(math.comb(trials, count) * 0.01**count * 0.99 ** (trials - count) for count in range(found, trials + 1))
    assert binomial_tail(trials, found, 0.01) == pytest.approx(exact)


def test_the_interval_holds_at_all_looks_together() -> None:
    """A walk is watched at 60 looks: in 1,000 walks its interval misses the truth at any of them in at most 5 %."""
    rng = np.random.default_rng(3)
    looks = np.unique(np.geomspace(20, 20_000, 60).astype(int))
    missed = 0
    for _ in range(1_000):
        mean = np.cumsum(rng.normal(0.0, 1.0, 20_000))[looks - 1] / looks
        widths = np.array([half_width(1.0 / count, 0.02, 0.95) for count in looks])
        missed += bool((np.abs(mean) > widths).any())
    assert missed <= 50


def test_no_events_at_all_are_not_certainty() -> None:
    """Zero of 100 requests leaves room for some percent; zero of 100,000 does not."""
    few, many = (
        difference_of_shares((zeros, counts), (zeros, counts), 0.02, 0.95)
        for zeros, counts in ((np.zeros(2, dtype=np.int64), np.full(2, each, dtype=np.int64)) for each in (50, 50_000))
    )
    assert few.high > 0.02 > 0.001 > many.high
    assert few.low == pytest.approx(-few.high)


# --- error rates of the verdict --------------------------------------------------------------------------------------


@pytest.mark.parametrize("canary", [1, 5, 50])
def test_the_same_bundle_on_both_sides_does_not_fail(canary: int) -> None:
    """False aborts of one look at the loosest level that any look has."""
    rng = np.random.default_rng(11 + canary)
    verdicts = [judge(fleet_of(rng, canary), fleet_of(rng, 400), SETTINGS, LEVEL).outcome for _ in range(300)]
    assert VerdictOutcome.FAIL not in verdicts


def test_five_percent_errors_fail_at_one_look() -> None:
    """50 devices of some 5,000 suffice: power above 95 % in spite of devices that fail by themselves."""
    rng = np.random.default_rng(5)
    outcomes = [judge(fleet_of(rng, 50, worse=0.05), fleet_of(rng, 1_000), SETTINGS, LEVEL).outcome for _ in range(60)]
    assert outcomes.count(VerdictOutcome.FAIL) >= 57
    assert VerdictOutcome.PASS not in outcomes


def test_slower_answers_fail() -> None:
    """Twice the latency is seen in the share beyond the control's 95th percentile."""
    rng = np.random.default_rng(6)
    verdict = judge(fleet_of(rng, 50, slower=2.0), fleet_of(rng, 500), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.FAIL
    assert [metric.name for metric in verdict.metrics if metric.outcome is VerdictOutcome.FAIL] == [LATENCY]


# --- its cases -------------------------------------------------------------------------------------------------------


def test_equal_devices_with_many_requests_pass() -> None:
    verdict = judge(steady(50), steady(500), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.PASS
    errors = next(metric for metric in verdict.metrics if metric.name == "errors")
    assert errors.difference is not None
    assert errors.difference.low < 0 < errors.difference.high < 0.02


def test_few_requests_are_inconclusive() -> None:
    """The interval is wider than the margin: neither good nor bad is shown."""
    verdict = judge(steady(2, errors=0, requests=20), steady(500), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.INCONCLUSIVE


def test_worse_within_the_margin_is_no_fail() -> None:
    """A difference that is certain but smaller than what the cohort accepts."""
    verdict = judge(steady(500, errors=3), steady(500, errors=1), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.PASS
    assert next(metric for metric in verdict.metrics if metric.name == "errors").p < LEVEL


def test_idle_devices_stay_out() -> None:
    """Devices with few requests are in no share, however bad those were; with only such devices nothing is known."""
    canary = steady(60)
    canary.requests[50:] = 5
    canary.events["errors"][50:] = 5
    verdict = judge(canary, steady(500), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.PASS
    assert any("on 50 devices" in metric.reason for metric in verdict.metrics)
    canary.requests[:] = 5
    assert judge(canary, steady(500), SETTINGS, LEVEL).outcome is VerdictOutcome.INCONCLUSIVE


def test_silent_devices_fail() -> None:
    """Ten of 50 devices that were seen before the stage; as many silent devices of the control would explain them."""
    canary, control = steady(50), steady(500)
    canary.silent[:10] = True
    verdict = judge(canary, control, SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.FAIL
    assert "10 of 50 devices went silent (0.0% of the control)" in verdict.reasons[0]
    control.silent[:100] = True
    assert judge(canary, control, SETTINGS, LEVEL).outcome is VerdictOutcome.PASS
    alone = judge(canary, steady(0), SETTINGS, LEVEL)
    assert "10 of 50 devices went silent" in [metric.reason for metric in alone.metrics]


@pytest.mark.parametrize(
    ("failed", "outcome"),
    [(0, VerdictOutcome.PASS), (1, VerdictOutcome.INCONCLUSIVE), (3, VerdictOutcome.FAIL), (5, VerdictOutcome.FAIL)],
)
def test_devices_that_roll_back_fail_a_small_fleet(failed: int, outcome: VerdictOutcome) -> None:
    """Five members of 20: one device may have had bad luck with its trial, three may not."""
    canary = changed(steady(5 - failed), rolled_back=failed)
    assert judge(canary, steady(15), SETTINGS, LEVEL).outcome is outcome


def test_members_that_lag_behind_hold_up_a_pass() -> None:
    canary = changed(steady(50), pending=40)
    verdict = judge(canary, steady(500), SETTINGS, LEVEL)
    assert verdict.outcome is VerdictOutcome.INCONCLUSIVE
    assert verdict.reasons == ("50 of 90 reachable members have the bundle",)


def test_only_named_metrics_count() -> None:
    """A cohort that names only latency does not fail by errors."""
    settings = RolloutSettings((RolloutStage(1_000),), metrics=(MetricLimit(LATENCY, 0.05),))
    assert judge(steady(50, errors=40), steady(500), settings, LEVEL).outcome is VerdictOutcome.PASS


def test_without_a_control_devices_that_roll_back_are_judged() -> None:
    """At 100 % and in the soak there is nothing to compare requests with."""
    assert judge(steady(50, errors=40), steady(0), SETTINGS, LEVEL).outcome is VerdictOutcome.PASS
    failing = changed(steady(50), rolled_back=10)
    assert judge(failing, steady(0), SETTINGS, LEVEL).outcome is VerdictOutcome.FAIL


def test_an_empty_canary_is_inconclusive() -> None:
    """No member took the bundle: nothing passes by default."""
    assert judge(steady(0), steady(500), SETTINGS, LEVEL).outcome is VerdictOutcome.INCONCLUSIVE


def test_a_hundred_percent_of_errors_everywhere_is_no_difference() -> None:
    assert judge(steady(50, errors=200), steady(500, errors=200), SETTINGS, LEVEL).outcome is VerdictOutcome.PASS
