"""A cache plan is reused only while nothing that its rules read has changed."""

from __future__ import annotations

import pytest

from router.decision.decide import CachePlanMemo, CachePlanner
from router.policy.compiled import Policy, parse_policy
from router.types import DeviceSignals, Message, Request, Sampling, Snapshot

ASK = Request(kind="chat", model="auto", messages=(Message("user", "hi"),), sampling=Sampling(temperature=0.0))
COOL, HOT = (Snapshot(device=DeviceSignals(temperature_c=degrees)) for degrees in (40.0, 90.0))


def policy(when: str, name: str = "p") -> Policy:
    text = f"""
version: 1
name: {name}
targets: {{small: {{at: edge, model: assistant}}}}
routes: [{{name: all, use: [small]}}]
cache: [{{when: '{when}', exact: {{ttl: 30s}}}}]
"""
    return parse_policy(text, "p.yaml")


def test_a_rule_about_the_device_is_evaluated_again_when_the_device_changes() -> None:
    plans, memo, rules = CachePlanner(), CachePlanMemo(), policy("device.temperature_c < 80")
    planned = [plans.plan_memoized(rules, ASK, now, memo) for now in (COOL, COOL, HOT, COOL)]
    assert [one.key is not None for one in planned] == [True, True, False, True]
    assert planned[0] is planned[1]


@pytest.mark.parametrize("when", ["request.temperature == 0", '!("private" in request.tags)'])
def test_a_rule_about_the_request_alone_is_evaluated_once(when: str) -> None:
    plans, memo, rules = CachePlanner(), CachePlanMemo(), policy(when)
    assert plans.plan_memoized(rules, ASK, COOL, memo) is plans.plan_memoized(rules, ASK, HOT, memo)


def test_prompt_tokens_are_an_estimate_not_part_of_the_request() -> None:
    """The signal depends on the engine, which counts them."""
    assert not policy("request.prompt_tokens < 9").cache_needs.request_only
    assert not policy("has(request.prompt_tokens)").cache_needs.request_only


def test_another_policy_is_planned_again() -> None:
    """Also under the same snapshot."""
    plans, memo = CachePlanner(), CachePlanMemo()
    kept = plans.plan_memoized(policy("request.temperature == 0"), ASK, COOL, memo)
    dropped = plans.plan_memoized(policy("request.temperature > 0"), ASK, COOL, memo)
    assert kept.key is not None
    assert dropped.key is None
