"""A policy's budget in a whole daemon. An answer of the cloud has 8 or 10 tokens, at 0.001 USD each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from causeway_server.edge_node.backends.backend import EngineWork
from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.storage.spend import ENERGY, SpendStore
from causeway_server.router.decision.candidates import MOST_TOKENS
from causeway_server.router.decision.pacing import MAX_PRICE, EnergyState, Steps
from causeway_server.router.types import DeviceSignals
from tests.waiting import until

from ..device import POLICY, Answer, Device, running
from .test_shadow import metrics

BUDGET_USD, DAY_S = 0.25, 86_400
PACED = f"{POLICY}budget: {{usd_per_day: {BUDGET_USD}}}\n"


async def ask(device: Device, **body: Any) -> Answer:
    return await device.ask(tags="cloud", **{"temperature": 0.7, "max_tokens": 8, **body})


def clock_at(now: list[float]) -> Clock:
    return Clock(monotonic=system_clock().monotonic, unix=lambda: now[0])


def spent(device: Device) -> float:
    return device.parts.spend.current.usd_today or 0.0


async def test_a_budget_is_not_overrun_and_the_device_goes_on(tmp_path: Path) -> None:
    """Whole and streamed answers at once: what they may cost is held back meanwhile."""
    now = [1_780_000_000.0]
    async with running(tmp_path, policy=PACED, clock=clock_at(now)) as device:
        for _ in range(12):
            answers = await asyncio.gather(*[ask(device, stream=number % 2 == 0) for number in range(8)])
            assert {answer.status for answer in answers} == {200}
            assert spent(device) <= BUDGET_USD
        assert spent(device) > BUDGET_USD / 2
        await ask(device)
        record = device.newest()
        assert record.outcome.route == "edge"
        assert record.decision is not None
        assert "budget_excluded" in [one.code for one in record.decision.reasons]
        assert 0.0 <= (record.snapshot.spend.usd_left or -1.0) < BUDGET_USD
        assert abs(device.parts.spend.reserved_usd) < 1e-12
        named = await ask(device, model="large")
        assert named.status == 503
        assert "budget" in named.message
        now[0] += DAY_S
        device.parts.spend.refresh()
        assert (await ask(device)).status == 200
        assert device.newest().outcome.route == "cloud"
        device.assert_nothing_leaks()


async def test_a_client_that_leaves_gives_its_share_back(tmp_path: Path) -> None:
    async with running(tmp_path, policy=PACED) as device:
        device.cloud.fault = "stall"
        task = asyncio.ensure_future(ask(device))
        await until(lambda: device.parts.spend.reserved_usd > 0.0)
        assert device.parts.spend.paced(BUDGET_USD).usd_left == BUDGET_USD - device.parts.spend.reserved_usd
        task.cancel()
        await until(lambda: abs(device.parts.spend.reserved_usd) < 1e-12)
        device.cloud.fault = "none"


async def test_the_usual_day_survives_a_restart(tmp_path: Path) -> None:
    clock = Clock(unix=lambda: 1_780_000_000.0)
    store = SpendStore(tmp_path, clock)
    await store.load()
    for _ in range(100):
        store.offer(Steps(0.0, ((50.0, 0.01),)))
    price = store.paced(0.1).price
    await asyncio.to_thread(store.close)
    again = SpendStore(tmp_path, clock)
    assert await again.load()
    assert again.paced(0.1).price == price == 50.0
    assert msgspec.structs.replace(again.paced(0.1), usd_left=None, price=None) == again.current
    await asyncio.to_thread(again.close)


async def test_an_answer_without_a_limit_gets_the_one_that_was_counted(tmp_path: Path) -> None:
    dear = POLICY + "budget: {usd_per_day: 100}\n"
    async with running(tmp_path, policy=dear) as device:
        assert (await device.ask(tags="cloud", temperature=0.7)).status == 200
        assert device.cloud.bodies[-1]["max_tokens"] == MOST_TOKENS
        assert (await ask(device)).status == 200
        assert device.cloud.bodies[-1]["max_tokens"] == 8


async def test_another_budget_has_another_price_at_once() -> None:
    store = SpendStore(None, Clock(unix=lambda: 1_780_000_000.0))
    for _ in range(100):
        store.offer(Steps(0.0, ((50.0, 0.01),)))
    assert [store.paced(budget).price for budget in (0.1, 100.0, 0.1)] == [50.0, 0.0, 50.0]


async def test_what_is_held_back_for_now_moves_no_price() -> None:
    store = SpendStore(None, Clock(unix=lambda: 1_780_000_000.0))
    for _ in range(100):
        store.offer(Steps(0.0, ((50.0, 0.01),)))
    free = store.paced(100.0)
    store.reserved_usd = 100.0
    held = store.paced(100.0)
    assert (held.price, held.usd_left) == (free.price, 0.0)


async def test_what_was_learned_of_energy_is_written_at_the_end_and_not_erased_at_the_start(tmp_path: Path) -> None:
    heated, offered = POLICY + "budget: {heat: {limit_c: 80}}\n", Steps(0.0, ((7.0, 0.1),))
    async with running(tmp_path, policy=heated) as device:
        device.parts.signals.energy.offer(offered)
    for _ in range(2):
        async with running(tmp_path, policy=heated) as device:
            learned = await device.parts.spend.learned(ENERGY, EnergyState)
            assert learned.demand.recent == (offered,)


async def test_a_hot_device_pays_for_its_work_and_says_so(tmp_path: Path) -> None:
    heated = POLICY + "budget: {heat: {limit_c: 80}}\n"
    async with running(tmp_path, policy=heated) as device:
        signals = device.parts.signals
        hot = DeviceSignals(temperature_c=81.0, power_w=9.0)
        for second in range(20):
            signals.energy.sample(hot, EngineWork(), signals.clock.monotonic() + second)
        assert (await ask(device)).status == 200
        told = device.newest().snapshot.energy
        assert told is not None
        assert (told.price, told.limit) == (MAX_PRICE, "heat")
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_energy_price") == {'{limit="heat"}': MAX_PRICE}
