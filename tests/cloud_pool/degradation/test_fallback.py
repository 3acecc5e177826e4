"""The state of the tiers, under a fake clock: breakers, times to first token, warm-up."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import (
    FallbackRequest,
    FallbackStep,
    TierFallback,
    TierSignals,
    TierWarmer,
    stress_of_error,
)
from causeway_server.router.errors import (
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

REQUEST = FallbackRequest(tier="large", left_s=60.0, position=0.9)


class Bed:
    def __init__(self, objective_s: float = 1.0, tiers: tuple[str, ...] = ("large", "medium")) -> None:
        self.now = 1000.0
        self.health = {name: EndpointAvailability() for name in ("large", "medium", "alone")}
        self.pressure = {name: QueuePressure() for name in self.health}
        signals = {name: TierSignals(self.health[name], self.pressure[name], objective_s) for name in self.health}
        self.fallback = TierFallback(DegradationConfig(tiers=tiers), signals, clock=lambda: self.now)

    def order(self, request: FallbackRequest = REQUEST) -> list[str]:
        return [fallback_step.tier for fallback_step in self.fallback.fallback_steps(request, "standard")]

    def firsts(self, count: int = 20, step_interval_s: float = 0.0) -> list[str]:
        found = []
        for _ in range(count):
            found.append(self.order()[0])
            self.now += step_interval_s
        return found


def test_a_tier_outside_the_order_has_no_fallback() -> None:
    assert Bed().order(FallbackRequest(tier="alone", left_s=1.0)) == ["alone"]
    assert Bed(tiers=()).order() == ["large"]


def test_slow_first_tokens_move_work_down_and_fast_ones_bring_it_back() -> None:
    bed = Bed()
    firsts = []
    for _ in range(200):
        firsts.append(bed.order()[0])
        if firsts[-1] == "large":
            bed.fallback.on_first_token("large", 3.0)
        bed.now += 0.05
    assert firsts[100:].count("large") < 30
    bed.now += 1.0
    for _ in range(100):
        bed.fallback.on_first_token("large", 0.1)
        bed.order()
        bed.now += 0.05
    assert set(bed.firsts()) == {"large"}


def test_bulk_saturation_does_not_move_interactive_requests() -> None:
    bed = Bed()
    bed.pressure["large"].is_saturated = True
    for _ in range(60):
        bed.firsts()
        assert bed.fallback.fallback_steps(REQUEST, "interactive")[0].tier == "large"
        bed.now += 0.5
    assert bed.fallback.tier_health("large").share < 1.0
    assert bed.fallback.tier_health("large", "interactive").share == 1.0
    bed.pressure["large"].queue_s = 1.5
    bed.fallback.fallback_steps(REQUEST, "interactive")
    assert bed.fallback.tier_health("large", "interactive").stress == "saturated"


def test_the_least_urgent_work_moves_first_and_comes_back_last() -> None:
    bed = Bed()
    bed.pressure["large"].is_saturated = True

    def look() -> tuple[float, float]:
        bed.fallback.fallback_steps(REQUEST, "bulk")
        bed.order()
        bed.now += 0.1
        return bed.fallback.tier_health("large").share, bed.fallback.tier_health("large", "bulk").share

    shares = [look() for _ in range(300)]
    assert all(standard == 1.0 or bulk <= 0.05 for standard, bulk in shares)
    assert shares[-1] == (0.05, 0.05)
    bed.pressure["large"].is_saturated = False
    for _ in range(100):
        shares.append(look())
        assert shares[-1][0] == 1.0 or shares[-1][1] <= 0.05
    assert shares[-1] == (1.0, 1.0)


def test_absent_priorities_do_not_hold_others_back() -> None:
    bed = Bed()
    bed.fallback.fallback_steps(REQUEST, "bulk")
    bed.now += 3.0
    bed.pressure["large"].is_saturated = True
    bed.order()
    assert bed.fallback.tier_health("large").share < 1.0
    assert bed.fallback.tier_health("large", "bulk").share == 1.0


def test_recovery_takes_less_than_five_seconds() -> None:
    bed = Bed()
    for _ in range(600):
        bed.pressure["large"].is_saturated = True
        bed.fallback.on_first_token("large", 2.5)
        bed.order()
        bed.now += 0.1
    bed.pressure["large"].is_saturated = False
    ended = bed.now
    while bed.fallback.tier_health("large").share < 1.0:
        if bed.order()[0] == "large":
            bed.fallback.on_first_token("large", 0.1)
        bed.now += 0.1
        assert bed.now - ended < 5.0


def test_a_flapping_load_does_not_flap_the_tier() -> None:
    bed, shares = Bed(), []
    for tick in range(600):
        bed.pressure["large"].is_saturated = tick // 3 % 2 == 0
        bed.order()
        shares.append(bed.fallback.tier_health("large").share)
        bed.now += 0.1
    assert shares == sorted(shares, reverse=True)


def test_a_breaker_opens_and_one_probe_closes_it() -> None:
    bed = Bed()
    for _ in range(5):
        assert bed.fallback.may_try(FallbackStep("large"))
        assert bed.fallback.on_failure("large", EngineUnavailable("gone")) == "broken"
    assert bed.order() == ["medium"]
    assert not bed.fallback.may_try(FallbackStep("large"))
    assert bed.fallback.may_try(FallbackStep("large", forced=True))
    bed.now += 10.0
    assert bed.order() == ["large", "medium"]
    assert bed.fallback.may_try(FallbackStep("large"))
    assert not bed.fallback.may_try(FallbackStep("large"))
    bed.fallback.on_first_token("large", 0.1)
    assert bed.fallback.may_try(FallbackStep("large"))


def test_a_short_deadline_opens_no_breaker() -> None:
    """Only silence for `first_token_timeout_factor` times the objective in Triton counts; a queue does not."""
    bed = Bed(objective_s=1.0)
    for _ in range(20):
        assert bed.fallback.on_timeout("large", 0.01) == "slow"
        assert bed.fallback.on_timeout("large", None) == "saturated"
    assert not bed.fallback.is_open("large")
    for _ in range(5):
        bed.fallback.on_timeout("large", 3.0)
    assert bed.fallback.is_open("large")


def test_first_token_timeouts() -> None:
    first_token_timeout_s = Bed(objective_s=1.0).fallback.first_token_timeout_s
    assert first_token_timeout_s(FallbackStep("large"), "interactive", 60.0) == 3.0
    assert first_token_timeout_s(FallbackStep("large"), "standard", 60.0) == 6.0
    assert first_token_timeout_s(FallbackStep("large"), "bulk", 600.0) == 30.0
    assert first_token_timeout_s(FallbackStep("large"), "interactive", 2.0) == 1.0
    assert first_token_timeout_s(FallbackStep("large", last=True), "interactive", 60.0) == 60.0
    assert Bed(objective_s=0.0).fallback.first_token_timeout_s(FallbackStep("large"), "interactive", 60.0) == 60.0


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
def test_which_errors_are_a_tiers_stress(error: CausewayError, stress: str) -> None:
    assert stress_of_error(error) == stress


def test_an_invalid_tier_order_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"degradation\.tiers\[1\]"):
        DegradationConfig(tiers=("a", "b")).check(["a"])
    with pytest.raises(ConfigError, match="twice"):
        DegradationConfig(tiers=("a", "a")).check(["a"])


# --- warmth -----------------------------------------------------------------------------------------------------------


class Answers:
    """A pool that reports how its endpoints answered."""

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
        self.warmer = TierWarmer(self.fallback, {"large": self.pool}, {"large": "m"}, idle_s, clock=lambda: self.now)

    async def look(self) -> int:
        """Return how many warm-ups there were."""
        async with anyio.create_task_group() as tasks:
            self.warmer.start_due(tasks)
        return self.pool.checks


async def test_a_tier_is_warmed_up_at_the_start_and_when_idle() -> None:
    bed = Warm("")
    assert [await bed.look(), await bed.look()] == [1, 1]
    bed.now += 59.0
    assert await bed.look() == 1
    bed.fallback.on_first_token("large", 0.1)
    bed.now += 2.0
    assert await bed.look() == 1
    bed.now += 60.0
    assert [await bed.look(), await bed.look()] == [2, 2]


async def test_first_token_times_of_a_cold_tier_do_not_count() -> None:
    bed = Warm("")
    for _ in range(9):
        bed.fallback.on_first_token("large", 30.0)
    assert bed.order()[0] == "large"
    await bed.look()
    for _ in range(9):
        bed.fallback.on_first_token("large", 30.0)
    assert bed.order()[0] == "medium" or bed.firsts().count("medium")
    assert bed.fallback.tier_health("large").stress == "slow"


async def test_a_reloaded_models_tier_is_warmed_up_at_once() -> None:
    bed = Warm("")
    await bed.look()
    bed.warmer.loaded("another")
    assert await bed.look() == 1
    bed.warmer.loaded("m")
    assert not bed.fallback.is_warm("large")
    assert await bed.look() == 2
    assert bed.fallback.is_warm("large")


async def test_a_failed_warm_up_is_repeated_after_a_pause() -> None:
    bed = Warm("engine_unavailable", "cloud_unreachable")
    assert [await bed.look(), await bed.look()] == [1, 1]
    assert not bed.fallback.is_warm("large")
    bed.now += 1.0
    bed.pool.codes = ("engine_unavailable", "")
    assert await bed.look() == 2
    assert bed.fallback.is_warm("large")


async def test_zero_idle_time_disables_warm_ups() -> None:
    bed = Warm("", idle_s=0.0)
    await bed.warmer.watch()
    assert bed.pool.checks == 0
    assert bed.fallback.is_warm("large")


def test_a_caller_falls_back_to_its_own_tiers_only() -> None:
    bed = Bed()
    for allowed, order in (
        (None, ["large", "medium"]),
        ({"large"}, ["large"]),
        ({"large", "medium"}, ["large", "medium"]),
    ):
        request = FallbackRequest("large", 60.0, 0.1, allowed=None if allowed is None else frozenset(allowed))
        assert bed.order(request) == order
