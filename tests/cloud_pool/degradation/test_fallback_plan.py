"""The plan of one request: pure, over given tier states."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.degradation.config import ShareRamp
from causeway_server.cloud_pool.degradation.fallback import FallbackPlan, FallbackRequest, plan
from causeway_server.cloud_pool.degradation.tier_health import TierHealth, TierSnapshot

SHARE_RAMP = ShareRamp()
LARGE, MEDIUM, SMALL = TierSnapshot("large"), TierSnapshot("medium"), TierSnapshot("small")
BAD: list[dict[str, object]] = [{"broken": True}, {"saturated": True}, {"ttft_s": 9.0}]


def plan_of(*views: TierSnapshot, tier_healths: dict[str, TierHealth] | None = None, **fields: object) -> FallbackPlan:
    request = FallbackRequest(**{"tier": views[0].name, "left_s": 10.0, "position": 0.9, **fields})  # type: ignore[arg-type]
    return plan(request, views, tier_healths or {}, SHARE_RAMP, now=100.0)


def reasons(found: FallbackPlan) -> list[tuple[str, str]]:
    return [(fallback_step.tier, fallback_step.reason({})) for fallback_step in found.fallback_steps]


def with_(view: TierSnapshot, **fields: object) -> TierSnapshot:
    return TierSnapshot(view.name, objective_s=1.0, **fields)  # type: ignore[arg-type]


def test_the_requested_tier_comes_first() -> None:
    found = plan_of(LARGE, MEDIUM, SMALL)
    assert [fallback_step.tier for fallback_step in found.fallback_steps] == ["large", "medium", "small"]
    assert found.fallback_steps[0].reason({}) == "requested"
    assert [fallback_step.last for fallback_step in found.fallback_steps] == [False, False, True]
    assert not any(fallback_step.truncated or fallback_step.forced for fallback_step in found.fallback_steps)


def test_a_single_tier_is_tried_in_any_state() -> None:
    for bad in ({}, *BAD):
        (fallback_step,) = plan_of(with_(LARGE, **bad)).fallback_steps
        assert (fallback_step.tier, fallback_step.reason({}), fallback_step.last, fallback_step.forced) == (
            "large",
            "requested",
            True,
            True,
        )


def test_a_broken_tier_is_skipped_with_a_reason() -> None:
    found = plan_of(with_(LARGE, broken=True), MEDIUM)
    assert reasons(found) == [("medium", "large=broken")]


def test_a_slow_or_saturated_tier_comes_after_the_next() -> None:
    assert reasons(plan_of(with_(LARGE, ttft_s=1.5), MEDIUM)) == [("medium", "large=slow"), ("large", "requested")]
    assert reasons(plan_of(with_(LARGE, saturated=True), MEDIUM)) == [
        ("medium", "large=saturated"),
        ("large", "requested"),
    ]


def test_a_queue_longer_than_the_deadline_skips_the_tier() -> None:
    found = plan_of(with_(LARGE, queue_s=20.0), MEDIUM)
    assert reasons(found) == [("medium", "large=saturated")]
    assert dict(found.tier_healths)["large"].share == 1.0


def test_a_queue_longer_than_the_timeout_skips_the_tier() -> None:
    found = plan_of(with_(LARGE, queue_s=4.0, first_token_timeout_s=3.0), MEDIUM)
    assert reasons(found) == [("medium", "large=saturated")]


def test_the_reason_names_all_skipped_tiers() -> None:
    found = plan_of(with_(LARGE, broken=True), with_(MEDIUM, ttft_s=2.0), SMALL)
    assert reasons(found)[0] == ("small", "large=broken; medium=slow")


def test_a_failed_attempt_becomes_the_reason() -> None:
    (_, second) = plan_of(LARGE, MEDIUM).fallback_steps
    assert second.reason({"large": "broken"}) == "large=broken"


def test_when_all_are_broken_all_are_tried() -> None:
    found = plan_of(with_(LARGE, broken=True), with_(MEDIUM, broken=True))
    assert [(fallback_step.tier, fallback_step.forced) for fallback_step in found.fallback_steps] == [
        ("large", True),
        ("medium", True),
    ]


def test_a_critical_request_has_exactly_one_step() -> None:
    for bad in BAD:
        found = plan_of(with_(LARGE, **bad), MEDIUM, critical=True, may_truncate=True)
        assert reasons(found) == [("large", "requested")]
        assert not found.fallback_steps[0].truncated


def test_answers_are_truncated_when_every_working_tier_is_under_stress() -> None:
    busy = [with_(LARGE, saturated=True), with_(MEDIUM, ttft_s=2.0)]
    assert all(fallback_step.truncated for fallback_step in plan_of(*busy, may_truncate=True).fallback_steps)
    assert all(
        fallback_step.truncated
        for fallback_step in plan_of(with_(LARGE, broken=True), busy[1], may_truncate=True).fallback_steps
    )
    assert all(fallback_step.truncated for fallback_step in plan_of(busy[0], may_truncate=True).fallback_steps)
    assert not any(fallback_step.truncated for fallback_step in plan_of(*busy, SMALL, may_truncate=True).fallback_steps)
    assert not any(fallback_step.truncated for fallback_step in plan_of(*busy, may_truncate=False).fallback_steps)
    assert not any(
        fallback_step.truncated
        for fallback_step in plan_of(with_(LARGE, broken=True), may_truncate=True).fallback_steps
    )


def test_a_recovering_tier_gets_its_share() -> None:
    tier_healths = {"large": TierHealth(share=0.4, stress="slow", stressed_at=99.9, stepped_at=99.9)}
    firsts = []
    for place in range(10):
        found = plan_of(LARGE, MEDIUM, tier_healths=tier_healths, position=place / 10)
        tier_healths = dict(found.tier_healths)
        firsts.append(found.fallback_steps[0])
    assert [fallback_step.tier for fallback_step in firsts].count("large") == 4
    assert {fallback_step.reason({}) for fallback_step in firsts} == {"requested", "large=slow"}


views = st.builds(
    TierSnapshot,
    name=st.just(""),
    broken=st.booleans(),
    saturated=st.booleans(),
    queue_s=st.floats(0.0, 30.0),
    ttft_s=st.none() | st.floats(0.0, 5.0),
    objective_s=st.sampled_from([0.0, 1.0]),
)
footings_ = st.builds(
    TierHealth, share=st.floats(0.0, 1.0), credit=st.floats(0.0, 1.0), stress=st.sampled_from(["", "slow"])
)


@given(st.lists(st.tuples(views, footings_), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_plan_is_never_empty_and_names_each_tier_once(
    tiers: list[tuple[TierSnapshot, TierHealth]], stays: bool, may_truncate: bool
) -> None:
    named = [msgspec.structs.replace(view, name=f"t{at}") for at, (view, _) in enumerate(tiers)]
    tier_healths = {f"t{at}": tier_health for at, (_, tier_health) in enumerate(tiers)}
    found = plan(
        FallbackRequest(tier="t0", left_s=10.0, critical=stays, may_truncate=may_truncate),
        named,
        tier_healths,
        SHARE_RAMP,
        1.0,
    )
    names = [fallback_step.tier for fallback_step in found.fallback_steps]
    assert names
    assert len(set(names)) == len(names)
    assert [fallback_step.last for fallback_step in found.fallback_steps] == [False] * (len(names) - 1) + [True]
    by_name = {view.name: view for view in named}
    if not any(fallback_step.forced for fallback_step in found.fallback_steps):
        assert not any(by_name[name].broken for name in names)
