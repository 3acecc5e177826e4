"""What answers cost the battery and the heat, from readings; and days of `tests/bench/bench_energy.py`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.edge_node.backends.backend import EngineWork
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.signals.energy import EnergyBudget
from causeway_server.edge_node.signals.heat import HeatModel
from causeway_server.edge_node.storage.spend import ENERGY, SpendStore
from causeway_server.router.decision.pacing import MAX_PRICE, EnergyState, Steps
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import AttemptRecord, DeviceSignals, EnergySignals
from tests.bench.bench_energy import run

FILE = """
version: 1
name: cart
targets: {small: {at: edge, model: s}, large: {at: cloud, model: l}}
routes: [{name: doubt, use: [small, large], handoff: {after_tokens: 8, below: 0.6}}]
budget: BUDGET
"""
NOON = time.mktime((2026, 6, 1, 12, 0, 0, 0, 0, -1))
AMBIENT_C, RESISTANCE, TIME_CONSTANT_S = 30.0, 4.0, 240.0


def policy(budget: str) -> Policy:
    return parse_policy(FILE.replace("BUDGET", budget))


def store(directory: Path | None = None, unix: Callable[[], float] = lambda: NOON) -> SpendStore:
    return SpendStore(directory, Clock(unix=unix))


def budget(text: str, spend: SpendStore | None = None) -> EnergyBudget:
    energy = EnergyBudget(spend or store())
    energy.use(policy(text))
    return energy


def warmed(draws: list[float], each_s: int = 600) -> tuple[HeatModel, float]:
    """A model that has seen a device of first order with these draws, one after the other, and its temperature."""
    model, temperature, now = HeatModel(), AMBIENT_C + RESISTANCE * draws[0], 0.0
    for power_w in draws:
        for _ in range(each_s):
            now += 1.0
            aim = AMBIENT_C + RESISTANCE * power_w
            temperature += (aim - temperature) * -math.expm1(-1.0 / TIME_CONSTANT_S)
            model.observe(temperature if now % 7 else None, power_w, 1.0, now)
    model.fit()
    return model, now


def test_heat_is_foreseen_from_the_devices_own_readings() -> None:
    model, now = warmed([5.0, 13.0, 5.0, 9.0, 13.0, 5.0])
    settles_c = AMBIENT_C + RESISTANCE * 13.0
    assert model.reaches_in_s(settles_c - 2.0, 13.0, now) is not None
    assert model.reaches_in_s(settles_c + 2.0, 13.0, now) is None
    assert model.reaches_in_s(75.0, 5.0, now) is None
    assert model.reaches_in_s(AMBIENT_C, 5.0, now) == 0.0
    power_w, window_s = model.allowed(75.0, now) or (0.0, 0.0)
    assert model.reaches_in_s(75.0, power_w, now) == pytest.approx(window_s)


def test_a_draw_that_never_changes_foresees_nothing() -> None:
    model, now = warmed([5.0])
    assert model.allowed(75.0, now) is None
    assert model.reaches_in_s(75.0, 50.0, now) is None


def spent(energy: EnergyBudget, *, stated_wh: float | None, holds_wh: float, hours: float, busy_w: float = 0.0) -> None:
    """Discharge a battery at 5 W, and by half of the time at `busy_w` more, for 20 tokens a second."""
    left, made = holds_wh, 0
    for number in range(int(hours * 360)):
        jobs = int(bool(busy_w) and number % 2)
        power_w = 5.0 + busy_w * jobs
        left -= power_w * 10 / 3600
        made += 200 * jobs
        charge = None if number % 11 == 3 else left / holds_wh
        read = DeviceSignals(power_w=power_w, battery=charge, battery_wh=stated_wh, discharging=True)
        energy.sample(read, EngineWork(jobs, jobs, made), number * 10.0)


@pytest.mark.parametrize("stated_wh", [None, 100.0])
def test_a_battery_holds_what_it_gave_and_not_what_it_says(stated_wh: float | None) -> None:
    """Half of 60 Wh are left, of which 6 hours at 5 W need all, but for what the usual reserve is."""
    energy = budget('{battery: {until: "18:00", reserve: 0}}')
    spent(energy, stated_wh=stated_wh, holds_wh=60.0, hours=6.0)
    assert energy.current.wh_left == pytest.approx(0.0, abs=60.0 * 0.5 * 0.1)
    assert energy.current.token_wh is None


def test_a_token_costs_what_is_drawn_above_the_draw_without_work() -> None:
    energy = budget('{battery: {until: "18:00", radio_w: 2}}')
    spent(energy, stated_wh=None, holds_wh=60.0, hours=1.0, busy_w=8.0)
    assert energy.current.token_wh == pytest.approx(8.0 / 20 / 3600, rel=0.05)
    energy.answered([AttemptRecord("large", "cloud", "done", 0.0, duration_ms=1800.0)], 3600.0)
    energy.sample(DeviceSignals(power_w=5.0), EngineWork(), 3600.0)
    assert energy.current.cloud_wh == pytest.approx(0.001)


def test_a_watt_hour_has_a_price_while_they_are_short_and_none_on_the_charger() -> None:
    energy = budget('{battery: {until: "18:00", reserve: 0}}')
    for _ in range(500):
        energy.offer(Steps(0.0, ((7.0, 0.1),)))
    spent(energy, stated_wh=None, holds_wh=70.0, hours=6.0)
    assert (energy.current.price, energy.current.limit) == (7.0, "battery")
    energy.sample(DeviceSignals(battery=0.5, discharging=False), EngineWork(), 21_600.0)
    assert (energy.current.price, energy.current.wh_left) == (0.0, None)


def test_nothing_is_held_back_after_the_hour() -> None:
    energy = budget('{battery: {since: "02:00", until: "09:00"}}')
    spent(energy, stated_wh=60.0, holds_wh=60.0, hours=6.0)
    assert (energy.current.price, energy.current.wh_left) == (0.0, None)


def test_a_device_at_its_limit_has_the_highest_price() -> None:
    energy = budget("{heat: {margin_c: 2}}")
    for number, temperature_c in enumerate((82.0, 82.0, 84.0)):
        for second in range(60):
            read = DeviceSignals(temperature_c=temperature_c, power_w=9.0, throttles_c=85.0)
            energy.sample(read, EngineWork(), number * 60.0 + second)
        assert energy.current.price == (MAX_PRICE if temperature_c > 83.0 else 0.0)
    assert energy.current.limit == "heat"
    samples = {sample.name: sample.value for sample in energy.samples()}
    assert samples["causeway_edge_energy_price"] == MAX_PRICE


def test_a_device_without_a_limit_has_no_price_of_heat() -> None:
    energy = budget("{heat: {}}")
    for second in range(60):
        energy.sample(DeviceSignals(temperature_c=99.0, power_w=9.0), EngineWork(), float(second))
    assert energy.current.price == 0.0


async def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    spend = store(tmp_path)
    await spend.load()
    energy = budget('{battery: {until: "18:00"}}', spend)
    await energy.load()
    spent(energy, stated_wh=100.0, holds_wh=60.0, hours=4.0, busy_w=2.0)
    measured = energy.current.token_wh
    energy.save()
    await asyncio.to_thread(spend.close)
    again = store(tmp_path)
    assert await again.load()
    learned = await again.learned(ENERGY, EnergyState)
    assert learned.drawn_wh / learned.fallen == pytest.approx(60.0, rel=0.1)
    restarted = budget('{battery: {until: "18:00"}}', again)
    await restarted.load()
    spent(restarted, stated_wh=100.0, holds_wh=60.0, hours=0.05)
    assert restarted.current.token_wh == pytest.approx(measured)
    await asyncio.to_thread(again.close)


async def test_the_sample_of_the_start_erases_nothing(tmp_path: Path) -> None:
    """The daemon samples before it loads."""
    known = EnergyState(drawn_wh=100.0, fallen=1.0, excess_wh=3.0, tokens=5000.0)
    first = store(tmp_path)
    await first.load()
    first.remember(ENERGY, known)
    await asyncio.to_thread(first.close)
    for _ in range(3):
        spend = store(tmp_path)
        energy = budget('{battery: {until: "18:00"}}', spend)
        energy.sample(DeviceSignals(power_w=5.0), EngineWork(), 0.0)
        energy.save()  # as a start that fails does
        await spend.load()
        await energy.load()
        assert await spend.learned(ENERGY, EnergyState) == known
        await asyncio.to_thread(spend.close)


def test_tokens_made_without_a_budget_count_as_their_energy_does() -> None:
    energy = EnergyBudget(store())
    energy.use(parse_policy(FILE.replace("budget: BUDGET", "")))
    spent(energy, stated_wh=None, holds_wh=600.0, hours=1.0, busy_w=8.0)
    energy.use(policy("{heat: {}}"))
    energy.sample(DeviceSignals(power_w=5.0), EngineWork(tokens=36_000), 3600.0)
    assert energy.current.token_wh == pytest.approx(8.0 / 20 / 3600, rel=0.05)


def test_the_energy_of_embeddings_is_of_no_token() -> None:
    energy = budget("{heat: {}}")
    spent(energy, stated_wh=None, holds_wh=600.0, hours=1.0, busy_w=8.0)
    for second in range(3600):
        work = EngineWork(jobs=second % 2, tokens=36_000)
        energy.sample(DeviceSignals(power_w=5.0 + 8.0 * work.jobs), work, 3600.0 + second)
    assert energy.current.token_wh == pytest.approx(8.0 / 20 / 3600, rel=0.05)


def slept(*, counted: bool) -> float | None:
    """What is left after 1.5 hours at 5 W and, between them, 8 at 1 W, in which the monotonic clock may go on."""
    unix, now, left = [NOON - 9.5 * 3600.0], [0.0], [100.0]
    energy = budget('{battery: {until: "18:00"}}', store(unix=lambda: unix[0]))
    for second in range(5400):
        if second == 3600:
            unix[0], now[0], left[0] = unix[0] + 8 * 3600.0, now[0] + 8 * 3600.0 * counted, left[0] - 8.0
        unix[0], now[0], left[0] = unix[0] + 1.0, now[0] + 1.0, left[0] - 5.0 / 3600.0
        read = DeviceSignals(battery=left[0] / 100.0, battery_wh=100.0, power_w=5.0, discharging=True)
        energy.sample(read, EngineWork(), now[0])
    return energy.current.wh_left


def test_what_the_battery_loses_in_the_device_s_sleep_is_not_of_its_capacity() -> None:
    assert slept(counted=False) == pytest.approx(slept(counted=True), abs=0.1)


def test_a_charge_that_rises_by_its_noise_is_not_unknown() -> None:
    energy = budget('{battery: {until: "18:00"}}')
    for second in range(60):
        read = DeviceSignals(battery=0.7 + 1e-9 * second, battery_wh=100.0, power_w=5.0, discharging=True)
        energy.sample(read, EngineWork(), float(second))
    assert energy.current.wh_left is not None


def test_another_policy_s_energy_is_not_told() -> None:
    energy = budget("{heat: {}}")
    energy.use(parse_policy(FILE.replace("budget: BUDGET", "")))
    assert energy.current == EnergySignals()
    assert list(energy.samples()) == []


def test_a_simulated_battery_lasts_and_is_spent_better_than_in_the_order_of_arrival() -> None:
    (day,), (stopped,) = run(200, paced=True, days=1), run(200, paced=False, days=1)
    assert day.feasible
    assert day.lasted
    assert 0.95 * day.best <= day.value <= day.best
    assert day.value >= 1.2 * stopped.value


def test_a_simulated_device_whose_fan_fails_is_throttled_less() -> None:
    day, stopped = run(214, paced=True)[1], run(214, paced=False)[1]
    assert day.lasted
    assert day.throttled < 0.6 * stopped.throttled
