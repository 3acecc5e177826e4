"""A route's promise of quality in decisions: its threshold, and what happens without evidence."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.decision.decide import decide
from causeway_server.router.policy.compiled import Policy, check_policy, parse_policy
from causeway_server.router.types import (
    Decision,
    Estimates,
    Message,
    PromiseSignals,
    Request,
    RoutingHints,
    Session,
    Snapshot,
    Tool,
)

TEXT = """
version: 1
name: promised
targets:
  small: {at: edge, model: s}
  large: {at: cloud, model: l, price: {input: 1}}
  other: {at: "cloud:eu", model: o, price: {input: 1}}
constraints: [{name: private, when: '"private" in request.tags', keep: on_device}]
routes:
  - name: all
    use: [small, large, other]
    handoff: {after_tokens: 8, below: 0.3}
    promise: {of: large, keep: 0.95}
shadow: {share: 0.001}
"""
CLOSED = Snapshot(promises={"all": PromiseSignals(None, 7, "7 of 120 labelled answers")})


def opened(threshold: float) -> Snapshot:
    return Snapshot(promises={"all": PromiseSignals(threshold, 500)})


def decided(snapshot: Snapshot, text: str = TEXT, *, session: Session | None = None, **request: object) -> Decision:
    asked = Request(kind="chat", model="auto", messages=(Message(role="user", content="x"),))
    asked = msgspec.structs.replace(asked, **request)
    return decide(parse_policy(text), asked, snapshot, Estimates(session=session))


def targets(decision: Decision) -> list[str]:
    return [plan.target.name for plan in decision.attempts]


def told(decision: Decision) -> list[tuple[str, str]]:
    return [(one.code, one.detail) for one in decision.reasons if one.code.startswith("promise")]


def test_the_evidence_sets_the_threshold() -> None:
    decision = decided(opened(0.8))
    assert targets(decision) == ["small", "large", "other", "small"]
    assert [plan.handoff.below for plan in decision.attempts if plan.handoff is not None] == [0.8]
    assert told(decision) == [("promise_kept", "0.800")]
    assert decision.promise is not None


def test_the_policys_own_threshold_is_the_lowest() -> None:
    decision = decided(opened(0.1))
    assert [plan.handoff.below for plan in decision.attempts if plan.handoff is not None] == [0.3]


@pytest.mark.parametrize("snapshot", [CLOSED, Snapshot()], ids=["short", "none"])
def test_without_evidence_the_clouds_answer_first(snapshot: Snapshot) -> None:
    decision = decided(snapshot)
    assert targets(decision) == ["large", "other", "small"]
    assert all(plan.handoff is None for plan in decision.attempts)
    ((code, detail),) = told(decision)
    assert (code, "label" in detail) == ("promise_unmeasured", True)
    assert decision.promise is not None  # the cloud's answers are labelled


def test_a_cloud_that_is_down_is_tried_last() -> None:
    decision = decided(msgspec.structs.replace(CLOSED, down=frozenset({"large", "other"})))
    assert targets(decision) == ["small", "large", "other"]
    one = decided(msgspec.structs.replace(CLOSED, down=frozenset({"large"})))
    assert targets(one) == ["other", "small", "large"]


def test_a_request_that_gives_no_label_goes_to_the_cloud() -> None:
    decision = decided(opened(0.8), tools=(Tool(name="t"),))
    assert targets(decision)[0] == "large"
    assert told(decision) == [("promise_unmeasured", "the request gives no label")]
    assert decision.promise is None


def test_or_follows_the_route_where_the_promise_is_for_measured_ones_only() -> None:
    text = TEXT.replace("keep: 0.95", "keep: 0.95, applies: only_where_measured")
    for snapshot, request in ((opened(0.8), {"tools": (Tool(name="t"),)}), (CLOSED, {})):
        decision = decided(snapshot, text, **request)  # type: ignore[arg-type]
        assert targets(decision) == ["small", "large", "other", "small"]
        assert told(decision)[0][0] == "promise_unmeasured"
    assert told(decided(opened(0.8), text)) == [("promise_kept", "0.800")]


@pytest.mark.parametrize(
    "hints", [RoutingHints(tags=("private",)), RoutingHints(prefer="only_on_device")], ids=["private", "preferred"]
)
@pytest.mark.parametrize("snapshot", [opened(0.8), CLOSED], ids=["open", "closed"])
def test_what_is_bound_stays_on_the_device_outside_of_the_promise(hints: RoutingHints, snapshot: Snapshot) -> None:
    decision = decided(snapshot, hints=hints)
    assert targets(decision) == ["small"]
    assert told(decision) == [("promise_unmeasured", "the request gives no label")]
    assert decision.promise is None


def test_a_request_that_names_a_model_and_a_pinned_one_have_no_promise() -> None:
    assert told(decided(opened(0.8), model="small")) == []
    pinned = TEXT + "session: {pin: conversation}\n"
    session = Session(target="small", model="s")
    decision = decided(CLOSED, pinned, session=session)
    assert (targets(decision)[0], told(decision)) == ("small", [])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    handoff: {after_tokens: 8, below: 0.3}\n", "", "needs `handoff`"),
        ("shadow: {share: 0.001}\n", "", "needs `shadow`"),
        ("of: large", "of: small", "not a cloud target of this route"),
        ("of: large", "of: huge", "not a cloud target of this route"),
        ("of: large", "of: other", "a cloud target precedes `other`"),
        ("keep: 0.95", "keep: 1.0", "0.999"),
    ],
)
def test_lint_refuses(old: str, new: str, message: str) -> None:
    policy, problems = check_policy(TEXT.replace(old, new))
    assert policy is None
    assert any(message in problem.message for problem in problems if problem.severity == "error")


def test_a_policy_without_a_promise_says_nothing() -> None:
    policy: Policy = parse_policy(TEXT.replace("    promise: {of: large, keep: 0.95}\n", ""))
    assert all(route.promise is None for route in policy.routes)
    assert (
        told(
            decide(
                policy,
                Request(kind="chat", model="auto", messages=(Message(role="user", content="x"),)),
                CLOSED,
                Estimates(),
            )
        )
        == []
    )
