"""One step of a rollout: canary and control from devices' reports, reverts, and a store that was restored."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.fleet.controller.checks import Check
from causeway_server.fleet.controller.step import (
    RolloutObservations,
    adopted,
    ahead_count,
    caught_up,
    checked,
    needs_devices,
    observe,
    paused_behind,
    positions_of,
    step,
)
from causeway_server.fleet.rollout.rollout import Rollout, apply, plan_of
from causeway_server.fleet.rollout.settings import (
    MaintenanceWindow,
    MetricLimit,
    RolloutEvent,
    RolloutSettings,
    RolloutStage,
    RolloutState,
)
from causeway_server.fleet.store.devices import Device
from causeway_server.fleet.store.rollouts import ReportedPlan
from causeway_server.fleet.store.tables import COUNTERS
from causeway_server.router.bundle.manifest import WHOLE, position
from causeway_server.router.variants.verdict import VerdictOutcome

S, E = RolloutState, RolloutEvent
OLD, NEW = "a" * 64, "b" * 64
SETTINGS = RolloutSettings(
    (RolloutStage(10_000), RolloutStage(50_000), RolloutStage(WHOLE)), (MetricLimit("errors", 0.02),)
)
START, NOW = 1000.0, 2300.0  # a look at 1150, 1300, 1600, 2200


def staged(state: RolloutState = S.STAGE, *, stage: int = 0) -> Rollout:
    rollout = Rollout("r1", "kiosk", NEW, OLD, "salt", SETTINGS)
    for event in (E.SUBMIT, E.CHECK_PASSED, E.CHECK_PASSED):
        rollout = apply(rollout, event, START)
    for _ in range(stage):
        rollout = apply(rollout, E.STAGE_PASSED, START)
    if state is S.REVERTING:
        rollout = apply(apply(rollout, E.ABORT, START, reason="bad"), E.REVERT, START)
    return rollout


def late(rollout: Rollout) -> Rollout:
    """After three looks: the next is due at 2200 and watches from 1600."""
    return msgspec.structs.replace(rollout, looks=3, looked=1600.0)


def device(name: str, of: Rollout, **changes: object) -> Device:
    """A healthy device: it runs what the rollout's share gives it."""
    member = position(of.salt, name) < of.share
    healthy = Device(name, "acme", "kiosk", last_seen=NOW - 10, running=NEW if member else OLD, running_since=1100.0)
    return msgspec.structs.replace(healthy, **changes)


def fleet(rollout: Rollout, count: int = 200) -> tuple[Device, ...]:
    return tuple(device(f"device-{index}", rollout) for index in range(count))


def members(rollout: Rollout, devices: tuple[Device, ...]) -> list[Device]:
    return [one for one in devices if position(rollout.salt, one.id) < rollout.share]


def counts(devices: tuple[Device, ...], bad: frozenset[str] = frozenset()) -> dict[tuple[str, str], list[int]]:
    found = {
        name: dict.fromkeys(COUNTERS, 0) | {"requests": 100, "errors": 30 if name in bad else 1, "latency_0": 100}
        for name in (one.id for one in devices)
    }
    return {(one.id, one.running or ""): list(found[one.id].values()) for one in devices}


def test_a_good_look_passes_and_goes_on() -> None:
    rollout = late(staged())
    devices = fleet(rollout)
    done = step(rollout, RolloutObservations(devices, counts(devices)), None, NOW)
    assert done.verdict is not None
    assert done.verdict.outcome is VerdictOutcome.PASS
    assert (done.rollout.state, done.rollout.stage) == (S.STAGE, 1)
    assert len(members(done.rollout, devices)) == 100  # half of them


def test_a_bad_look_aborts() -> None:
    rollout = late(staged())
    devices = fleet(rollout)
    bad = frozenset(one.id for one in members(rollout, devices))
    done = step(rollout, RolloutObservations(devices, counts(devices, bad)), None, NOW)
    assert (done.rollout.state, done.rollout.share) == (S.ABORTED, 0)
    assert "errors: 30.00%" in done.rollout.reason


def test_between_looks_nothing_is_read_and_nothing_happens() -> None:
    rollout = staged()
    assert not needs_devices(rollout, START + 149)
    assert needs_devices(rollout, START + 150)
    assert step(rollout, RolloutObservations(), None, START + 149).rollout == rollout
    assert step(rollout, RolloutObservations(), None, START + 149).verdict is None


def test_a_look_after_a_long_absence_is_one_look() -> None:
    """A controller that was away for hours looks once, and the next time after at least the first look's time."""
    rollout = staged()
    later = step(rollout, RolloutObservations(fleet(rollout)), None, START + 20_000).rollout
    assert later.looks == 1
    assert not needs_devices(later, START + 20_149)
    assert needs_devices(later, START + 20_150)


def test_who_is_canary_and_who_is_control() -> None:
    rollout = late(staged(stage=1))
    devices = fleet(rollout)
    inside = members(rollout, devices)
    outside = [one for one in devices if one not in inside]
    changes: dict[str, dict[str, object]] = {
        inside[0].id: {"running": OLD, "quarantined_json": f'["{NEW}"]'},  # rolled back
        inside[1].id: {"running": OLD},  # pending
        inside[2].id: {"last_seen": START - 10_000.0, "running": OLD},  # off since long before the stage
        inside[3].id: {"last_seen": START + 100, "running": OLD},  # went silent while it changed
        inside[4].id: {"held": True},
        inside[5].id: {"running_since": NOW - 50},  # has just changed: watched for a shorter time
        outside[0].id: {"running": NEW},  # not a device of the control
        outside[1].id: {"last_seen": START + 100},  # silent
        outside[2].id: {"held": True},
    }
    devices = tuple(msgspec.structs.replace(one, **changes.get(one.id, {})) for one in devices)
    canary, control = observe(rollout, RolloutObservations(devices, counts(devices)), NOW)
    assert (canary.devices, canary.rolled_back, canary.pending) == (len(inside) - 4, 1, 1)
    assert int(canary.silent.sum()) == 1
    assert int((canary.requests > 0).sum()) == len(inside) - 6  # not the silent one's old bundle, not the late one
    assert control.devices == len(outside) - 2
    assert int(control.silent.sum()) == 1


def test_devices_outside_their_window_hold_up_nothing() -> None:
    """The device said 21:59 an hour ago: its window has opened since."""
    rollout = late(staged(stage=2))
    night = (MaintenanceWindow(frozenset({1}), 22 * 60, 23 * 60),)
    waiting = [
        device("1", rollout, running=OLD, minute=minute, last_seen=NOW - 60) for minute in (21 * 60, 21 * 60 + 59)
    ]
    canary, _ = observe(rollout, RolloutObservations(tuple(waiting), {}, night), NOW)
    assert canary.pending == 1


def test_a_stage_holds_at_least_one_device_that_takes_part() -> None:
    rollout = Rollout("r1", "kiosk", NEW, OLD, "salt", RolloutSettings((RolloutStage(1), RolloutStage(WHOLE))))
    for event in (E.SUBMIT, E.CHECK_PASSED):
        rollout = apply(rollout, event, START)
    devices = [
        Device("off", "acme", "kiosk", running=OLD),
        Device("held", "acme", "kiosk", last_seen=NOW, running=OLD, held=True),
        Device("on", "acme", "kiosk", last_seen=NOW, running=OLD),
    ]
    begun = checked(rollout, Check(), RolloutObservations(tuple(devices)), NOW)
    assert begun.share == position("salt", "on") + 1
    assert positions_of("salt", devices, NOW) == [position("salt", "on")]


def test_a_failed_check_goes_back_to_its_author() -> None:
    rollout = apply(Rollout("r1", "kiosk", NEW, OLD, "salt", SETTINGS), E.SUBMIT, START)
    failed = checked(rollout, Check(("one", "two", "three", "four")), RolloutObservations(), NOW)
    assert (failed.state, failed.reason) == (S.DRAFT, "one; two; three (and 1 more)")


def test_a_revert_ends_when_no_device_that_answers_runs_the_bundle() -> None:
    rollout = staged(S.REVERTING)
    back, dark = device("1", rollout, running=OLD), device("2", rollout, running=NEW, last_seen=NOW - 10_000)
    slow = device("3", rollout, running=NEW)
    assert step(rollout, RolloutObservations((back, slow)), None, NOW).rollout.state is S.REVERTING
    assert step(rollout, RolloutObservations((back, dark)), None, NOW).rollout.state is S.REVERTED
    first = msgspec.structs.replace(rollout, from_bundle=None)
    assert step(first, RolloutObservations((slow,)), None, NOW).rollout.state is S.REVERTED, "nothing to return to"


def test_an_abort_reverts_only_once_it_is_published() -> None:
    rollout = apply(staged(), E.ABORT, START, reason="bad")
    before = plan_of(staged(), {}, ())
    assert step(rollout, RolloutObservations(), before, NOW).rollout == rollout
    after = step(rollout, RolloutObservations(), plan_of(rollout, {}, ()), NOW).rollout
    assert (after.state, after.reason) == (S.REVERTING, "bad")


@pytest.mark.parametrize("share", [10_500, 50_000])
def test_a_restored_store_takes_over_a_larger_published_share(share: int) -> None:
    """The devices are at stage 2 and the store at stage 1: it does not pull them back, and it waits for a person."""
    restored = staged()
    published = msgspec.structs.replace(plan_of(restored, {}, ()), share=share)
    after = step(restored, RolloutObservations(), published, NOW).rollout
    assert (after.state, after.stage, after.share, after.looks) == (S.PAUSED, 1, share, 0)
    assert "restored from a backup" in after.reason
    assert apply(after, E.RESUME, NOW).state is S.STAGE
    assert caught_up(after, published, NOW) is after


def test_a_restored_store_does_not_go_on_with_what_was_aborted() -> None:
    restored = staged()
    published = msgspec.structs.replace(plan_of(restored, {}, ()), share=0)
    assert step(restored, RolloutObservations(), published, NOW).rollout.state is S.ABORTED


def test_a_plan_that_is_behind_the_store_is_the_normal_case() -> None:
    """The decision is stored first: the plan follows."""
    rollout = staged(stage=1)
    for published in (None, plan_of(staged(), {}, ()), msgspec.structs.replace(plan_of(rollout, {}, ()), rollout="r0")):
        assert caught_up(rollout, published, NOW) is rollout


def test_devices_ahead_of_the_store_pause_it() -> None:
    rollout = staged()
    known = frozenset({"r0", "r1"})
    usual = [
        ReportedPlan("kiosk", "r1", False, 30),
        ReportedPlan("kiosk", "r0", False, 8),
        ReportedPlan("kiosk", "", False, 2),
    ]
    assert ahead_count(usual, known) == 0
    assert ahead_count([*usual, ReportedPlan("kiosk", "r2", False, 1)], known) == 0, "one device stops no fleet"
    assert ahead_count([*usual, ReportedPlan("kiosk", "r2", False, 3)], known) == 3
    assert ahead_count([*usual, ReportedPlan("kiosk", "r1", True, 5)], known) == 5
    both = [*usual, ReportedPlan("kiosk", "r2", True, 5)]
    assert ahead_count(both, known | {"r2", "metadata_rollback"}) == 0, "acknowledged"
    paused = paused_behind(rollout, 3, NOW)
    assert paused.state is S.PAUSED
    assert "3 devices are ahead of the control plane" in paused.reason


@pytest.mark.parametrize(("share", "state"), [(50_000, S.PAUSED), (0, S.ABORTED)])
def test_a_published_rollout_that_the_store_lost_comes_back(share: int, state: RolloutState) -> None:
    plan = msgspec.structs.replace(plan_of(staged(), {}, ()), share=share)
    rollout = adopted(plan, SETTINGS, NOW)
    assert (rollout.state, rollout.share, rollout.to_bundle, rollout.from_bundle) == (state, share, NEW, OLD)
    assert msgspec.structs.replace(plan_of(rollout, {}, ())) == plan
    assert rollout.has_begun


def test_a_rollout_that_is_aborted_before_its_first_stage_is_never_published() -> None:
    rollout = apply(apply(Rollout("r1", "kiosk", NEW, OLD, "salt", SETTINGS), E.SUBMIT, START), E.ABORT, START)
    reverting = step(rollout, RolloutObservations(), None, NOW).rollout
    assert step(reverting, RolloutObservations(), None, NOW).rollout.state is S.REVERTED
