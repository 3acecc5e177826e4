"""What-if over recorded decisions: moves, privacy, unknown outcomes, cost and latency."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.checks.replay import replay
from causeway_server.router.checks.report import ReplayReport
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import (
    CloudSignals,
    DecisionRecord,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    Outcome,
    Snapshot,
)

from .recorded import DEVICE, ask, record_of

HEAD = """
version: 1
name: test
targets:
  small: {at: edge, model: assistant, temperature: 0}
  large: {at: cloud, model: assistant-large, price: {input: 1000, output: 1000}}
  medium: {at: cloud, model: assistant-medium, price: {input: 500, output: 500}}
"""
PRIVATE = """
constraints:
  - {name: private-stays, keep: on_device, when: '"private" in request.tags'}
"""


def policy(*routes: str, constraints: str = "", head: str = HEAD) -> Policy:
    return parse_policy(head + constraints + "routes:\n" + "".join(f"  - {{{route}}}\n" for route in routes))


EDGE_FIRST = policy("name: edge, use: [small, large]", constraints=PRIVATE)
CLOUD_FIRST = policy("name: cloud, use: [large, small]", constraints=PRIVATE)


def moves(report: ReplayReport) -> list[tuple[str, str, str, int]]:
    return [(move.before, move.after, move.rule_after, move.requests) for move in report.moves if move.moved]


# --- moves -----------------------------------------------------------------------------------------------------------


def test_the_same_policy_moves_nothing() -> None:
    report = replay([record_of(EDGE_FIRST, number=n) for n in range(3)], EDGE_FIRST)
    assert (report.requests, report.unchanged, report.leaving, report.unknown) == (3, 3, (), ())
    assert [move.moved for move in report.moves] == [False]


def test_moves_name_both_places_and_the_rule() -> None:
    tagged = policy("name: bulk, use: [medium], when: '\"bulk\" in request.tags'", "name: edge, use: [small, large]")
    records = [record_of(CLOUD_FIRST, ask(tags=("bulk",)), number=n) for n in range(2)]
    records += [record_of(CLOUD_FIRST, number=n) for n in range(2, 5)]
    assert moves(replay(records, tagged)) == [
        ("large (cloud)", "small (edge)", "edge", 3),
        ("large (cloud)", "medium (cloud)", "bulk", 2),
    ]


def test_signals_are_those_of_the_device_at_that_time() -> None:
    hot = msgspec.structs.replace(DEVICE, device=DeviceSignals(temperature_c=91.0))
    new = policy("name: hot, use: [large], when: device.temperature_c > 85", "name: edge, use: [small]")
    report = replay([record_of(EDGE_FIRST), record_of(EDGE_FIRST, snapshot=hot)], new)
    assert moves(report) == [("small (edge)", "large (cloud)", "hot", 1)]


def test_targets_with_other_names_are_down_and_absent_as_those_of_the_old_policy_were() -> None:
    other = HEAD.replace("large:", "big:")
    new = policy("name: cloud, use: [big, small]", head=other)
    down = msgspec.structs.replace(DEVICE, cloud=CloudSignals(reachable=False, breaker="open"))
    no_cloud = msgspec.structs.replace(DEVICE, setup=msgspec.structs.replace(DEVICE.setup, cloud=False))  # type: ignore[type-var]
    for snapshot in (down, no_cloud):
        report = replay([record_of(EDGE_FIRST, snapshot=snapshot)], new)
        assert (report.unchanged, moves(report)) == (1, [])


def test_a_target_that_failed_fails_again() -> None:
    records = [record_of(CLOUD_FIRST, fails=("large",))]
    assert replay(records, CLOUD_FIRST).unchanged == 1
    new = policy("name: other, use: [large, medium, small]")
    assert moves(replay(records, new)) == [("small (edge)", "medium (cloud)", "other", 1)]


def test_a_deadline_that_passed_at_a_target_passes_there_again() -> None:
    """No later target is tried, as on the device."""
    record = record_of(EDGE_FIRST, fails=("small", "large"))
    timed_out = msgspec.structs.replace(record.outcome.attempts[0], state="timed_out", error="deadline_exceeded")
    record = msgspec.structs.replace(
        record, outcome=msgspec.structs.replace(record.outcome, attempts=(timed_out,), error="deadline_exceeded")
    )
    report = replay([record], EDGE_FIRST)
    assert (report.unchanged, report.leaving) == (1, ())


def test_an_old_policy_replaces_what_was_recorded() -> None:
    records = [record_of(CLOUD_FIRST)]
    report = replay(records, CLOUD_FIRST, EDGE_FIRST)
    assert (report.old, moves(report)) == (
        f"test@{EDGE_FIRST.revision}",
        [("small (edge)", "large (cloud)", "cloud", 1)],
    )


def test_a_model_that_no_policy_has_is_refused() -> None:
    """A new target of that name answers what was refused before."""
    record = record_of(EDGE_FIRST)
    asked = msgspec.structs.replace(record.request, model="vision")
    refused = msgspec.structs.replace(
        record, request=asked, decision=None, outcome=Outcome("rejected", 404, "none", error="model_not_found")
    )
    assert replay([refused], EDGE_FIRST).unchanged == 1
    new = policy("name: edge, use: [small]", head=HEAD + "  vision: {at: cloud, model: v}\n")
    (leaving,) = replay([refused], new).leaving
    assert (leaving.before, leaving.after, leaving.cause) == ("no answer", "vision (cloud)", "leaves")


def test_requests_that_were_refused_before_a_decision_are_counted_apart() -> None:
    record = record_of(EDGE_FIRST)
    refused = msgspec.structs.replace(
        record, decision=None, outcome=Outcome("rejected", 429, "none", error="rate_limit_exceeded")
    )
    report = replay([refused, record], CLOUD_FIRST)
    assert (report.undecided, report.requests) == (1, 1)


@pytest.mark.parametrize(("cached", "after"), [(True, "cache"), (False, "large (cloud)")])
def test_a_hit_stays_one_while_the_policy_still_caches_it(cached: bool, after: str) -> None:
    rule = "cache:\n  - {when: request.temperature == 0.5, allow_sampled: true, exact: {ttl: 30s}}\n"
    new = policy("name: cloud, use: [large]", constraints=rule if cached else "")
    hit = msgspec.structs.replace(
        record_of(EDGE_FIRST), decision=None, outcome=Outcome("ok", 200, "cache", "small", cache="hit", ttft_ms=1.0)
    )
    assert [move.after for move in replay([hit], new).moves] == [after]


# --- privacy ---------------------------------------------------------------------------------------------------------


def test_a_private_request_that_would_leave_is_listed_with_what_bound_it() -> None:
    public = policy("name: cloud, use: [large, small]")
    records = [record_of(CLOUD_FIRST, number=1), record_of(CLOUD_FIRST, ask(tags=("private",)), number=2)]
    (leaving,) = replay(records, public).leaving
    assert (leaving.id, leaving.position, leaving.cause, leaving.bound_by) == ("d2", 1, "leaves", ("private-stays",))
    assert (leaving.before, leaving.after, leaving.rule) == ("small (edge)", "large (cloud)", "cloud")


def test_a_fallback_to_the_cloud_counts_if_there_was_none_before() -> None:
    public = policy("name: edge, use: [small, large]")
    (leaving,) = replay([record_of(EDGE_FIRST, ask(tags=("private",)))], public).leaving
    assert (leaving.cause, leaving.after) == ("may_leave", "small (edge)")
    assert replay([record_of(EDGE_FIRST)], public).leaving == (), "it had that fallback before"


def test_a_bound_request_without_an_answer_leaves_if_the_cloud_answers_now() -> None:
    only_cloud = policy("name: cloud, use: [large]", constraints=PRIVATE)
    record = record_of(only_cloud, ask(tags=("private",)))
    assert replay([record], only_cloud).leaving == ()
    (leaving,) = replay([record], policy("name: cloud, use: [large]")).leaving
    assert (leaving.before, leaving.cause) == ("no answer", "leaves")


def test_what_went_to_the_cloud_before_does_not_leave_now() -> None:
    """Also if the cloud failed and the device answered: the content was sent."""
    records = [record_of(CLOUD_FIRST), record_of(CLOUD_FIRST, fails=("large",))]
    assert replay(records, policy("name: cloud, use: [large]")).leaving == ()


# --- signals that were not recorded ----------------------------------------------------------------------------------

BY_LENGTH = policy("name: short, use: [small], when: request.prompt_tokens < 48", "name: long, use: [large]")


def test_a_signal_that_was_not_recorded_makes_the_outcome_unknown() -> None:
    (unknown,) = (report := replay([record_of(EDGE_FIRST)], BY_LENGTH)).unknown
    assert (unknown.hangs_on, unknown.possible) == (("request.prompt_tokens",), ("large (cloud)", "small (edge)"))
    assert (report.unchanged, report.moves) == (0, ())


def test_a_recorded_signal_decides() -> None:
    records = [record_of(EDGE_FIRST, estimates=Estimates(prompt_tokens=tokens), record_all=True) for tokens in (10, 90)]
    report = replay(records, BY_LENGTH)
    assert (report.unknown, report.unchanged) == ((), 1)


def test_a_signal_that_was_absent_is_not_unknown() -> None:
    """The device could not count: under the new policy it cannot either."""
    report = replay([record_of(EDGE_FIRST, record_all=True)], BY_LENGTH)
    assert (report.unknown, moves(report)) == ((), [("small (edge)", "large (cloud)", "long", 1)])


@pytest.mark.parametrize(
    "condition",
    [
        "request.prompt_tokens < 48 || edge.queue >= 0",
        "request.prompt_tokens < 48 && edge.queue < 0",
        "edge.queue >= 0",
    ],
)
def test_an_unrecorded_signal_that_decides_nothing_leaves_the_outcome_known(condition: str) -> None:
    new = policy(f"name: a, use: [small], when: '{condition}'", "name: b, use: [large]")
    assert replay([record_of(EDGE_FIRST)], new).unknown == ()


def test_whether_an_unrecorded_signal_is_present_is_unknown_as_well() -> None:
    new = policy("name: a, use: [small], when: has(edge.quality)", "name: b, use: [large]")
    assert len(replay([record_of(EDGE_FIRST)], new).unknown) == 1


def test_rules_that_lead_to_the_same_place_leave_the_outcome_known() -> None:
    new = policy("name: a, use: [large], when: request.prompt_tokens < 48", "name: b, use: [large]")
    assert moves(replay([record_of(EDGE_FIRST)], new)) == [("small (edge)", "large (cloud)", "a or b", 1)]


def test_an_unknown_constraint_counts_as_leaving() -> None:
    """Fail closed: it may not bind, and then the request may leave."""
    long_stays = "constraints:\n  - {name: long-stays, keep: on_device, when: request.prompt_tokens > 48}\n"
    new = policy("name: edge, use: [small, large]", constraints=long_stays)
    (leaving,) = replay([record_of(EDGE_FIRST, ask(tags=("private",)))], new).leaving
    assert (leaving.cause, leaving.hangs_on) == ("unknown", ("request.prompt_tokens",))
    inside = policy(
        "name: edge, use: [small]",
        constraints="constraints:\n  - {name: l, keep: on_device, when: request.prompt_tokens > 48}\n",
    )
    assert replay([record_of(EDGE_FIRST, ask(tags=("private",)))], inside).leaving == (), "it stays in either case"


def test_unknown_counts_as_leaving_if_the_request_could_not_leave_before() -> None:
    (leaving,) = replay([record_of(EDGE_FIRST, ask(tags=("private",)))], BY_LENGTH).leaving
    assert (leaving.cause, leaving.after) == ("unknown", "small (edge) or large (cloud)")


def test_a_handoff_that_was_not_measured_is_unknown() -> None:
    handoff = policy("name: e, use: [small, large], handoff: {after_tokens: 8, below: 0.55}")
    (unknown,) = replay([record_of(CLOUD_FIRST)], handoff).unknown
    assert unknown.hangs_on == ("confidence",)


@pytest.mark.parametrize(("below", "places"), [(0.3, []), (0.9, ["large (cloud)"])])
def test_a_recorded_confidence_decides_another_threshold(below: float, places: list[str]) -> None:
    old = policy("name: e, use: [small, large], handoff: {after_tokens: 8, below: 0.55}")
    new = policy(f"name: e, use: [small, large], handoff: {{after_tokens: 8, below: {below}}}")
    report = replay([record_of(old, confidence=0.7)], new)
    assert [after for _, after, _, _ in moves(report)] == places
    assert len(report.leaving) == len(places)
    handed_off = record_of(old, confidence=0.4)
    assert replay([handed_off], old).unchanged == 1


def test_a_models_own_temperature_comes_from_the_device() -> None:
    """Off the device it is not known; the record has it for the models of its policy, and no other."""
    own = HEAD.replace(", temperature: 0}", "}")
    routes = ("name: greedy, use: [small], when: request.temperature == 0.0", "name: other, use: [medium]")
    on_device = parse_policy(own + "routes:\n  - {name: e, use: [small, large]}\n", model_temperature=lambda _: 0.0)
    cloud = own.replace("at: cloud, model: assistant-large", "at: edge, model: another")
    record = record_of(on_device, ask(temperature=None))
    free = "version: 1\nname: t\ntargets:\n  small: {at: edge, model: assistant}\nroutes:\n"
    only = parse_policy(free + "  - {name: g, use: [small], when: request.temperature == 0.0}\n")
    assert [move.rule_after for move in replay([record], only).moves] == ["g"]
    (unknown,) = replay([record], policy(*routes, head=cloud)).unknown
    assert unknown.hangs_on == ("request.temperature",)


# --- cost and latency ------------------------------------------------------------------------------------------------


def test_cost_is_that_of_the_same_tokens() -> None:
    records = [record_of(CLOUD_FIRST, number=n) for n in range(10)]
    cost = replay(records, policy("name: m, use: [medium]")).cost
    assert (cost.before_usd, cost.after_least_usd, cost.after_most_usd) == (1.0, 0.5, 0.5)
    assert replay(records, CLOUD_FIRST).cost.after_most_usd == 1.0


def test_an_unknown_outcome_has_a_range_of_cost() -> None:
    cost = replay([record_of(CLOUD_FIRST)], BY_LENGTH).cost
    assert (cost.before_usd, cost.after_least_usd, cost.after_most_usd) == (0.1, 0.0, 0.1)


def mixed(count: int = 100) -> list[DecisionRecord]:
    """Of each place as many: the device takes 100 ms to 199 ms, the cloud 1000 ms to 1099 ms."""
    edge = [record_of(EDGE_FIRST, total_ms=100.0 + n, number=n) for n in range(count)]
    return edge + [record_of(CLOUD_FIRST, total_ms=1000.0 + n, number=n + count) for n in range(count)]


def test_latency_after_a_move_is_what_was_observed_there() -> None:
    report = replay(mixed(), EDGE_FIRST)
    median = next(row for row in report.latency.rows if (row.time, row.share) == ("whole answer", 0.5))
    assert median.before.value == 199.0
    assert median.after.value == 149.0
    assert 100.0 < median.after.low < 149.0 < median.after.high < 199.0
    assert [(target.at, target.answers) for target in report.targets] == [("cloud", 100), ("edge", 100)]


def test_a_place_that_was_rarely_seen_is_not_estimated() -> None:
    report = replay(mixed(), policy("name: m, use: [medium]"))
    assert (report.latency.requests, report.latency.not_estimated, report.latency.rows) == (0, 200, ())


def test_the_report_is_the_same_twice() -> None:
    """Byte for byte."""
    reports = [msgspec.json.encode(replay(mixed(30), BY_LENGTH)) for _ in range(2)]
    assert reports[0] == reports[1]


def test_no_records_make_an_empty_report() -> None:
    report = replay([], EDGE_FIRST)
    assert (report.requests, report.moves, report.latency.rows) == (0, (), ())


def test_an_engine_that_is_not_loaded_is_down_under_the_new_policy_too() -> None:
    cold = Snapshot(edge=EdgeSignals(queue=0, loaded=False), cloud=DEVICE.cloud, setup=DEVICE.setup)
    report = replay([record_of(CLOUD_FIRST, snapshot=cold)], policy("name: e, use: [small, large]"))
    assert (report.unchanged, report.leaving) == (1, ())
