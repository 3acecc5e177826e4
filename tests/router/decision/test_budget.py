"""A policy's `budget`: what its price moves, and what it stops."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.decision.decide import decide
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.types import Decision, EnergySignals, Estimates, Request, Snapshot, SpendSignals
from tests.router.sample_requests import chat

from .test_best_of import ALL, FILE, order

HANDOFF = """
version: 1
name: handing
targets:
  small: {at: edge, model: s}
  large: {at: cloud, model: l, price: {input: 1000, output: 1000}}
routes: [{name: doubt, use: [small, large], handoff: {after_tokens: 8, below: 0.6}}]
budget: {usd_per_day: 4}
"""
BUDGET = FILE.replace("WEIGHTS", "{quality: 1}") + "budget: {usd_per_day: 4}\n"


def decided(left: float | None, price: float | None, file: str = BUDGET, tokens: int | None = 100) -> Decision:
    request: Request = msgspec.structs.replace(chat(), max_tokens=100)
    snapshot = Snapshot(spend=SpendSignals(0.0, 0.0, 0.0, usd_left=left, price=price))
    return decide(parse_policy(file), request, snapshot, Estimates(prompt_tokens=tokens, candidates=ALL))


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (None, ["large", "medium", "small"]),
        (0.0, ["large", "medium", "small"]),
        (0.15, ["medium", "large", "small"]),
        (2.0, ["small", "medium", "large"]),
    ],
)
def test_an_answer_must_gain_what_its_dollars_cost(price: float | None, expected: list[str]) -> None:
    decision = decided(100.0, price)
    assert order(decision) == expected
    scored = [one.detail for one in decision.reasons if one.code == "target_scored"]
    assert len(scored) == 3
    assert all(one.endswith(f", {price:.4g} for a USD of the budget" if price else " s") for one in scored)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (None, ["large", "medium", "small"]),  # no budget
        (2.9, ["large", "medium", "small"]),  # (100 * 1.25 + 64 + 100) tokens at 0.01 USD
        (2.8, ["medium", "small"]),
        (0.28, ["small"]),
        (-1.0, ["small"]),
    ],
)
def test_no_answer_may_cost_more_than_what_is_left(left: float | None, expected: list[str]) -> None:
    decision = decided(left, None)
    assert order(decision) == expected
    excluded = [one for one in decision.reasons if one.code == "budget_excluded"]
    assert [one.target for one in excluded] == [one for one in ("medium", "large") if one not in expected]
    assert all(one.detail.endswith("USD left") for one in excluded)


def test_a_prompt_that_was_not_counted_costs_a_token_a_byte() -> None:
    assert order(decided(2.9, None, tokens=None)) == ["large", "medium", "small"]  # a short one
    assert "large" not in order(decided(1.6, None, tokens=None))


def test_a_route_without_an_affordable_target_has_no_answer() -> None:
    alone = BUDGET.replace("[small, medium, large]", "[medium, large]")
    decision = decided(0.0, None, alone)
    assert not decision.attempts
    assert decision.reasons[-1].code == "no_route"


@pytest.mark.parametrize(("price", "below"), [(None, 0.6), (1.0, 0.4), (10.0, 0.0)])
def test_a_handoff_needs_more_doubt_if_money_is_short(price: float | None, below: float) -> None:
    """The cloud's answer of 100 tokens after a prompt of 100 costs 0.2 USD."""
    handoff = decided(100.0, price, HANDOFF).attempts[0].handoff
    assert handoff is not None
    assert handoff.below == pytest.approx(below)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("{usd_per_day: 4}", "{usd_per_day: 0}"), "budget.usd_per_day"),
        (("{usd_per_day: 4}", "{eur_per_day: 4}"), "eur_per_day"),
        ((", price: {input: 1000, output: 1000}", ""), "no target has a `price`"),
    ],
)
def test_a_budget_that_cannot_hold_is_refused(change: tuple[str, str], problem: str) -> None:
    assert problem in str(check_policy(HANDOFF.replace(*change), "policy.yaml")[1])


def test_a_budget_that_only_stops_is_told() -> None:
    assert "only stops" in str(check_policy(HANDOFF, "policy.yaml")[1])
    assert "only stops" not in str(check_policy(BUDGET, "policy.yaml")[1])


ENERGY = BUDGET.replace("{usd_per_day: 4}", '{battery: {until: "18:00"}, heat: {}}')
HANDING = HANDOFF.replace("{usd_per_day: 4}", "{heat: {}}")


def with_energy(energy: EnergySignals, file: str = ENERGY) -> Decision:
    request: Request = msgspec.structs.replace(chat(), max_tokens=100)
    return decide(parse_policy(file), request, Snapshot(energy=energy), Estimates(prompt_tokens=100, candidates=ALL))


@pytest.mark.parametrize(
    ("price", "wh", "expected"),
    [
        (None, (0.01, 0.001), ["large", "medium", "small"]),
        (10.0, (0.0001, 0.05), ["small", "large", "medium"]),  # 0.01 Wh on the device, 0.05 Wh in a cloud
        (10.0, (0.01, 0.0), ["large", "medium", "small"]),
    ],
)
def test_an_answer_must_gain_what_its_watt_hours_cost(
    price: float | None, wh: tuple[float, float], expected: list[str]
) -> None:
    decision = with_energy(EnergySignals(price=price, limit="battery", token_wh=wh[0], cloud_wh=wh[1]))
    assert order(decision) == expected
    scored = [one.detail for one in decision.reasons if one.code == "target_scored"]
    assert [one.endswith(f" Wh at {price or 0.0:.4g} (battery)") for one in scored] == [bool(price)] * 3


def test_an_empty_battery_stops_what_it_cannot_pay_for() -> None:
    assert order(with_energy(EnergySignals(wh_left=0.5, token_wh=0.01, cloud_wh=0.1))) == ["large", "medium"]
    empty = with_energy(EnergySignals(wh_left=-0.1, token_wh=None, cloud_wh=0.0))
    assert not empty.attempts
    assert [one.target for one in empty.reasons if one.code == "budget_excluded"] == ["small", "medium", "large"]


@pytest.mark.parametrize(("price", "below"), [(None, 0.6), (1.0, 0.6 + 0.092 - 0.012), (-1.0, 0.52), (1e9, 1.0)])
def test_a_handoff_needs_less_doubt_if_the_device_is_hot(price: float | None, below: float) -> None:
    """92 tokens are left to make, 0.001 Wh each; the cloud's answer takes 0.012 Wh."""
    decision = with_energy(EnergySignals(price=price, limit="heat", token_wh=0.001, cloud_wh=0.012), HANDING)
    assert decision.attempts[0].handoff is not None
    assert decision.attempts[0].handoff.below == pytest.approx(below)


def test_energy_of_another_policy_is_not_paid() -> None:
    recorded = EnergySignals(price=1e9, limit="battery", wh_left=-1.0, token_wh=1.0)
    assert order(with_energy(recorded, BUDGET)) == ["large", "medium", "small"]


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ("{}", "bounds nothing"),
        ('{battery: {until: "24:00"}}', "budget.battery.until"),
        ('{battery: {until: "06:00", since: "06:00"}}', "is also the time of `since`"),
        ("{heat: {limit_c: 200}}", "budget.heat.limit_c"),
    ],
)
def test_a_budget_of_energy_that_cannot_hold_is_refused(budget: str, problem: str) -> None:
    policy, problems = check_policy(HANDOFF.replace("{usd_per_day: 4}", budget), "policy.yaml")
    assert policy is None
    assert problem in str(problems)


def test_a_budget_of_energy_without_a_choice_is_told() -> None:
    alone = HANDING.replace("small, large], handoff: {after_tokens: 8, below: 0.6}", "small]")
    assert "nothing takes the device's work" in str(check_policy(alone, "policy.yaml")[1])
    assert "budget" not in str(check_policy(HANDING, "policy.yaml")[1])
