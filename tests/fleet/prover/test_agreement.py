"""The formulas of a policy say what `decide` and `plan_cache` do."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest
import z3

from causeway_server.fleet.prover.outcome import World
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.policy.outcomes import OUTCOMES

from .agreement import Agreement
from .policies import drawn

GROUPS, POLICIES, PAIRS = 8, 4, 700  # fewer are compared: some requests have more unknown tags than a formula


@pytest.fixture(autouse=True)
def _deep() -> Iterator[None]:
    """Formulas are deep, and the tests walk them."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("group", range(GROUPS))
def test_formulas_agree_with_decisions(group: int) -> None:
    """Each fact of each outcome, for 20,000 fixed pairs of a policy and a request in all groups together."""
    compared = 0
    for at, (text, policy) in enumerate(itertools.islice(drawn(group), POLICIES)):
        agreement = Agreement(policy, at)
        found = next(agreement.disagreements(PAIRS), None)
        assert found is None, f"{text}\n{found}"
        compared += agreement.compared
    assert compared >= 20_000 / GROUPS


def test_formulas_agree_with_decisions_of_requests_that_variants_answer() -> None:
    """Of drawn policies, and of one whose targets have adapters where their variants have none, and the other way."""
    text = (
        "version: 1\nname: a\ntargets:\n"
        "  s: {at: edge, model: m+ad, variants: [{model: v, share: 5}]}\n"
        "  t: {at: edge, model: o, variants: [{model: w, share: 5}, {model: w+ad, share: 5}]}\n"
        "  l: {at: cloud, model: n, variants: [{model: x, share: 5}]}\n"
        "constraints: [{name: c, keep: on_device, when: '\"private\" in request.tags'}]\n"
        "routes: [{name: a, when: request.stream, use: [s, l]}, {name: b, use: {best_of: [t, l]}}]\n"
        "shadow: {share: 0.1}\nsession: {pin: conversation}\n"
    )
    policies = [parse_policy(text), *(policy for _, policy in itertools.islice(drawn(5), 24) if policy.places)]
    assert len(policies) > 3
    for at, policy in enumerate(policies):
        for last in (False, True):
            chosen = {name: place.variants[-1 if last else 0].model for name, place in policy.places.items()}
            agreement = Agreement(policy, at, chosen)
            assert next(agreement.disagreements(300), None) is None


def test_each_fact_of_an_outcome_occurs_among_the_pairs() -> None:
    """Else the comparison would say nothing about it."""
    seen = dict.fromkeys(OUTCOMES, 0)
    for at, (_, policy) in enumerate(itertools.islice(drawn(3), 18)):
        agreement = Agreement(policy, at)
        assert list(agreement.disagreements(100)) == []
        for name, count in agreement.seen.items():
            seen[name] += count
    assert [name for name, count in seen.items() if not count] == []


@pytest.mark.parametrize("applies", ["always", "only_where_measured"])
@pytest.mark.parametrize("use", ["[s, l, e]", "{best_of: [s, l, e]}"])
def test_formulas_agree_on_a_promise_with_and_without_evidence(applies: str, use: str) -> None:
    text = (
        "version: 1\nname: a\ntargets: {s: {at: edge, model: m}, l: {at: cloud, model: n}, "
        'e: {at: "cloud:eu", model: o}}\n'
        "constraints: [{name: c, keep: on_device, when: '\"private\" in request.tags'}]\n"
        f"routes: [{{name: r, use: {use}, handoff: {{after_tokens: 8, below: 0.3}}, "
        f"promise: {{of: l, keep: 0.95, applies: {applies}}}}}]\n"
        "shadow: {share: 0.1}\nsession: {pin: tool_loop}\n"
    )
    agreement = Agreement(parse_policy(text), 1)
    assert list(agreement.disagreements(1_500)) == []
    assert {"outcome.handoff", "outcome.shadow"} <= {name for name, count in agreement.seen.items() if count}


def test_a_formula_of_another_policy_is_seen() -> None:
    """The comparison fails if the policy decides otherwise than its formulas."""
    text = (
        "version: 1\nname: a\ntargets: {s: {at: edge, model: m}, l: {at: cloud, model: n}}\n"
        'constraints: [{name: c, keep: on_device, when: "device.battery >= 0.25"}]\nroutes: [{name: r, use: [l, s]}]\n'
    )
    agreement = Agreement(parse_policy(text), 1)
    assert list(agreement.disagreements(100)) == []
    agreement.policy = parse_policy(text.replace(">= 0.25", "> 0.25"))
    assert {one.name for one in agreement.disagreements(400)} >= {"outcome.leaves"}


def test_the_evaluation_in_python_is_that_of_z3() -> None:
    for at, (_, policy) in enumerate(itertools.islice(drawn(4), 6)):
        agreement = Agreement(policy, at)
        for _ in range(3):
            by_z3, values = agreement.values_by_z3()
            assert [z3.is_true(one) for one in by_z3] == [bool(one) for one in values]


def test_a_world_knows_the_texts_of_all_its_policies() -> None:
    first, second = (policy for _, policy in itertools.islice(drawn(1), 2))
    assert set(World([first, second]).models) >= {*first.named, *second.named}
