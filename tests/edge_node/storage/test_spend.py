"""Spending over restarts, kills and full disks."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.storage.shadow import ShadowStore
from causeway_server.edge_node.storage.spend import FILE, SpendStore
from causeway_server.models.semantic.judge import Findings
from causeway_server.models.signals import SHADOW_FILE
from tests.waiting import until

from ..device import POLICY, config, running
from ..scripted import ScriptedCloud
from ..test_app import daemon

BUDGET = POLICY.replace(
    "  - name: cloud-first",
    "  - name: broke\n    when: spend.usd_hour >= 100.0\n    use: [small]\n  - name: cloud-first",
)
BODY = {"model": "large", "messages": [{"role": "user", "content": "hi"}]}
NOW = 1_780_000_000.0
CLOCK = Clock(unix=lambda: NOW)


def stored(folder: Path) -> bool:
    """Whether a cost is in the file."""
    if not (folder / FILE).exists():
        return False
    with closing(sqlite3.connect(folder / FILE)) as database:
        return bool(database.execute("SELECT count(*) FROM spend").fetchone()[0])


@pytest.mark.slow
async def test_a_killed_daemon_forgets_no_cost(tmp_path: Path) -> None:
    """The cost of an answer is on disk without any further request, timer or shutdown."""
    cloud = await ScriptedCloud().start()
    settings = config(tmp_path, policy=BUDGET, cloud=cloud.url, server=ServerConfig(port=0))
    settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, enabled=False))
    async with daemon(tmp_path, settings) as (process, started), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{started.port}"
        async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
            assert response.status == 200
        await until(lambda: stored(tmp_path / "state"))
        process.kill()
        await process.wait()
    async with daemon(tmp_path, settings) as (_, started), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{started.port}"
        async with session.post(f"{url}/v1/route", json=BODY) as response:
            spend = (await response.json())["snapshot"]["spend"]
        assert spend["usd_hour"] == spend["usd_month"] == 0.01  # ten tokens at 1.0 USD per thousand
    await cloud.stop()


async def test_costs_that_arrive_during_a_write_are_kept(tmp_path: Path) -> None:
    """The background thread writes while the event loop adds costs."""
    store = SpendStore(tmp_path, CLOCK)
    await store.load()
    for _ in range(400):
        store.add(0.25)
        await asyncio.sleep(0)
    store.close()
    again = SpendStore(tmp_path, CLOCK)
    await again.load()
    assert again.current.usd_today == 100.0
    again.close()


async def test_a_lost_write_is_counted_and_made_good_by_the_next(tmp_path: Path) -> None:
    """The disk is full for one write; the file is opened again 30 s later."""
    now = [0.0]
    clock = Clock(unix=lambda: NOW, monotonic=lambda: now[0])
    store = SpendStore(tmp_path, clock)
    await store.load()
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.executescript("CREATE TRIGGER full BEFORE INSERT ON spend BEGIN SELECT RAISE(FAIL, 'disk full'); END;")
        store.add(1.0)
        await until(lambda: (stats := store.disk()) is not None and stats.lost_writes == 1)
        other.executescript("DROP TRIGGER full;")
    now[0] = 31.0
    store.add(2.0)
    store.close()
    again = SpendStore(tmp_path, clock)
    await again.load()
    assert again.current.usd_today == 3.0
    again.close()


async def test_a_folder_that_cannot_be_used_is_reported_and_spending_is_counted(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).mkdir()
    (tmp_path / "state" / f"{FILE}.bad").write_text("in the way")
    async with running(tmp_path, policy=BUDGET.replace("100.0", "0.01")) as device:
        assert (await device.ask(tags="cloud")).headers["x-causeway-target"] == "large"
        assert (await device.ask("again", tags="cloud")).headers["x-causeway-reason"] == "broke"
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_store_available{store="spend"} 0.0' in metrics


@pytest.mark.parametrize("left", ["not JSON", "[1]", b"\xff{}"], ids=["text", "another type", "bytes"])
async def test_spending_that_cannot_be_read_starts_at_0_and_is_counted_on(
    tmp_path: Path, left: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The next cost replaces what was damaged."""
    before = SpendStore(tmp_path, CLOCK)
    assert await before.load()
    before.add(5.0)
    before.close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute("UPDATE spend SET state = ?", (left,))
    store = SpendStore(tmp_path, CLOCK)
    assert not await store.load()
    assert f"earlier runs in {FILE} cannot be read, so it starts at 0" in caplog.text
    store.add(2.0)
    assert store.current.usd_today == 2.0
    store.close()
    again = SpendStore(tmp_path, CLOCK)
    assert await again.load()
    assert again.current.usd_today == 2.0
    again.close()


async def test_without_a_folder_nothing_is_loaded_and_spending_is_counted() -> None:
    store = SpendStore(None, CLOCK)
    assert not await store.load()
    store.add(2.0)
    assert store.current.usd_today == 2.0
    store.close()


@pytest.mark.parametrize("left", ["not JSON", "[1]"])
async def test_results_of_shadow_requests_that_cannot_be_read_leave_their_costs(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The budget of the day holds on; new results replace the damaged ones."""
    before = ShadowStore(tmp_path, CLOCK)
    assert await before.restore(1) == []
    before.add(5.0)
    before.keep_findings(Findings("judge", 1.0, 1, [100.0]))
    before.close()
    with closing(sqlite3.connect(tmp_path / SHADOW_FILE)) as database, database:
        database.execute("UPDATE semantic SET findings = ?", (left,))
    store = ShadowStore(tmp_path, CLOCK)
    assert await store.restore(1) == []
    assert "results of earlier shadow requests cannot be read" in caplog.text
    assert (store.usd_today, store.earlier_findings) == (5.0, None)
    store.keep_findings(Findings("judge", 2.0, 2, [200.0]))
    store.close()
    again = ShadowStore(tmp_path, CLOCK)
    await again.restore(1)
    assert again.earlier_findings == Findings("judge", 2.0, 2, [200.0])
    again.close()
