"""A cache plan is reused only while nothing that its rules read has changed."""

from __future__ import annotations

import pytest

from causeway_server.router.decision.decide import CachePlanner, RequestMemo
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import DeviceSignals, Message, Request, Sampling, Snapshot

REQUEST = Request(kind="chat", model="auto", messages=(Message("user", "hi"),), sampling=Sampling(temperature=0.0))
COOL, HOT = (Snapshot(device=DeviceSignals(temperature_c=degrees)) for degrees in (40.0, 90.0))


def policy_with(when: str, name: str = "p") -> Policy:
    text = f"""
version: 1
name: {name}
targets: {{small: {{at: edge, model: assistant}}}}
routes: [{{name: all, use: [small]}}]
cache: [{{when: '{when}', exact: {{ttl: 30s}}}}]
"""
    return parse_policy(text, "p.yaml")


def test_a_rule_about_the_device_is_evaluated_again_when_the_device_changes() -> None:
    planner, memo, policy = CachePlanner(), RequestMemo(), policy_with("device.temperature_c < 80")
    planned = [planner.plan_memoized(policy, REQUEST, now, memo) for now in (COOL, COOL, HOT, COOL)]
    assert [plan.key is not None for plan in planned] == [True, True, False, True]
    assert planned[0] is planned[1]


@pytest.mark.parametrize("when", ["request.temperature == 0", '!("private" in request.tags)'])
def test_a_rule_about_the_request_alone_is_evaluated_once(when: str) -> None:
    planner, memo, policy = CachePlanner(), RequestMemo(), policy_with(when)
    assert planner.plan_memoized(policy, REQUEST, COOL, memo) is planner.plan_memoized(policy, REQUEST, HOT, memo)


def test_prompt_tokens_are_an_estimate_not_part_of_the_request() -> None:
    """The signal depends on the engine, which counts them."""
    assert not policy_with("request.prompt_tokens < 9").cache_needs.request_only
    assert not policy_with("has(request.prompt_tokens)").cache_needs.request_only


def test_another_policy_is_planned_again() -> None:
    """Also under the same snapshot."""
    planner, memo = CachePlanner(), RequestMemo()
    cached = planner.plan_memoized(policy_with("request.temperature == 0"), REQUEST, COOL, memo)
    uncached = planner.plan_memoized(policy_with("request.temperature > 0"), REQUEST, COOL, memo)
    assert cached.key is not None
    assert uncached.key is None
