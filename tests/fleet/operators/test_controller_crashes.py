"""The controller is killed at every effect and continues; restored backups, two controllers, a database away."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.fleet.controller.loop import Controller
from causeway_server.fleet.controller.publisher import Publisher
from causeway_server.fleet.rollout.settings import RolloutEvent
from causeway_server.fleet.store.audit import read_audit
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.devices import write_reports
from causeway_server.fleet.store.generations import read_generations
from causeway_server.fleet.store.rollouts import change_rollout, read_looks
from causeway_server.router.bundle.manifest import WHOLE, RolloutPlan
from tests.fleet.server.postgres import PostgresServer

from .bed import Bed

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """A kill: nothing of the process runs after this exception."""


class Fate:
    """Kills at one effect, before it or after it."""

    def __init__(self, at: int = -1, *, after: bool = False) -> None:
        self.effects = 0
        self._at = at
        self._after = after

    def begin(self) -> None:
        self.effects += 1
        if self.effects == self._at and not self._after:
            raise Killed

    def done(self) -> None:
        if self.effects == self._at and self._after:
            raise Killed


class MortalStore(Store):
    """A killed process's transaction is either not committed, or committed and nothing follows."""

    fate = Fate()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        async with super().write() as connection:
            yield connection
            self.fate.begin()
        self.fate.done()


class MortalPublisher(Publisher):
    fate = Fate()

    def publish(self, plans: Mapping[str, RolloutPlan], now: float, min_version: int = 0) -> tuple[str, ...]:
        before = self.published()
        is_due = before | dict(plans) != before
        if is_due:
            self.fate.begin()
        done = super().publish(plans, now, min_version)
        if is_due:
            self.fate.done()
        return done


async def life(bed: Bed, fate: Fate, bundle: str) -> bool:
    """One controller's life until the rollout is DONE, then aborted and REVERTED; whether it lived to see that."""
    store = await MortalStore.open(bed.url)
    assert isinstance(store, MortalStore)
    helper = await Store.open(bed.url)
    publisher = MortalPublisher(bed.signed.path, bed.signed.path / "keys")
    store.fate = publisher.fate = fate
    controller = bed.controller(store, publisher)
    try:
        await bed.until(helper, controller, "r2", "done", "aborted", "reverting", "reverted")
        if (await bed.rollout(helper, "r2")).state == "done":
            assert {device.running for device in await bed.devices(helper)} == {bundle}
            await bed.decide(helper, "r2", RolloutEvent.ABORT)
        await bed.until(helper, controller, "r2", "reverted")
        return True
    except Killed:
        return False
    finally:
        await store.close()
        await helper.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_every_effect_twice_it_continues(tmp_path: Path, after: bool) -> None:
    """Lives end at their first and at their second effect by turns: each effect is the last one of some controller."""
    bed = Bed(tmp_path)
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, bed.controller(store), "r1", "done")
        second = bed.new_policy("second")
        await bed.begin(store, "r2", second, first)
    bed.shares.clear()
    lives = 0
    while not await life(bed, Fate(at=1 + lives % 2, after=after), second):
        lives += 1
        assert lives < 400
    assert lives > 12
    async with bed.store() as store:
        assert {device.running for device in await bed.devices(store)} == {first}
        ramp = bed.shares[: bed.shares.index(WHOLE) + 1]
        assert ramp[1:] == sorted(ramp[1:]), "no device was moved back while the rollout went on"
        assert bed.shares[-1] == 0
        async with store.read() as connection:
            actions = [row.action for row in await read_audit(connection) if b'"r2"' in bytes(row.what)]
            looks = await read_looks(connection, "r2")
            told = await read_generations(connection)
        for once in ("replay", "soak", "reverting", "reverted"):
            assert actions.count(f"rollout.{once}") == 1
        assert [one.at for one in looks] == sorted({one.at for one in looks})
        plan = bed.publisher().published()["kiosk"]
        assert told["kiosk"].pace.plan
        assert told["kiosk"].pace.reverting == (plan.share == 0)


async def test_an_interrupted_publication_goes_on(tmp_path: Path) -> None:
    """Killed between the rollout's metadata and the timestamp: devices see nothing of it until the next controller."""
    bed = Bed(tmp_path)
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 4)
        await bed.begin(store, "r1", first, None)
        await bed.turn(store, bed.controller(store))
        metadata = bed.signed.published.path / "tuf" / "metadata"
        shutil.copytree(metadata, tmp_path / "before")
        await bed.decide(store, "r1", RolloutEvent.ABORT)
        await bed.turn(store, bed.controller(store))
        for path in metadata.glob("*.snapshot.json"):
            if not (tmp_path / "before" / path.name).exists():
                path.unlink()
        shutil.copy(tmp_path / "before" / "timestamp.json", metadata / "timestamp.json")
        await bed.turn(store, bed.controller(store))
        snapshot, rollout = bed.signed.published.snapshot(), bed.signed.published.targets("rollout")
        assert snapshot is not None
        assert rollout is not None
        assert snapshot.signed.meta["rollout.json"].version == rollout.signed.version


async def test_a_database_from_before_a_stage_takes_over_what_devices_have(tmp_path: Path) -> None:
    """The backup says stage 1, the published files stage 2: it pauses there, moves no device back, and goes on if
    told."""
    bed = Bed(tmp_path)
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 8)
        await bed.begin(store, "r1", first, None)
        await bed.turn(store, bed.controller(store))
        backup = bed.back_up()
        controller = bed.controller(store)
        while (await bed.rollout(store, "r1")).stage < 1:
            await bed.turn(store, controller)
            if (await bed.rollout(store, "r1")).state == "paused":
                await bed.decide(store, "r1", RolloutEvent.ACCEPT)
        share = (await bed.rollout(store, "r1")).share
        await bed.turn(store, controller, 2)
    bed.restore(backup)
    async with bed.store() as store:
        controller = bed.controller(store)
        await bed.turn(store, controller, 2)
        rollout = await bed.rollout(store, "r1")
        assert (rollout.state, rollout.share, rollout.stage) == ("paused", share, 1)
        assert bed.publisher().published()["kiosk"].share == share
        await bed.decide(store, "r1", RolloutEvent.RESUME)
        await bed.until(store, controller, "r1", "done")


async def test_a_database_from_before_a_rollout_recovers_it_from_what_is_published(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 8)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, bed.controller(store), "r1", "done")
        backup = bed.back_up()
        second = bed.new_policy("second")
        await bed.begin(store, "r2", second, first)
        await bed.turn(store, bed.controller(store), 3)
    bed.restore(backup)
    async with bed.store() as store:
        await bed.turn(store, bed.controller(store), 2)
        rollout = await bed.rollout(store, "r2")
        assert (rollout.state, rollout.to_bundle, rollout.from_bundle) == ("paused", second, first)
        assert bed.publisher().published()["kiosk"].rollout == "r2"
        async with store.read() as connection:
            assert (await read_audit(connection))[-1].action == "rollout.recovered"


async def test_database_and_files_from_an_hour_ago_publish_nothing_until_told(tmp_path: Path) -> None:
    """The devices are ahead of everything: they are recognised, and the next publication is newer than what they
    saw."""
    bed = Bed(tmp_path)
    first = bed.release()
    folder = bed.signed.path / "published"
    async with bed.store() as store:
        await bed.enrol(store, 8)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, bed.controller(store), "r1", "done")
        backup = bed.back_up()
        shutil.copytree(folder, tmp_path / "files")
        second = bed.new_policy("second")
        await bed.begin(store, "r2", second, first)
        await bed.turn(store, bed.controller(store), 3)
        seen = bed.signed.published.timestamp_version()
        reports = await bed.devices(store)
    bed.restore(backup)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "files", folder)
    async with bed.store() as store:
        async with store.write() as connection:
            await write_reports(connection, [msgspec.structs.replace(one, last_seen=bed.now) for one in reports], ())
        controller = bed.controller(store)
        before = bed.signed.published.timestamp_version()
        bed.now += 5 * 86_400 - 75  # even what expires is not renewed
        async with store.write() as connection:
            await write_reports(connection, [msgspec.structs.replace(one, last_seen=bed.now) for one in reports], ())
        while await controller.tick():
            pass
        assert controller.ahead == {"kiosk": 8}
        assert "devices are ahead of the control plane (8 of kiosk)" in controller.problems[0]
        assert bed.signed.published.timestamp_version() == before
        record = await bed.record(store, "r1")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, acknowledged=frozenset({"r2"})))
        controller.notify()
        await controller.tick()
        assert controller.problems == ()
        assert bed.signed.published.timestamp_version() > seen


async def test_only_one_of_two_controllers_works_and_the_other_takes_over(tmp_path: Path, database: str) -> None:
    bed = Bed(tmp_path, database)
    bed.release()
    async with bed.store() as store, bed.store() as other:
        one, two = bed.controller(store), bed.controller(other)
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def first() -> None:
                with scope:
                    await one.run()

            tasks.start_soon(first)
            await reached(lambda: one.leads)
            tasks.start_soon(two.run)
            await anyio.sleep(0.2)
            assert not two.leads
            scope.cancel()
            await reached(lambda: two.leads)
            assert not one.leads
            tasks.cancel_scope.cancel()


@pytest.mark.postgres
async def test_a_database_that_goes_away_pauses_the_controller(tmp_path: Path, postgres: PostgresServer) -> None:
    bed = Bed(tmp_path, postgres.database())
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 4)
        controller = Controller(store, bed.signed.path, bed.publisher(), lambda: bed.now, interval_s=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.run)
            await reached(lambda: controller.leads)
            with postgres.away():
                await reached(lambda: not controller.leads)
            await reached(lambda: controller.leads)
            await bed.begin(store, "r1", first, None)
            controller.notify()
            await reached(lambda: "kiosk" in bed.publisher().published())
            tasks.cancel_scope.cancel()


async def reached(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.02)
