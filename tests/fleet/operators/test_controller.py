"""The controller over a real store and really signed plans, with devices that follow them, and time as an argument."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import msgspec
import pytest

from causeway_server.fleet.controller import checks
from causeway_server.fleet.controller.checks import lint_bundle
from causeway_server.fleet.controller.loop import Controller
from causeway_server.fleet.rollout.settings import RolloutEvent
from causeway_server.fleet.store.audit import read_audit
from causeway_server.fleet.store.database import Still, Store, StoreUnavailable
from causeway_server.fleet.store.devices import set_operator_columns
from causeway_server.fleet.store.generations import read_generations
from causeway_server.fleet.store.history import first_fault
from causeway_server.fleet.store.rollouts import change_rollout, read_looks
from causeway_server.router.bundle.manifest import WHOLE
from causeway_server.router.types import Outcome
from tests.fleet.cli.test_replay import CLOUD, records
from tests.fleet.cli.test_replay import write as write_records
from tests.fleet.repository.fleets import edit

from .bed import START, Bed

pytestmark = pytest.mark.slow

PUBLIC = CLOUD.replace('"private" in', '"secret" in')
CASES = """\
policy: ../kiosk.yaml
cases:
  - name: the cloud answers
    expect: {route: cloud, targets: [large, small]}
"""


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


async def test_the_first_bundle_reaches_every_device(tmp_path: Path, database: str) -> None:
    """From an enrolled fleet to DONE, by the stages, with an audit row for each and a chain that holds."""
    bed = Bed(tmp_path, database)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 20)
        controller = bed.controller(store)
        await bed.turn(store, controller)
        await bed.begin(store, "r1", bundle, None)
        done = await bed.until(store, controller, "r1", "done")
        assert done.share == WHOLE
        assert {device.running for device in await bed.devices(store)} == {bundle}
        assert bed.shares == sorted(bed.shares)
        assert bed.shares[-1] == WHOLE
        async with store.read() as connection:
            rows = await read_audit(connection)
            looks = await read_looks(connection, "r1")
            told = await read_generations(connection)
        assert [row.action for row in rows] == [
            *("rollout.replay", "rollout.stage", "rollout.stage", "rollout.stage", "rollout.soak", "rollout.done")
        ]
        assert first_fault(rows) == ""
        assert len(looks) >= 4
        assert told["kiosk"].counter == len(bed.shares)


async def test_a_bad_bundle_is_stopped_at_its_first_stages_and_undone(bed: Bed) -> None:
    good = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 60)
        controller = bed.controller(store)
        await bed.begin(store, "r1", good, None)
        await bed.until(store, controller, "r1", "done")
        bad = bed.new_policy("bad")
        bed.errors[bad] = 40
        await bed.begin(store, "r2", bad, good)
        ended = await bed.until(store, controller, "r2", "reverted")
        assert "errors: 40.00%" in ended.reason
        assert {device.running for device in await bed.devices(store)} == {good}
        assert max(bed.shares[bed.shares.index(WHOLE) + 1 :]) <= 50_000


async def test_a_model_that_half_the_cohort_cannot_hold_is_undone(bed: Bed) -> None:
    """Those devices refuse it in their dry run and never ran it; the other half returns."""
    good = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 24)
        controller = bed.controller(store)
        await bed.begin(store, "r1", good, None)
        await bed.until(store, controller, "r1", "done")
        large = bed.new_policy("large")
        bed.unfit[large] = {f"device-{index}" for index in range(0, 24, 2)}
        await bed.begin(store, "r2", large, good)
        ended = await bed.until(store, controller, "r2", "reverted")
        assert "devices rolled back" in ended.reason
        assert {device.running for device in await bed.devices(store)} == {good}
        assert max(bed.shares[bed.shares.index(WHOLE) + 1 :]) <= 50_000


async def test_a_device_that_is_off_does_not_hold_up_a_revert(bed: Bed) -> None:
    good = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 12)
        controller = bed.controller(store)
        await bed.begin(store, "r1", good, None)
        await bed.until(store, controller, "r1", "done")
        other = bed.new_policy("other")
        await bed.begin(store, "r2", other, good)
        while {device.running for device in await bed.devices(store)} == {good}:
            await bed.turn(store, controller)
        member = next(device.id for device in await bed.devices(store) if device.running == other)
        bed.off.add(member)
        await bed.decide(store, "r2", RolloutEvent.ABORT)
        assert (await bed.until(store, controller, "r2", "reverted")).share == 0
        bed.off.clear()
        await bed.turn(store, controller, 2)
        assert {device.running for device in await bed.devices(store)} == {good}


async def test_what_expires_is_renewed_and_new_signatures_become_visible(bed: Bed) -> None:
    """For weeks without a rollout; a bundle that people sign is named by the next snapshot without a command."""
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 3)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        await bed.until(store, controller, "r1", "done")
        for _ in range(20):
            bed.now += 12 * 3600
            await bed.turn(store, controller)
            timestamp = bed.signed.published.timestamp()
            assert timestamp is not None
            assert timestamp.signed.expires > datetime.fromtimestamp(bed.now, UTC) + timedelta(hours=12)
        version = bed.signed.published.timestamp_version()
        await bed.turn(store, controller, 3)
        assert bed.signed.published.timestamp_version() == version, "nothing is signed without need"
        bed.new_policy("next")
        await bed.turn(store, controller)
        snapshot, artifacts = bed.signed.published.snapshot(), bed.signed.published.targets("targets")
        assert snapshot is not None
        assert artifacts is not None
        assert snapshot.signed.meta["targets.json"].version == artifacts.signed.version
        assert bed.now > START + 20 * 12 * 3600


async def test_a_bundle_that_fails_its_checks_goes_back_to_its_author(bed: Bed) -> None:
    bundle = bed.release()
    policy = bed.publisher().manifest(bundle)
    assert policy is not None
    bed.publisher().blob(policy.models[0].blob.sha256).unlink()
    async with bed.store() as store:
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        draft = await bed.until(store, controller, "r1", "draft")
        assert "upload it" in draft.reason
        assert bed.publisher().published() == {}


async def test_without_the_online_key_it_says_so_and_goes_on_when_it_is_there(bed: Bed) -> None:
    bundle = bed.release()
    key = bed.signed.path / "keys" / "server.pem"
    hidden = key.rename(key.with_suffix(".away"))
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        await bed.turn(store, controller)
        assert "needs one of these private keys: server" in controller.problems[0]
        hidden.rename(key)
        await bed.turn(store, controller)
        assert controller.problems == ()
        assert bed.publisher().published()["kiosk"].rollout == "r1"


async def test_pins_and_holds_reach_the_plan(bed: Bed) -> None:
    """A pin to a bundle that is not signed any longer holds its device, and stops no other."""
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 4)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        await bed.turn(store, controller)
        async with store.write() as connection:
            await set_operator_columns(connection, "device-0", held=True)
            await set_operator_columns(connection, "device-1", pin=bundle)
            await set_operator_columns(connection, "device-2", pin="f" * 64)
        controller.notify()
        await bed.turn(store, controller)
        plan = bed.publisher().published()["kiosk"]
        assert (plan.pins, plan.holds) == ({"device-1": bundle}, frozenset({"device-0", "device-2"}))
        assert controller.problems == ()


@pytest.mark.parametrize(("model", "problems"), [("assistant+night", 0), ("assistant+day", 1)])
def test_cases_know_the_adapters_of_the_bundle(bed: Bed, model: str, problems: int) -> None:
    """As the devices do that would refuse it."""
    folder = bed.signed.path
    edit(folder / "fleet.yaml", "golden:", "adapters: {night: {file: models/assistant.gguf}}\n        golden:")
    edit(folder / "policies" / "cases" / "kiosk.yaml", "expect:", f"request: {{model: {model}}}\n    expect:")
    edit(folder / "policies" / "cases" / "kiosk.yaml", "route: device, targets: [small]", "targets: [small+night]")
    bundle = bed.release()
    assert len(lint_bundle(bed.publisher(), "kiosk", bundle)) == problems


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "an approver allows it"])
async def test_a_policy_that_sends_recorded_private_requests_away_stops_before_any_device(
    bed: Bed, allow: bool
) -> None:
    folder = bed.signed.path
    (folder / "policies" / "kiosk.yaml").write_text(PUBLIC)
    (folder / "policies" / "cases" / "kiosk.yaml").write_text(CASES)
    (folder / "records" / "kiosk").mkdir(parents=True)
    write_records(folder / "records" / "kiosk" / "device-1.jsonl", records())
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        record = await bed.record(store, "r1")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, allow_leaving=allow))
        ended = await bed.until(store, controller, "r1", "draft", "stage")
        assert ended.state == ("stage" if allow else "draft")
        if not allow:
            assert "5 of 5 recorded requests stayed on the device and would or may leave it" in ended.reason
            assert bed.publisher().published() == {}


LEAKING = """
version: 1
name: kiosk
targets: {small: {at: edge, model: assistant}, large: {at: cloud, model: large}}
constraints: [{name: private-stays, keep: on_device, when: '"private" in request.tags && device.battery > 0.5'}]
routes: [{name: device, use: [small, large]}]
claims: [{name: promise, when: '"private" in request.tags', holds: '!outcome.leaves'}]
"""
UNPROVABLE = LEAKING.replace(" && device.battery > 0.5", "").replace(
    "!outcome.leaves'}", '!outcome.leaves && request.tags.map(t, t + "x") != ["ax"]\'}'
)
CASES_OF_LEAKING = "policy: ../kiosk.yaml\ncases: [{name: plain, expect: {route: device}}]\n"


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "an approver allows more to leave"])
async def test_a_policy_that_breaks_its_claim_stops_by_name_before_any_device(bed: Bed, allow: bool) -> None:
    (bed.signed.path / "policies" / "kiosk.yaml").write_text(LEAKING)
    (bed.signed.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES_OF_LEAKING)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        record = await bed.record(store, "r1")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, allow_leaving=allow))
        ended = await bed.until(store, controller, "r1", "draft", "stage")
        assert (ended.state, "promise is refuted" in ended.reason) == ("draft", True)
        assert ("tag-private is refuted" in ended.reason) != allow
        assert bed.publisher().published() == {}


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "an approver allows more to leave"])
async def test_a_policy_that_lets_more_leave_than_the_one_before_stops(bed: Bed, allow: bool) -> None:
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, controller, "r1", "done")
        free = "\n".join(line for line in LEAKING.splitlines() if not line.startswith(("constraints", "claims")))
        (bed.signed.path / "policies" / "kiosk.yaml").write_text(free)
        (bed.signed.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES_OF_LEAKING)
        await bed.begin(store, "r2", bed.release(), first)
        record = await bed.record(store, "r2")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, allow_leaving=allow))
        ended = await bed.until(store, controller, "r2", "draft", "stage")
        assert ended.state == ("stage" if allow else "draft")
        assert ("leaves-no-more is refuted" in ended.reason) != allow


async def test_an_undecided_proof_pauses_until_an_approver_accepts(bed: Bed) -> None:
    """Also where no replay is needed: that permission says nothing about proofs."""
    (bed.signed.path / "policies" / "kiosk.yaml").write_text(UNPROVABLE)
    (bed.signed.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES_OF_LEAKING)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None, without_replay=True)
        paused = await bed.until(store, controller, "r1", "paused", "draft", "stage")
        assert (paused.state, "not proved: promise (it depends on" in paused.reason) == ("paused", True)
        assert bed.publisher().published() == {}
        await bed.decide(store, "r1", RolloutEvent.ACCEPT)
        await bed.turn(store, controller)
        assert (await bed.rollout(store, "r1")).state == "stage"


async def test_records_count_although_a_proof_is_undecided(bed: Bed) -> None:
    """An approver who accepts the proof would otherwise accept what the records show, too."""
    (bed.signed.path / "policies" / "kiosk.yaml").write_text(UNPROVABLE.replace("[small, large]", "[large]"))
    (bed.signed.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES_OF_LEAKING)
    folder = bed.signed.path / "records" / "kiosk"
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / "device-1.jsonl", records())
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None, without_replay=False)
        ended = await bed.until(store, controller, "r1", "paused", "draft", "stage")
        assert (ended.state, "recorded requests stayed on the device" in ended.reason) == ("draft", True)


async def test_a_solver_that_fails_pauses_its_own_rollout(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(checks, "prove", fail)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        paused = await bed.until(store, controller, "r1", "paused", "draft", "stage")
        assert (paused.state, "the proof failed (RecursionError)" in paused.reason) == ("paused", True)


@pytest.mark.parametrize("files", ["no folder", "no files", "no lines", "unreadable", "undecided"])
async def test_a_replay_without_records_pauses_and_goes_on_when_they_are_there(bed: Bed, files: str) -> None:
    """Nothing is published meanwhile. With records the same policy passes."""
    folder = bed.signed.path / "records" / "kiosk"
    _write_useless_records(folder, files)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None, without_replay=False)
        await bed.turn(store, controller, 3)
        paused = await bed.rollout(store, "r1")
        assert (paused.state, paused.began) == ("paused", 0.0)
        assert "0 recorded requests of 0 devices over" in paused.reason
        assert ("1 lines cannot be read" in paused.reason) == (files == "unreadable")
        assert bed.publisher().published() == {}
        folder.mkdir(parents=True, exist_ok=True)
        write_records(folder / "device-2.jsonl", records())
        await bed.decide(store, "r1", RolloutEvent.RESUME)
        await bed.turn(store, controller)
        assert (await bed.rollout(store, "r1")).state == "stage"


def _write_useless_records(folder: Path, files: str) -> None:
    if files == "no folder":
        return
    folder.mkdir(parents=True)
    if files == "no files":
        (folder / "README.md").write_text("records come here")
    elif files in ("no lines", "unreadable"):
        (folder / "device-1.jsonl").write_text("" if files == "no lines" else "not a record\n")
    else:
        outcome = Outcome("rejected", 429, "none", error="rate_limit_exceeded")
        write_records(
            folder / "device-1.jsonl", [msgspec.structs.replace(records()[0], decision=None, outcome=outcome)]
        )


async def test_the_policy_that_the_devices_run_needs_no_replay(bed: Bed) -> None:
    """A bundle that changes only a setting, or the bundle before, waits for no records."""
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 2)
        controller = bed.controller(store)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, controller, "r1", "done")
        edit(bed.signed.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 3")
        await bed.begin(store, "r2", bed.release(), first, without_replay=False)
        await bed.turn(store, controller)
        assert (await bed.rollout(store, "r2")).state == "stage"


async def test_records_that_are_there_are_replayed_also_without_replay(bed: Bed) -> None:
    """The permission is for a fleet without records, not for a policy that sends requests away."""
    folder = bed.signed.path
    (folder / "policies" / "kiosk.yaml").write_text(PUBLIC)
    (folder / "policies" / "cases" / "kiosk.yaml").write_text(CASES)
    (folder / "records" / "kiosk").mkdir(parents=True)
    write_records(folder / "records" / "kiosk" / "device-1.jsonl", records())
    bundle = bed.release()
    async with bed.store() as store:
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None, without_replay=True)
        assert "would or may leave" in (await bed.until(store, controller, "r1", "draft")).reason


async def test_a_clock_that_jumps_back_stops_nothing_and_undoes_nothing(bed: Bed) -> None:
    """An hour back in the middle of a stage: no share shrinks, and the rollout ends."""
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        await bed.turn(store, controller, 4)
        bed.now -= 3600
        await bed.until(store, controller, "r1", "done")
        assert bed.shares == sorted(bed.shares)


async def test_a_database_that_is_away_is_a_problem_until_it_is_back(bed: Bed) -> None:
    """A full disk can still be read: `status` and the metric say that nothing goes on."""
    bed.release()
    async with bed.store() as store:
        full = FullDisk(store)
        controller = Controller(cast("Store", full), bed.signed.path, bed.publisher(), lambda: bed.now, interval_s=0.01)
        running = asyncio.create_task(controller.run())
        async with asyncio.timeout(240.0):  # only a hung test reaches it
            while not controller.problems:  # noqa: ASYNC110 -- the controller has no event for it
                await asyncio.sleep(0.01)
            assert controller.problems == ("the controller pauses: database or disk is full",)
            full.is_full = False
            while controller.problems:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert controller.leads
        running.cancel()


class FullDisk:
    """A store whose disk is full."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_full = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    @asynccontextmanager
    async def leadership(self) -> AsyncIterator[Still | None]:
        async with self._store.leadership() as still:
            if self.is_full:
                raise StoreUnavailable("database or disk is full")
            yield still


async def test_a_rollout_whose_row_cannot_be_read_pauses_by_name_until_it_can(bed: Bed) -> None:
    """A row of a newer version, after a downgrade; nothing else is published for its cohort meanwhile."""
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 5)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        readable = await body_of(store, "{}")
        assert not await controller.tick()
        (problem,) = controller.problems
        assert problem.startswith("The cohort kiosk pauses, because the row of its rollout r1")
        assert bed.publisher().published() == {}
        await body_of(store, readable)
        async with store.write() as connection:
            await connection.exec_driver_sql("UPDATE devices SET quarantined_json = 'no list' WHERE id = 'device-0'")
        await bed.until(store, controller, "r1", "done")
        assert controller.problems == ()


async def body_of(store: Store, body: str) -> str:
    """Replace the body of the only rollout; return what it was."""
    async with store.write() as connection:
        (row,) = (await connection.exec_driver_sql("SELECT body_json FROM rollouts")).all()
        await connection.exec_driver_sql("UPDATE rollouts SET body_json = ?", (body,))
    return str(row[0])
