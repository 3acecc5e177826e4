"""The life of a rollout: each state, each event, and what a look does to it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.fleet.rollout.rollout import (
    RUNNING,
    Rollout,
    apply,
    expire,
    look,
    look_due,
    next_look,
    plan_of,
    stage_share,
)
from causeway_server.fleet.rollout.settings import (
    LIFE,
    IllegalTransition,
    MetricLimit,
    RolloutEvent,
    RolloutSettings,
    RolloutStage,
    RolloutState,
    next_state,
    stage_devices,
)
from causeway_server.fleet.rollout.verdict import Observations
from causeway_server.router.bundle.manifest import WHOLE, assigned_bundle, position
from causeway_server.router.variants.verdict import VerdictOutcome

S, E = RolloutState, RolloutEvent
STAGES = (RolloutStage(1_000), RolloutStage(10_000, approval=True), RolloutStage(WHOLE))


def rollout(*events: RolloutEvent, now: float = 1000.0) -> Rollout:
    settings = RolloutSettings(STAGES, metrics=(MetricLimit("errors", 0.02),))
    made = Rollout("r1", "kiosks", "new", "old", "salt", settings)
    for event in events:
        made = apply(made, event, now)
    return made


def started() -> Rollout:
    return rollout(E.SUBMIT, E.CHECK_PASSED, E.CHECK_PASSED)


def observed(devices: int, share: float, *, rolled_back: int = 0, pending: int = 0) -> Observations:
    requests = np.full(devices, 200, dtype=np.int64)
    errors = np.full(devices, round(200 * share), dtype=np.int64)
    return Observations(
        requests,
        {"errors": errors, "degraded": errors * 0},
        np.tile(np.array([190, 10], dtype=np.int64), (devices, 1)),
        np.zeros(devices, dtype=np.bool_),
        rolled_back,
        pending,
    )


GOOD, BAD, CONTROL = observed(50, 0.005), observed(50, 0.1), observed(500, 0.005)


def test_every_state_can_be_reached_and_left() -> None:
    """Only REVERTED is final; DONE can still be rolled back."""
    targets = {target for row in LIFE.values() for target in row.values()}
    assert targets == set(S)
    assert [state for state in S if not LIFE[state]] == [S.REVERTED]


@given(st.lists(st.sampled_from(E), max_size=30))
def test_any_order_of_events_keeps_the_promises(events: list[RolloutEvent]) -> None:
    """Refused events change nothing, the share grows until it drops to 0, and what is aborted ends REVERTED."""
    current = rollout()
    for event in events:
        try:
            following = apply(current, event, 5.0, positions=(7, 40_000, 90_000))
        except IllegalTransition:
            continue
        assert following.share >= current.share or following.state is S.ABORTED
        assert (following.share > 0) == (following.began > 0 and following.state in (*RUNNING, S.DONE))
        current = following
    if current.state is S.ABORTED:
        assert apply(apply(current, E.REVERT, 6.0), E.ALL_REVERTED, 7.0).state is S.REVERTED


def test_a_refused_event_says_what_is_possible() -> None:
    with pytest.raises(IllegalTransition, match=r"state reverting does not allow the event resume; allowed are"):
        next_state(S.REVERTING, E.RESUME)


def test_a_good_rollout_reaches_done() -> None:
    """Stage by stage, with an approval in between, then the soak without a control."""
    current, now, seen = started(), 1000.0, []
    while current.state is not S.DONE:
        if current.state is S.PAUSED:
            current = apply(current, E.ACCEPT, now)
        now = next_look(current)
        no_devices = observed(0, 0.0)
        current, verdict = look(current, GOOD, no_devices if current.share == WHOLE else CONTROL, now)
        assert verdict.outcome is VerdictOutcome.PASS
        seen.append((current.state, current.share))
    assert [pair for index, pair in enumerate(seen) if index == 0 or seen[index - 1] != pair] == [
        (S.STAGE, 1_000),
        (S.PAUSED, 1_000),
        (S.STAGE, 10_000),
        (S.STAGE, WHOLE),
        (S.SOAK, WHOLE),
        (S.DONE, WHOLE),
    ]


def test_looks_are_at_doubling_times() -> None:
    current = started()
    assert not look_due(current, 1149.0)
    assert look_due(current, 1150.0)
    current, _ = look(current, GOOD, CONTROL, 1150.0)
    assert next_look(current) == 1300.0


@pytest.mark.parametrize("events", [(), (E.PAUSE,)], ids=["running", "paused"])
def test_a_fail_aborts(events: tuple[RolloutEvent, ...]) -> None:
    """Devices of a paused stage run the bundle too, so a fail aborts from a pause as well."""
    current = started()
    for event in events:
        current = apply(current, event, 1001.0)
    current, verdict = look(current, BAD, CONTROL, 1150.0)
    assert (current.state, current.share) == (S.ABORTED, 0)
    assert verdict.reasons == (current.reason,)
    assert "errors: 10.00% on 50 devices, control 0.50%; worse by more than 2.0%" in current.reason


def test_a_pass_does_not_end_a_pause() -> None:
    current, _ = look(apply(started(), E.PAUSE, 1001.0), GOOD, CONTROL, 2000.0)
    assert current.state is S.PAUSED


def test_an_inconclusive_stage_is_paused_at_its_end() -> None:
    """Also between looks; RESUME gives it its time again and keeps the looks, so that no error rate is spent twice."""
    current, _ = look(started(), observed(50, 0.005, pending=50), CONTROL, 1150.0)
    assert current.state is S.STAGE
    assert expire(current, 1000.0 + 86_399.0) == current
    current = expire(current, 1000.0 + 86_400.0, "quorum")
    assert (current.state, current.reason) == (S.PAUSED, "inconclusive after 86400 s: quorum")
    current = apply(current, E.RESUME, 90_000.0)
    assert (current.state, current.looks, current.share) == (S.STAGE, 1, 1_000)
    assert expire(current, 90_001.0).state is S.STAGE


def test_a_pause_in_the_replay_returns_to_the_replay_and_is_never_judged() -> None:
    """No device has the bundle yet: there is nothing to look at, also after the time of a first look."""
    paused = apply(rollout(E.SUBMIT, E.CHECK_PASSED), E.PAUSE, 2.0)
    assert not look_due(paused, 1e9)
    assert apply(paused, E.RESUME, 3.0).state is S.REPLAY
    accepted = apply(paused, E.ACCEPT, 3.0)
    assert (accepted.state, accepted.stage, accepted.share) == (S.STAGE, 0, 1_000)
    assert apply(apply(paused, E.ABORT, 3.0), E.REVERT, 4.0).state is S.REVERTING


def test_a_pause_in_the_soak_returns_to_the_soak() -> None:
    events = (E.SUBMIT, E.CHECK_PASSED, E.CHECK_PASSED, E.STAGE_PASSED, E.STAGE_PASSED, E.LAST_STAGE_PASSED)
    soaking = rollout(*events)
    assert apply(apply(soaking, E.PAUSE, 2.0), E.RESUME, 3.0).state is S.SOAK
    assert apply(apply(soaking, E.PAUSE, 2.0), E.ACCEPT, 3.0).state is S.DONE


def test_a_rollout_survives_a_restart_as_json() -> None:
    """A controller that was killed continues from what it stored."""
    assert msgspec.json.decode(msgspec.json.encode(started()), type=Rollout) == started()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=200, unique=True), st.integers(1, WHOLE))
def test_a_stage_has_the_number_of_devices_that_its_share_says(devices: list[str], share: int) -> None:
    """At least one; two devices of the same position are in or out together."""
    positions = [position("salt", device) for device in devices]
    assert all(0 <= point < WHOLE for point in positions)
    actual = stage_share(share, positions)
    assert actual <= WHOLE
    members = [point for point in positions if point < actual]
    assert 0 <= len(members) - stage_devices(share, len(devices)) < members.count(max(members))


def test_a_quarter_of_twenty_devices_is_five_of_them() -> None:
    """Their hashes alone put eight into it. The next stage holds them, too, though three devices have gone."""
    positions = [position("kiosk-6", f"device-{number:02}") for number in range(20)]
    first = stage_share(25_000, positions)
    assert (sum(point < 25_000 for point in positions), sum(point < first for point in positions)) == (8, 5)
    current = apply(rollout(E.SUBMIT, E.CHECK_PASSED), E.CHECK_PASSED, 1.0, positions=positions)
    later = apply(current, E.STAGE_PASSED, 2.0, positions=sorted(positions)[3:])
    assert current.share <= later.share


def test_the_last_stage_has_devices_that_are_away_too() -> None:
    assert stage_share(WHOLE, [3, 5]) == WHOLE
    assert stage_share(25_000, []) == 25_000


def test_each_rollout_draws_other_devices() -> None:
    devices = [f"device-{index}" for index in range(10_000)]
    first, second = ({device for device in devices if position(salt, device) < 5_000} for salt in ("a", "b"))
    assert 400 < len(first) < 600
    assert len(first & second) < 60


def test_the_looks_of_a_rollout_spend_no_more_than_the_bound() -> None:
    settings = RolloutSettings(STAGES)
    tests = (len(STAGES) + 1) * (len(settings.metrics) + 2)
    assert sum(settings.level(look) for look in range(1, 10_000)) * tests <= settings.false_abort


def test_an_abort_publishes_a_plan_that_returns_every_device() -> None:
    """Pinned and held devices aside, which are an operator's; a cohort's first bundle has none before it."""
    ids = {name: name[0] * 64 for name in ("new", "old", "pinned")}
    current = msgspec.structs.replace(started(), to_bundle=ids["new"], from_bundle=ids["old"])
    member = next(str(number) for number in range(10_000) if position("salt", str(number)) < 1_000)
    plan = plan_of(current, {"p": ids["pinned"]}, ["h"])
    assert assigned_bundle(plan, member, ids["old"]) == ids["new"]
    undone = plan_of(apply(current, E.ABORT, 1.0), {"p": ids["pinned"]}, ["h"])
    assert undone.rollout == plan.rollout
    assert assigned_bundle(undone, member, ids["new"]) == ids["old"]
    assert assigned_bundle(undone, "p", ids["pinned"]) == ids["pinned"]
    assert assigned_bundle(undone, "h", ids["new"]) == ids["new"]
    first = plan_of(apply(msgspec.structs.replace(current, from_bundle=None), E.ABORT, 1.0), {}, [])
    assert assigned_bundle(first, member, ids["new"]) == ids["new"]
