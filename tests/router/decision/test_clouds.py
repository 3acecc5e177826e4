"""Targets in several clouds: their order, the clouds that are down or that a device lacks, and each cloud's signals."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.checks.possible import PolicyReplay, expected, recorded
from causeway_server.router.checks.what_if import what_if
from causeway_server.router.decision.decide import decide, until_first_cloud, without_down
from causeway_server.router.decision.features import request_of
from causeway_server.router.policy.compiled import Policy, check_policy, parse_policy, with_clouds
from causeway_server.router.types import CloudSignals, Decision, DeviceSetup, EdgeSignals, Estimates, Snapshot

from ..checks.recorded import ask, on_device, record_of

TEXT = """
version: 1
name: p
targets:
  small: {at: edge, model: a}
  large: {at: [cloud:eu, cloud:us], model: b}
  any: {at: cloud, model: c}
routes:
  - {name: near, when: 'cloud.us.rtt_ms < 20.0 && !has(cloud.ap.reachable)', use: [any]}
  - {name: otherwise, use: [large, small]}
"""
UP, DOWN = CloudSignals(reachable=True, rtt_ms=30.0, breaker="closed"), CloudSignals(reachable=False)


def device(**clouds: CloudSignals) -> Snapshot:
    first = next(iter(clouds.values()), CloudSignals())
    setup = DeviceSetup(engine=True, cloud=bool(clouds), clouds=tuple(clouds))
    return Snapshot(edge=EdgeSignals(0, 40.0, loaded=True), cloud=first, clouds=clouds, setup=setup)


def policy(snapshot: Snapshot, text: str = TEXT) -> Policy:
    assert snapshot.setup is not None
    return with_clouds(parse_policy(text), snapshot.setup.clouds)


def decided(snapshot: Snapshot, **request: str) -> Decision:
    compiled = policy(snapshot)
    return decide(compiled, ask(**request), on_device(snapshot, compiled), Estimates())  # type: ignore[arg-type]


def keys(decision: Decision) -> list[str]:
    return [plan.target.key for plan in decision.attempts]


@pytest.mark.parametrize(
    ("clouds", "order", "absent"),
    [
        ({"eu": UP, "us": UP}, ["large@eu", "large@us", "small"], []),
        ({"eu": DOWN, "us": UP}, ["large@us", "small", "large@eu"], []),
        ({"eu": UP, "us": DOWN}, ["large@eu", "small", "large@us"], []),
        ({"eu": DOWN, "us": DOWN}, ["small", "large@eu", "large@us"], []),
        ({"us": UP, "ap": UP}, ["large@us", "small"], ["large@eu"]),
        ({"ap": UP}, ["small"], ["large@eu", "large@us"]),
        ({}, ["small"], ["large@eu", "large@us"]),
        (
            {"eu": msgspec.structs.replace(UP, unavailable_models=("b",)), "us": UP},
            ["large@us", "small", "large@eu"],
            [],
        ),
        ({"eu": msgspec.structs.replace(UP, breaker="open"), "us": UP}, ["large@us", "small", "large@eu"], []),
    ],
)
def test_clouds_are_tried_in_the_order_of_the_policy(
    clouds: dict[str, CloudSignals], order: list[str], absent: list[str]
) -> None:
    """Those that are down come last, and those that the device does not list never."""
    decision = decided(device(**clouds))
    assert keys(decision) == order
    assert [reason.target for reason in decision.reasons if reason.code == "target_absent"] == absent
    assert decision.skipped_target == ("large" if order[0] == "small" and not absent else "")


def test_a_job_goes_to_one_cloud_that_is_up() -> None:
    """While all are down it waits for the first one; a lesser target does not take its place."""
    for clouds, chosen in (
        ({"eu": UP, "us": UP}, "large@eu"),
        ({"eu": DOWN, "us": UP}, "large@us"),
        ({"eu": DOWN, "us": DOWN}, "large@eu"),
    ):
        snapshot = device(**clouds)
        compiled = policy(snapshot)
        taken = on_device(snapshot, compiled)
        decision = decide(compiled, ask(), without_down(taken), Estimates())
        assert keys(until_first_cloud(decision, taken.down)) == [chosen]


def test_a_rule_reads_the_signals_of_the_cloud_that_it_names() -> None:
    """They are absent where the device has no such cloud."""
    near = msgspec.structs.replace(UP, rtt_ms=5.0)
    assert decided(device(eu=UP, us=near)).rule == "near"
    assert decided(device(us=near, eu=UP)).attempts[0].target.cloud == "us"
    assert decided(device(eu=near, us=UP)).rule == "otherwise"
    assert decided(device(us=near, ap=near)).rule == "otherwise"
    reasons = {reason.code: reason.detail for reason in decided(device(eu=UP)).reasons}
    assert reasons["signal_absent"] == "cloud.ap.reachable, cloud.us.rtt_ms"


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("cloud.eu", "unknown signal `cloud.eu`"),
        ("cloud.eu.speed > 1", "unknown signal `cloud.eu.speed`"),
        ("cloud.tier.reachable", "`.reachable`: a signal has no fields"),
        ("cloud.eu.reachable == 1", "is true or false, never 1"),
        ('cloud.eu.breaker == "shut"', "it is one of closed, half_open, open"),
        ("cloud.eu.rtt_ms > cloud.us.tier", "mixes types"),
        ("has(cloud.eu)", "unknown signal `cloud.eu`"),
    ],
)
def test_a_wrong_signal_of_a_cloud_is_refused(when: str, message: str) -> None:
    text = TEXT.replace("cloud.us.rtt_ms < 20.0 && !has(cloud.ap.reachable)", when.replace("'", "''"))
    compiled, problems = check_policy(text)
    assert compiled is None
    assert any(message in problem.message for problem in problems), problems


def test_what_if_changes_the_signals_of_one_cloud() -> None:
    snapshot = device(eu=UP, us=UP)
    compiled = policy(snapshot)
    record = record_of(compiled, snapshot=snapshot)
    listed = {signal.name: signal.value for signal in what_if(compiled, record, {}).signals}
    assert (listed["cloud.us.rtt_ms"], listed["cloud.rtt_ms"]) == (30.0, 30.0)
    for change, order in (
        ({"cloud.eu.reachable": False}, ["large@us", "small", "large@eu"]),
        ({"cloud.reachable": False}, ["large@us", "small", "large@eu"]),
        ({"cloud.us.breaker": "open"}, ["large@eu", "small", "large@us"]),
        ({"cloud.us.rtt_ms": 5.0}, ["any"]),
    ):
        (changed,) = what_if(compiled, record, change).changed.decisions
        assert changed is not None
        assert keys(changed) == order


def test_a_replay_knows_which_cloud_answered() -> None:
    """A record of a device with a single cloud, of the version before, too."""
    snapshot = device(eu=DOWN, us=UP)
    record = record_of(policy(snapshot), snapshot=snapshot)
    before = recorded(record)
    assert str(before.place) == "large (cloud us)"
    replayed = PolicyReplay(parse_policy(TEXT)).possible(record, request_of(record.request))
    assert [one.place for one in expected(replayed.decisions[0], record)] == [before.place]
    old = Snapshot(edge=snapshot.edge, cloud=UP, setup=DeviceSetup(engine=True, cloud=True))
    simple = TEXT.replace("[cloud:eu, cloud:us]", "cloud").replace("us.rtt_ms < 20.0", "rtt_ms < 20.0")
    record = record_of(parse_policy(simple), snapshot=old)
    replayed = PolicyReplay(parse_policy(simple)).possible(record, request_of(record.request))
    assert [one.place for one in expected(replayed.decisions[0], record)] == [recorded(record).place]


def test_a_case_states_the_signals_of_each_cloud() -> None:
    cases = """
policy: p.yaml
cases:
  - name: the second cloud takes over
    snapshot: {clouds: {eu: {reachable: false}, us: {reachable: true}}, down: [large@eu]}
    expect: {route: otherwise, targets: [large@us, small, large@eu]}
  - name: the whole target is down
    snapshot: {down: [large]}
    expect: {targets: [small, large@eu, large@us]}
  - name: near
    snapshot: {clouds: {us: {rtt_ms: 3}}}
    expect: {route: near}
"""
    read, locations, problems = read_cases(cases, "cases.yaml")
    assert problems == ()
    assert read is not None
    assert [result.differences for result in run_cases(read, locations, parse_policy(TEXT))] == [(), (), ()]
