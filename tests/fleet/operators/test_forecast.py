"""The prediction of a rollout from stored records, and beside it what the devices with the new bundle have shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.fleet.cli.rollout_output import detail_lines
from causeway_server.fleet.controller.forecast import Evidence, happened, read_evidence
from causeway_server.fleet.operators.answers import RolloutDetail
from causeway_server.fleet.operators.routes import rollout_detail
from causeway_server.fleet.rollout.prediction import Prediction
from causeway_server.fleet.rollout.settings import RolloutEvent
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.generations import read_generations
from causeway_server.fleet.store.records import add_labels, add_records
from causeway_server.fleet.store.rollouts import change_rollout
from causeway_server.fleet.store.tables import COUNTERS
from causeway_server.fleet.store.telemetry import add_samples
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S, UNMEASURED, SampledRecord, TelemetrySample
from tests.fleet.cli.test_replay import OLD, records
from tests.fleet.repository.fleets import edit

from .bed import Bed

pytestmark = pytest.mark.slow


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


async def send(store: Store, bundle: str, *, own_bad: int = 2, on_device: int = 100, usd: int = 0) -> None:
    """Let six devices send ten public records each, their counters and twenty labels of their own answers."""
    async with store.write() as connection:
        for number in range(6):
            name = f"device-{number}"
            sent = [
                (name, SampledRecord(weight=10.0, record=msgspec.Raw(msgspec.json.encode(one))))
                for one in records(10, private=0, first=10 * number)
            ]
            sample = TelemetrySample(
                bundle, 0.0, 60.0, 100, 0, 0, (100, *(0 for _ in LATENCY_BOUNDS_S)), on_device, 0, 20, usd,
                {UNMEASURED: (20 - own_bad, own_bad, 20 - own_bad, own_bad)},
            )  # fmt: skip
            await add_records(connection, sent, 1000.0)
            await add_samples(connection, [(name, sample)], 1000.0)
            await add_labels(connection, [(name, sample)], 1000.0)


def use_policy(bed: Bed, text: str) -> None:
    (bed.signed.path / "policies" / "kiosk.yaml").write_text(text)
    case = "policy: ../kiosk.yaml\ncases:\n  - {name: answers, expect: {}}\n"
    (bed.signed.path / "policies" / "cases" / "kiosk.yaml").write_text(case)


async def detail(bed: Bed, store: Store, name: str) -> RolloutDetail:
    record = await bed.record(store, name)
    async with store.read() as connection:
        evidence: Evidence = await read_evidence(connection, "kiosk", records=False)
    members = {one.id for one in await bed.devices(store) if one.running == record.rollout.to_bundle}
    compared = happened(record.rollout.predictions, evidence, record.rollout.to_bundle, members)
    return rollout_detail(record, (), {}, (), compared)


async def test_a_prediction_stands_beside_what_happened(tmp_path: Path, database: str) -> None:
    """The new policy keeps the same requests: predicted as before. What then leaves is called not as predicted."""
    bed = Bed(tmp_path, database)
    use_policy(bed, OLD)
    first = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        controller = bed.controller(store)
        await bed.begin(store, "r1", first, None)
        await bed.until(store, controller, "r1", "done")
        await send(store, first)
        use_policy(bed, OLD + "cache:\n  - {exact: {ttl: 1m}}\n")
        second = bed.release()
        await bed.begin(store, "r2", second, first, without_replay=False)
        await bed.until(store, controller, "r2", "stage")
        shown = await detail(bed, store, "r2")
        assert any("replayed 60 recorded requests of 6 devices over" in note for note in shown.notes), shown.notes
        by_name = {one.name: one for one in shown.predictions}
        assert by_name.keys() == {"on_device", "usd", "quality"}
        assert by_name["on_device"].low > 0.9
        assert by_name["quality"].low < 0.9 < by_name["quality"].high
        assert by_name["quality"].value is None  # no labels yet
        bed.on_device = 40
        await bed.until(store, controller, "r2", "done")
        await send(store, second, own_bad=18, on_device=60, usd=100_000)
        lines = "\n".join(detail_lines(await detail(bed, store, "r2")))
        for name in ("on the device", "USD per 1,000 requests", "good answers"):
            (line,) = [one for one in lines.splitlines() if name in one]
            assert line.endswith("not as predicted"), line


@pytest.mark.parametrize(("on_device", "value"), [(None, None), (60, 0.6)])
def test_only_measured_requests_have_happened(on_device: int | None, value: float | None) -> None:
    """A daemon of an earlier version tells neither share nor cost."""
    counts = {"requests": 100, "on_device": on_device or 0, "measured": 0 if on_device is None else 100}
    evidence = Evidence(counts={("a", "b"): [counts.get(name, 0) for name in COUNTERS]})
    prediction = Prediction("on_device", 0.9, 0.95, 1.0, 1.0, 1.0, 5.0)
    assert [one.value for one in happened([prediction], evidence, "b", ["a"])] == [value]


async def test_fewer_records_than_the_cohort_asks_for_pause_by_name(bed: Bed) -> None:
    """With the records that are missing it goes on; no quality is predicted without labels."""
    edit(bed.signed.path / "fleet.yaml", "    rollout:", "    replay: {records: 61}\n    rollout:")
    use_policy(bed, OLD)
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        controller = bed.controller(store)
        await send(store, "")
        await bed.begin(store, "r1", bundle, None, without_replay=False)
        await bed.turn(store, controller, 2)
        paused = await bed.rollout(store, "r1")
        assert paused.state == "paused"
        assert "60 recorded requests of 6 devices over 1 day to replay, but the cohort kiosk needs 61" in paused.reason
        await send(store, "")
        await bed.decide(store, "r1", RolloutEvent.RESUME)
        await bed.turn(store, controller)
        going = await bed.rollout(store, "r1")
        assert (going.state, [one.name for one in going.predictions]) == ("stage", ["on_device", "usd"])


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "an approver allows it"])
async def test_a_leaving_request_names_its_device_and_the_share_is_predicted(bed: Bed, allow: bool) -> None:
    use_policy(bed, OLD.replace("[small, large]", "[large]").replace('"private" in', '"secret" in'))
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        controller = bed.controller(store)
        await send(store, "")
        await bed.begin(store, "r1", bundle, None, without_replay=False)
        record = await bed.record(store, "r1")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, allow_leaving=allow))
        await bed.turn(store, controller, 2)
        returned = await bed.rollout(store, "r1")
        (share,) = [one for one in returned.predictions if one.name == "on_device"]
        assert share.high < 0.5
        assert returned.state == ("stage" if allow else "draft")
        if allow:
            assert any("replayed 60 recorded requests" in note for note in returned.notes)
            return
        assert "60 of 60 recorded requests stayed on the device" in returned.reason
        assert " of device-5 (small (edge) -> large (cloud)" in returned.reason


async def test_a_cohort_says_how_much_its_devices_send(bed: Bed) -> None:
    """5,000 a day of six devices are 34 an hour each, rounded down; 0, or no cohort of the name, turns it off."""
    bundle = bed.release()
    async with bed.store() as store:
        await bed.enrol(store, 6)
        controller = bed.controller(store)
        await bed.begin(store, "r1", bundle, None)
        await bed.until(store, controller, "r1", "done")
        assert await rate(store) == 32.0
        edit(bed.signed.path / "fleet.yaml", "    rollout:", "    replay: {records_per_day: 0}\n    rollout:")
        await bed.turn(store, controller)
        assert await rate(store) == 0.0
        edit(bed.signed.path / "fleet.yaml", "records_per_day: 0", "records_per_day: 5000")
        await bed.turn(store, controller)
        assert await rate(store) == 32.0
        edit(bed.signed.path / "fleet.yaml", "  kiosk:", "  kiosks:")  # no signer has agreed to it for the old name
        await bed.turn(store, controller)
        assert await rate(store) == 0.0


async def rate(store: Store) -> float:
    async with store.read() as connection:
        return (await read_generations(connection))["kiosk"].pace.records_per_hour
