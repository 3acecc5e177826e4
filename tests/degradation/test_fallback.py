"""The ladder's memory, under a fake clock: breakers, times to first token, warmth."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from cloud_pool.degradation.config import DegradationConfig
from cloud_pool.degradation.fallback import TierFallback, TierSignals, stress_of_error
from cloud_pool.degradation.fallback_plan import FallbackRequest, FallbackStep
from cloud_pool.degradation.warm_up import TierWarmer
from router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    QueueFull,
    Shed,
)

from .scripted import EndpointAvailability, QueuePressure

ASKED = FallbackRequest(tier="large", left_s=60.0, position=0.9)


class Bed:
    def __init__(self, objective_s: float = 1.0, tiers: tuple[str, ...] = ("large", "medium")) -> None:
        self.now = 1000.0
        self.health = {name: EndpointAvailability() for name in ("large", "medium", "alone")}
        self.pressure = {name: QueuePressure() for name in self.health}
        senses = {name: TierSignals(self.health[name], self.pressure[name], objective_s) for name in self.health}
        self.ladder = TierFallback(DegradationConfig(tiers=tiers), senses, clock=lambda: self.now)

    def order(self, asked: FallbackRequest = ASKED) -> list[str]:
        return [fallback_step.tier for fallback_step in self.ladder.fallback_steps(asked, "standard")]

    def firsts(self, count: int = 20, step_interval_s: float = 0.0) -> list[str]:
        found = []
        for _ in range(count):
            found.append(self.order()[0])
            self.now += step_interval_s
        return found


def test_a_tier_outside_the_order_stands_alone() -> None:
    """And without an order every tier does."""
    assert Bed().order(FallbackRequest(tier="alone", left_s=1.0)) == ["alone"]
    assert Bed(tiers=()).order() == ["large"]


def test_slow_first_tokens_move_work_down_and_fast_ones_bring_it_back() -> None:
    """Over the objective the share falls; seconds after the times are good again all work is back."""
    bed = Bed()
    firsts = []
    for _ in range(200):
        firsts.append(bed.order()[0])
        if firsts[-1] == "large":
            bed.ladder.on_first_token("large", 3.0)
        bed.now += 0.05
    assert firsts[100:].count("large") < 30
    bed.now += 1.0
    for _ in range(100):
        bed.ladder.on_first_token("large", 0.1)
        bed.order()
        bed.now += 0.05
    assert set(bed.firsts()) == {"large"}


def test_a_crowd_of_bulk_work_moves_nobody_who_is_urgent() -> None:
    """Saturated for standard and bulk work; interactive requests keep the tier while their own queue is short."""
    bed = Bed()
    bed.pressure["large"].saturated = True
    for _ in range(60):
        bed.firsts()
        assert bed.ladder.fallback_steps(ASKED, "interactive")[0].tier == "large"
        bed.now += 0.5
    assert bed.ladder.tier_health("large").share < 1.0
    assert bed.ladder.tier_health("large", "interactive").share == 1.0
    bed.pressure["large"].queue_s = 1.5
    bed.ladder.fallback_steps(ASKED, "interactive")
    assert bed.ladder.tier_health("large", "interactive").stress == "saturated"


def test_the_least_urgent_work_moves_first_and_comes_back_last() -> None:
    """Standard work under stress pushes bulk down, and moves itself only when bulk is at its floor; then back."""
    bed = Bed()
    bed.pressure["large"].saturated = True

    def look() -> tuple[float, float]:
        bed.ladder.fallback_steps(ASKED, "bulk")
        bed.order()
        bed.now += 0.1
        return bed.ladder.tier_health("large").share, bed.ladder.tier_health("large", "bulk").share

    shares = [look() for _ in range(300)]
    assert all(standard == 1.0 or bulk <= 0.05 for standard, bulk in shares)
    assert shares[-1] == (0.05, 0.05)
    bed.pressure["large"].saturated = False
    for _ in range(100):
        shares.append(look())
        assert shares[-1][0] == 1.0 or shares[-1][1] <= 0.05
    assert shares[-1] == (1.0, 1.0)


def test_work_that_is_not_there_has_not_to_move() -> None:
    """Two seconds after the last bulk request standard work moves by itself."""
    bed = Bed()
    bed.ladder.fallback_steps(ASKED, "bulk")
    bed.now += 3.0
    bed.pressure["large"].saturated = True
    bed.order()
    assert bed.ladder.tier_health("large").share < 1.0
    assert bed.ladder.tier_health("large", "bulk").share == 1.0


def test_recovery_takes_less_than_five_seconds() -> None:
    """From a minute of saturation with slow first tokens to all of the work, under light load."""
    bed = Bed()
    for _ in range(600):
        bed.pressure["large"].saturated = True
        bed.ladder.on_first_token("large", 2.5)
        bed.order()
        bed.now += 0.1
    bed.pressure["large"].saturated = False
    ended = bed.now
    while bed.ladder.tier_health("large").share < 1.0:
        if bed.order()[0] == "large":
            bed.ladder.on_first_token("large", 0.1)
        bed.now += 0.1
        assert bed.now - ended < 5.0


def test_the_tier_of_a_flapping_load_does_not_flap() -> None:
    """Saturated every other quarter of a second for a minute: once down, the share never rises."""
    bed, shares = Bed(), []
    for tick in range(600):
        bed.pressure["large"].saturated = tick // 3 % 2 == 0
        bed.order()
        shares.append(bed.ladder.tier_health("large").share)
        bed.now += 0.1
    assert shares == sorted(shares, reverse=True)


def test_a_breaker_opens_and_one_probe_closes_it() -> None:
    """Five failures: the tier is left out. Later one request finds out, and a success brings work back."""
    bed = Bed()
    for _ in range(5):
        assert bed.ladder.may_try(FallbackStep("large"))
        assert bed.ladder.on_failure("large", EngineUnavailable("gone")) == "broken"
    assert bed.order() == ["medium"]
    assert not bed.ladder.may_try(FallbackStep("large"))
    assert bed.ladder.may_try(FallbackStep("large", forced=True))
    bed.now += 10.0
    assert bed.order() == ["large", "medium"]
    assert bed.ladder.may_try(FallbackStep("large"))
    assert not bed.ladder.may_try(FallbackStep("large"))
    bed.ladder.on_first_token("large", 0.1)
    assert bed.ladder.may_try(FallbackStep("large"))


def test_a_hurried_caller_opens_no_breaker() -> None:
    """Only a Triton that had its own time, `patience` times the objective, is to blame for silence; a queue is not."""
    bed = Bed(objective_s=1.0)
    for _ in range(20):
        assert bed.ladder.on_timeout("large", 0.01) == "slow"
        assert bed.ladder.on_timeout("large", None) == "saturated"
    assert not bed.ladder.is_open("large")
    for _ in range(5):
        bed.ladder.on_timeout("large", 3.0)
    assert bed.ladder.is_open("large")


def test_patience() -> None:
    """Times the objective, more for who can wait; half of a short time; all of it for the last rung."""
    first_token_timeout_s = Bed(objective_s=1.0).ladder.first_token_timeout_s
    assert first_token_timeout_s(FallbackStep("large"), "interactive", 60.0) == 3.0
    assert first_token_timeout_s(FallbackStep("large"), "standard", 60.0) == 6.0
    assert first_token_timeout_s(FallbackStep("large"), "bulk", 600.0) == 30.0
    assert first_token_timeout_s(FallbackStep("large"), "interactive", 2.0) == 1.0
    assert first_token_timeout_s(FallbackStep("large", last=True), "interactive", 60.0) == 60.0
    assert Bed(objective_s=0.0).ladder.first_token_timeout_s(FallbackStep("large"), "interactive", 60.0) == 60.0


@pytest.mark.parametrize(
    ("error", "stress"),
    [
        (QueueFull("x"), "saturated"),
        (Shed("x"), "saturated"),
        (EngineUnavailable("x"), "broken"),
        (CloudFailed("x"), "broken"),
        (CloudRejected("x"), ""),
        (ContextLengthExceeded("x"), ""),
        (DeadlineExceeded("x"), ""),
    ],
)
def test_what_errors_say_of_a_tier(error: CausewayError, stress: str) -> None:
    """Only those for which another tier may do better move a request down."""
    assert stress_of_error(error) == stress


def test_the_order_is_checked() -> None:
    """A tier that does not exist, or twice, is an error at start that names its place."""
    with pytest.raises(ConfigError, match=r"degradation\.tiers\[1\]"):
        DegradationConfig(tiers=("a", "b")).check(["a"])
    with pytest.raises(ConfigError, match="twice"):
        DegradationConfig(tiers=("a", "a")).check(["a"])


# --- warmth -----------------------------------------------------------------------------------------------------------


class Answers:
    """A pool that says how its endpoints answered."""

    def __init__(self, *codes: str) -> None:
        self.codes = codes
        self.checks = 0

    async def check(self) -> Mapping[str, str]:
        self.checks += 1
        return {f"t:{at}": code for at, code in enumerate(self.codes)}


class Warm(Bed):
    def __init__(self, *codes: str, idle_s: float = 60.0) -> None:
        super().__init__()
        self.pool = Answers(*codes)
        self.warmer = TierWarmer(self.ladder, {"large": self.pool}, {"large": "m"}, idle_s, clock=lambda: self.now)

    async def look(self) -> int:
        """How many warm-ups there were in all."""
        async with anyio.create_task_group() as tasks:
            self.warmer.start_due(tasks)
        return self.pool.checks


async def test_a_tier_is_warmed_at_the_start_and_when_idle() -> None:
    """Once before anybody asks, and again whenever nobody did for `idle_s`; work keeps it warm by itself."""
    bed = Warm("")
    assert [await bed.look(), await bed.look()] == [1, 1]
    bed.now += 59.0
    assert await bed.look() == 1
    bed.ladder.on_first_token("large", 0.1)
    bed.now += 2.0
    assert await bed.look() == 1
    bed.now += 60.0
    assert [await bed.look(), await bed.look()] == [2, 2]


async def test_until_it_is_warm_its_times_do_not_count() -> None:
    """A model that was just loaded is slow for a moment; that is not held against the tier."""
    bed = Warm("")
    for _ in range(9):
        bed.ladder.on_first_token("large", 30.0)
    assert bed.order()[0] == "large"
    await bed.look()
    for _ in range(9):
        bed.ladder.on_first_token("large", 30.0)
    assert bed.order()[0] == "medium" or bed.firsts().count("medium")
    assert bed.ladder.tier_health("large").stress == "slow"


async def test_a_model_that_was_loaded_again_is_warmed_at_once() -> None:
    """Its own tier alone, and whatever was before."""
    bed = Warm("")
    await bed.look()
    bed.warmer.loaded("another")
    assert await bed.look() == 1
    bed.warmer.loaded("m")
    assert not bed.ladder.is_warm("large")
    assert await bed.look() == 2
    assert bed.ladder.is_warm("large")


async def test_a_warm_up_that_fails_is_tried_again() -> None:
    """After a pause, for as long as it takes; one endpoint that answers is enough."""
    bed = Warm("engine_unavailable", "cloud_unreachable")
    assert [await bed.look(), await bed.look()] == [1, 1]
    assert not bed.ladder.is_warm("large")
    bed.now += 1.0
    bed.pool.codes = ("engine_unavailable", "")
    assert await bed.look() == 2
    assert bed.ladder.is_warm("large")


async def test_no_warm_ups_where_none_are_wanted() -> None:
    """`warm_up_after_idle_s: 0`: nothing is asked, and times count from the first."""
    bed = Warm("", idle_s=0.0)
    await bed.warmer.watch()
    assert bed.pool.checks == 0
    assert bed.ladder.is_warm("large")
