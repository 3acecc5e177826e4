"""`keep: in_region` and region tags: which clouds may answer, what the reasons say, and what a policy may not hold."""

from __future__ import annotations

import pytest

from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.checks.possible import PolicyReplay
from causeway_server.router.decision.abilities import no_route
from causeway_server.router.decision.decide import CachePlanner, decide, until_first_cloud
from causeway_server.router.errors import OutsideRegion
from causeway_server.router.policy.compiled import check_policy, parse_policy, with_clouds
from causeway_server.router.residency import check_region, check_webhook_region, narrowed, region_tags, regions_of
from causeway_server.router.types import Decision, DeviceSetup, EdgeSignals, Estimates, Snapshot

from ..checks.recorded import ask, on_device, record_of

TEXT = """
version: 1
name: p
targets:
  small: {at: edge, model: a}
  large: {at: [cloud:eu, cloud:us, cloud:ch, cloud:new], model: b}
  any: {at: cloud, model: c}
constraints:
  - {name: here, keep: in_region, regions: [eu-central, ch-north], when: '"europe" in request.tags'}
  - {name: swiss, keep: in_region, regions: [ch-north, us-east], when: '"swiss" in request.tags'}
routes:
  - {name: clouds, use: [large], when: '"clouds" in request.tags'}
  - {name: otherwise, use: [any, large, small]}
cache: [{exact: {ttl: 30s}}]
"""
REGIONS = {"eu": "EU-Central", "us": "us-east", "ch": "ch-north"}
DEVICE = Snapshot(
    edge=EdgeSignals(0, 40.0, loaded=True),
    setup=DeviceSetup(engine=True, cloud=True, clouds=("eu", "us", "ch", "new"), regions=REGIONS),
)
POLICY = with_clouds(parse_policy(TEXT), ("eu", "us", "ch", "new"))
TAKEN = on_device(DEVICE, POLICY)


def decided(*tags: str, snapshot: Snapshot = TAKEN, text: str = "") -> Decision:
    policy = with_clouds(parse_policy(text), ("eu",)) if text else POLICY
    return decide(policy, ask(tags=tags), snapshot, Estimates())


def keys(decision: Decision) -> list[str]:
    return [plan.target.key for plan in decision.attempts]


@pytest.mark.parametrize(
    ("tags", "regions", "targets"),
    [
        ((), None, ["any", "large@eu", "large@us", "large@ch", "large@new", "small"]),
        (("europe",), ("ch-north", "eu-central"), ["any", "large@eu", "large@ch", "small"]),
        (("swiss",), ("ch-north", "us-east"), ["large@us", "large@ch", "small"]),
        (("europe", "swiss"), ("ch-north",), ["large@ch", "small"]),
        (("in-region:us-east",), ("us-east",), ["large@us", "small"]),
        (("In-Region:EU-Central+us-east",), ("eu-central", "us-east"), ["any", "large@eu", "large@us", "small"]),
        (("europe", "in-region:us-east"), (), ["small"]),
        (("in-region:",), ("",), ["small"]),
    ],
)
def test_only_the_device_and_clouds_in_every_binding_may_answer(
    tags: tuple[str, ...], regions: tuple[str, ...] | None, targets: list[str]
) -> None:
    """Tags narrow as constraints do; a cloud without a region is in none."""
    decision = decided(*tags)
    assert (decision.regions, keys(decision)) == (regions, targets)
    assert (decision.on_device, decision.private) == (False, False)


def test_the_reasons_name_the_constraint_and_where_each_other_cloud_is() -> None:
    excluded = [one for one in decided("europe").reasons if one.code == "region_excluded"]
    assert [(one.rule, one.target, one.detail) for one in excluded] == [
        ("here", "large@us", "it is in us-east"),
        ("here", "large@new", "its cloud has no region"),
    ]


def test_with_nothing_left_the_error_names_the_regions() -> None:
    error = no_route(decided("clouds", "in-region:ap-south"))
    assert isinstance(error, OutsideRegion)
    assert (error.status, error.code) == (503, "outside_region")
    assert "large@us (region_excluded: it is in us-east)" in error.message
    assert "bound to ap-south" in error.message


@pytest.mark.parametrize("setup", [None, DeviceSetup(engine=True, cloud=True)], ids=["unknown", "not recorded"])
def test_a_device_whose_clouds_are_unknown_keeps_a_bound_request(setup: DeviceSetup | None) -> None:
    assert keys(decided("europe", snapshot=Snapshot(edge=DEVICE.edge, setup=setup))) == ["small"]


def test_a_constraint_that_cannot_be_evaluated_binds() -> None:
    text = TEXT.replace("""'"swiss" in request.tags'""", "device.temperature_c > 20.0")
    assert decided(text=text).regions == ("ch-north", "us-east")


def test_a_job_waits_for_a_cloud_in_its_regions() -> None:
    chosen = until_first_cloud(decided("swiss", "clouds"), frozenset({"large@us"}))
    assert keys(chosen) == ["large@ch"]


def test_requests_of_other_regions_share_no_answers() -> None:
    """Bound to the same regions they do, by constraint or by tag."""
    planner = CachePlanner()
    keyed = {tags: planner.plan(POLICY, ask(tags=tags, temperature=0.0), TAKEN, Estimates()) for tags in _BOUND}
    assert len({plan.key for plan in keyed.values()}) == 3
    assert keyed["swiss",].key == keyed["in-region:us-east+ch-north",].key
    assert keyed["europe",].plan.regions == ("ch-north", "eu-central")


_BOUND: tuple[tuple[str, ...], ...] = ((), ("europe",), ("swiss",), ("in-region:us-east+ch-north",))


def test_a_bound_request_has_no_shadow() -> None:
    text = TEXT + "shadow: {share: 1.0}\n"
    assert decided(text=text, snapshot=on_device(DEVICE, POLICY)).shadow is not None
    assert decided("europe", text=text).shadow is None


def test_a_replay_without_the_signal_of_the_constraint_expects_both() -> None:
    text = TEXT.replace("""'"swiss" in request.tags'""", "request.prompt_tokens > 100")
    policy = with_clouds(parse_policy(text), ("eu", "us", "ch", "new"))
    possible = PolicyReplay(policy).possible(record_of(POLICY, snapshot=DEVICE), ask())
    assert [keys(one) for one in possible.decisions if one is not None] == [
        ["large@us", "large@ch", "small"],
        ["any", "large@eu", "large@us", "large@ch", "large@new", "small"],
    ]
    assert possible.constraint == "swiss"


def test_cases_name_the_regions_of_clouds() -> None:
    text = """
policy: p.yaml
cases:
  - name: at home
    request: {tags: [europe]}
    snapshot: {regions: {eu: eu-central, us: us-east}}
    expect: {targets: [any, large@eu, small], reasons: [{code: region_excluded, target: large@us}]}
"""
    cases, locations, problems = read_cases(text, "cases.yaml")
    assert cases is not None
    assert not problems
    assert [one.differences for one in run_cases(cases, locations, parse_policy(TEXT))] == [()]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ("{name: a, keep: in_region}", "needs `regions` for `keep: in_region`"),
        ("{name: a, keep: on_device, regions: [eu]}", "has no effect without `keep: in_region`"),
        ("{name: a, keep: in_region, regions: [EU]}", "a region's name of 1 to 32 lower-case letters"),
        (f"{{name: a, keep: in_region, regions: [{'a' * 30}, {'b' * 30}]}}", "at most 54 characters"),
        (
            "{name: a, keep: in_region, regions: [eu]}, {name: b, keep: in_region, regions: [us]}",
            "has no region in common with `a`, which always binds, too",
        ),
    ],
)
def test_a_constraint_that_can_never_be_satisfied_is_refused(constraints: str, message: str) -> None:
    head, _, rest = TEXT.partition("constraints:")
    compiled, problems = check_policy(f"{head}constraints: [{constraints}]\nroutes:{rest.partition('routes:')[2]}")
    assert compiled is None
    assert any(message in problem.message for problem in problems), problems


def test_bindings_narrow_and_a_place_without_region_is_outside() -> None:
    assert regions_of(("a", "private")) is None
    assert narrowed(None, frozenset({"a", "b"}), None, frozenset({"b"})) == frozenset({"b"})
    assert regions_of(region_tags(["US", "eu"])) == frozenset({"us", "eu"})
    check_region(None, "", "jobs.region")
    check_webhook_region(frozenset({"eu"}), "https://hooks.example/a", {"hooks.example": "EU"})
    for region in ("", "us"):
        with pytest.raises(OutsideRegion, match=r"bound to eu, but jobs\.region is in"):
            check_region(frozenset({"eu"}), region, "jobs.region")
    with pytest.raises(OutsideRegion, match=r"the receiver hooks\.example of the webhook"):
        check_webhook_region(frozenset({"eu"}), "https://hooks.example:8443/a", {"example": "eu"})
