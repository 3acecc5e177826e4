"""`best_of`: the order by score, its reasons, its fallback, and what a replay may conclude."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.checks.possible import ESTIMATES, PolicyReplay
from causeway_server.router.decision.decide import decide, features_of
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.types import (
    Candidate,
    Decision,
    DecisionRecord,
    EdgeSignals,
    Estimates,
    Outcome,
    Request,
    RoutingHints,
    Snapshot,
)
from tests.router.sample_requests import chat

FILE = """
version: 1
name: best
targets:
  small:  {at: edge, model: s}
  medium: {at: cloud, model: m, price: {input: 1000, output: 1000}}
  large:  {at: cloud, model: l, price: {input: 10000, output: 10000}}
routes:
  - name: scored
    use: {best_of: [small, medium, large], weights: WEIGHTS}
"""
SMALL, MEDIUM, LARGE = (
    Candidate("edge", "s", quality=0.5, answer_tokens=100, latency_s=4.0),
    Candidate("cloud", "m", quality=0.7, answer_tokens=100, latency_s=1.0),
    Candidate("cloud", "l", quality=0.9, answer_tokens=100, latency_s=2.0),
)
ALL = (SMALL, MEDIUM, LARGE)


def decided(weights: str, *candidates: Candidate, prompt_tokens: int | None = 100, **changes: object) -> Decision:
    request = msgspec.structs.replace(chat(), **changes)
    estimates = Estimates(prompt_tokens=prompt_tokens, candidates=candidates)
    return decide(parse_policy(FILE.replace("WEIGHTS", weights)), request, Snapshot(), estimates)


def order(decision: Decision) -> list[str]:
    return [plan.target.name for plan in decision.attempts]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("{quality: 1}", ["large", "medium", "small"]),
        ("{}", ["large", "medium", "small"]),
        ("{quality: 1, usd: 0.15}", ["medium", "large", "small"]),
        ("{quality: 1, usd: 2}", ["small", "medium", "large"]),
        ("{quality: 0, latency: 1}", ["medium", "large", "small"]),
        ("{quality: 1, latency: 0.25}", ["medium", "large", "small"]),
    ],
)
def test_targets_are_tried_in_the_order_of_their_scores(weights: str, expected: list[str]) -> None:
    assert order(decided(weights, *ALL)) == expected


def test_each_candidate_s_estimates_and_score_are_reasons() -> None:
    reasons = {
        one.target: one.detail for one in decided("{quality: 1, usd: 2, latency: 0.1}", *ALL).reasons if one.detail
    }
    assert reasons == {
        "small": "score 0.1000: quality 0.500, 0.000000 USD, 4.00 s",
        "medium": "score 0.2000: quality 0.700, 0.200000 USD, 1.00 s",
        "large": "score -3.3000: quality 0.900, 2.000000 USD, 2.00 s",
    }


def test_without_an_estimate_of_quality_the_order_of_the_list_stays() -> None:
    """Also if the target is not known at all; a score that needs no quality is compared nevertheless."""
    for known in ((), (SMALL, LARGE), (SMALL, msgspec.structs.replace(MEDIUM, quality=None), LARGE)):
        decision = decided("{quality: 1}", *known)
        assert order(decision) == ["small", "medium", "large"]
        assert {one.target for one in decision.reasons if one.code == "estimate_absent"} >= {"medium"}
    assert order(decided("{quality: 0, usd: 1}")) == ["small", "medium", "large"]


def test_a_target_that_was_not_measured_counts_as_the_fastest() -> None:
    new = msgspec.structs.replace(SMALL, latency_s=None)
    assert order(decided("{quality: 0, latency: 1}", new, MEDIUM, LARGE)) == ["small", "medium", "large"]


def test_the_client_s_limit_bounds_the_expected_price() -> None:
    wide = decided("{quality: 1, usd: 0.1}", *ALL)
    tight = decided("{quality: 1, usd: 0.1}", *ALL, prompt_tokens=None, max_tokens=1)
    assert (order(wide)[0], order(tight)[0]) == ("large", "large")
    assert any("0.010000 USD" in one.detail for one in tight.reasons)
    assert any("2.560000 USD" in one.detail for one in decided("{quality: 0, usd: 1}", prompt_tokens=None).reasons)


def test_constraints_preferences_and_down_targets_come_before_the_score() -> None:
    hints = RoutingHints(prefer="only_on_device")
    assert order(decided("{quality: 1}", *ALL, hints=hints)) == ["small"]
    policy = parse_policy(FILE.replace("WEIGHTS", "{quality: 1}"))
    snapshot = Snapshot(down=frozenset({"large"}))
    decision = decide(policy, chat(), snapshot, Estimates(candidates=ALL))
    assert order(decision) == ["medium", "small", "large"]
    assert decision.skipped_target == "large"


def test_a_named_target_is_not_scored() -> None:
    decision = decided("{quality: 1}", *ALL, model="small")
    assert order(decision) == ["small"]
    assert {one.code for one in decision.reasons} == {"model_named"}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("{best_of: [small, medium], weights: {quality: 0}}", "routes[0].use.weights: are all 0"),
        ("{best_of: [small, small]}", "routes[0].use.best_of[1]: `small` is already in this list"),
        ("{best_of: [small, medum]}", "routes[0].use.best_of[1]: unknown target `medum`, did you mean `medium`?"),
        ("{best_of: [small]}", "routes[0].use"),
        ("{best_of: [small, medium], weights: {usd: -1}}", "routes[0].use.weights.usd"),
        ("{best_of: [small, medium], weight: {usd: 1}}", "unknown key"),
        ("small", "must be a list"),
    ],
)
def test_what_is_wrong_with_a_list_is_said_with_its_path(use: str, message: str) -> None:
    text = FILE.replace("{best_of: [small, medium, large], weights: WEIGHTS}", use)
    policy, problems = check_policy(text)
    assert policy is None
    assert any(message in str(problem) for problem in problems), [str(problem) for problem in problems]


def test_a_price_that_no_target_has_is_warned_of() -> None:
    text = (
        FILE.replace("WEIGHTS", "{usd: 1}")
        .replace(", price: {input: 10000, output: 10000}", "")
        .replace(", price: {input: 1000, output: 1000}", "")
    )
    _, problems = check_policy(text)
    assert any("has no effect" in problem.message for problem in problems)


def test_a_handoff_needs_an_edge_target_and_follows_the_scores() -> None:
    text = FILE.replace("WEIGHTS", "{quality: 1}") + "    handoff: {after_tokens: 4, below: 0.5}\n"
    best_small = (msgspec.structs.replace(SMALL, quality=0.95), MEDIUM, LARGE)
    decision = decide(parse_policy(text), chat(), Snapshot(), Estimates(candidates=best_small))
    assert order(decision) == ["small", "large", "medium", "small"]
    assert decision.attempts[0].handoff is not None
    decision = decide(parse_policy(text), chat(), Snapshot(), Estimates(candidates=ALL))
    assert [plan.handoff for plan in decision.attempts] == [None, None, None]


def recorded(request: Request, estimates: Estimates) -> DecisionRecord:
    outcome, snapshot = Outcome("ok", 200, "edge", target="small"), Snapshot(edge=EdgeSignals(loaded=True))
    return DecisionRecord("id", 0.0, features_of(request), estimates, (), snapshot, None, outcome)


def test_a_replay_without_recorded_estimates_leaves_the_first_target_open() -> None:
    replay = PolicyReplay(parse_policy(FILE.replace("WEIGHTS", "{quality: 1}")))
    known = replay.possible(recorded(chat(), Estimates(candidates=ALL)), chat())
    assert [order(one) for one in known.decisions if one] == [["large", "medium", "small"]]
    unknown = replay.possible(recorded(chat(), Estimates(candidates=(SMALL, LARGE))), chat())
    assert [order(one)[0] for one in unknown.decisions if one] == ["small", "medium", "large"]
    assert unknown.hangs_on == (ESTIMATES,)
