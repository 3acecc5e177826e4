"""LoRA adapters: targets that a client may name, and that no route uses."""

from __future__ import annotations

import pytest

from router.decision.decide import decide, model_names
from router.errors import ModelNotFound
from router.policy.adapters import with_adapters
from router.policy.compiled import Policy, parse_policy
from router.types import Estimates, Reason, Snapshot
from tests.router.sample_requests import chat

TEXT = """
version: 1
name: p
targets:
  small: {at: edge, model: a, temperature: 0.3}
  large: {at: cloud, model: b}
constraints:
  - {name: private-stays, when: '"private" in request.tags', keep: on_device}
routes:
  - {name: all, use: [small, large]}
"""


def adapted() -> Policy:
    return with_adapters(parse_policy(TEXT), {"a": ("kiosk", "shop"), "b": ("kiosk",)}.__getitem__)


@pytest.mark.parametrize("model", ["small+kiosk", "a+kiosk"])
def test_an_adapter_is_named_behind_its_target_or_its_model(model: str) -> None:
    decision = decide(adapted(), chat(model=model), Snapshot(), Estimates())
    (plan,) = decision.attempts
    assert (plan.target.name, plan.target.model, plan.target.adapter) == ("small+kiosk", "a", "kiosk")
    assert (plan.target.temperature, plan.handoff) == (0.3, None)
    assert Reason("model_named", detail=model) in decision.reasons


def test_adapters_of_the_device_are_listed_and_those_of_the_cloud_are_not() -> None:
    assert model_names(adapted()) == ("auto", "small", "large", "small+kiosk", "small+shop")
    assert model_names(with_adapters(parse_policy(TEXT), lambda _: ())) == ("auto", "small", "large")


@pytest.mark.parametrize("model", ["a", "small", "auto"])
def test_without_its_name_no_adapter_answers(model: str) -> None:
    decision = decide(adapted(), chat(model=model), Snapshot(), Estimates())
    assert {plan.target.adapter for plan in decision.attempts} == {""}


@pytest.mark.parametrize("model", ["small+", "+kiosk", "small+nope", "b+kiosk", "small+kiosk+shop"])
def test_an_unknown_adapter_is_refused_with_the_names_there_are(model: str) -> None:
    with pytest.raises(ModelNotFound, match=r"available: auto, small, large, small\+kiosk, small\+shop"):
        decide(adapted(), chat(model=model), Snapshot(), Estimates())
