"""LoRA adapters: targets that a client may name, and that routes use only where the policy names one."""

from __future__ import annotations

import pytest

from causeway_server.router.decision.decide import decide
from causeway_server.router.errors import ModelNotFound, PolicyError
from causeway_server.router.policy.compiled import Policy, check_policy, parse_policy, with_adapters
from causeway_server.router.types import Estimates, Reason, Snapshot
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


ADAPTERS = {"a": ("kiosk", "shop"), "b": ("kiosk",)}
NAMED = TEXT.replace(
    "large: {at: cloud, model: b}", "large: {at: cloud, model: b+c}\n  desk: {at: edge, model: a+kiosk}"
)


def adapted(text: str = TEXT) -> Policy:
    return with_adapters(parse_policy(text), ADAPTERS.get)


@pytest.mark.parametrize("model", ["small+kiosk", "a+kiosk"])
def test_an_adapter_is_named_behind_its_target_or_its_model(model: str) -> None:
    decision = decide(adapted(), chat(model=model), Snapshot(), Estimates())
    (plan,) = decision.attempts
    assert (plan.target.name, plan.target.model, plan.target.adapter) == ("small+kiosk", "a", "kiosk")
    assert (plan.target.temperature, plan.handoff) == (0.3, None)
    assert Reason("model_named", detail=model) in decision.reasons


def test_adapters_of_the_device_are_listed_and_those_of_the_cloud_are_not() -> None:
    assert adapted().model_names == ("auto", "small", "large", "small+kiosk", "small+shop")
    assert with_adapters(parse_policy(TEXT), lambda _: ()).model_names == ("auto", "small", "large")


@pytest.mark.parametrize("model", ["a", "small", "auto"])
def test_without_its_name_no_adapter_answers(model: str) -> None:
    decision = decide(adapted(), chat(model=model), Snapshot(), Estimates())
    assert {plan.target.adapter for plan in decision.attempts} == {""}


@pytest.mark.parametrize("model", ["small+", "+kiosk", "small+nope", "b+kiosk", "small+kiosk+shop"])
def test_an_unknown_adapter_is_refused_with_the_names_there_are(model: str) -> None:
    with pytest.raises(ModelNotFound, match=r"Available: auto, small, large, small\+kiosk, small\+shop"):
        decide(adapted(), chat(model=model), Snapshot(), Estimates())


def test_a_route_uses_an_adapter_that_its_target_names() -> None:
    """Without handing the cloud's model apart; a client that names the model gets the policy's own target alone."""
    policy = adapted(NAMED.replace("use: [small, large]", "use: [desk, large]"))
    targets = {target.name: (target.model, target.adapter, target.served) for target in policy.offered}
    assert targets["desk"] == ("a", "kiosk", "a+kiosk")
    assert targets["large"] == ("b+c", "", "b+c")
    assert "desk+shop" not in targets
    first, second = decide(policy, chat(), Snapshot(), Estimates()).attempts
    assert (first.target.name, second.target.name) == ("desk", "large")
    (plan,) = decide(policy, chat(model="a+kiosk"), Snapshot(), Estimates()).attempts
    assert plan.target.name == "desk"


def test_a_target_whose_adapter_the_device_lacks_is_refused() -> None:
    """A model that is not there is the engine's to report."""
    with pytest.raises(PolicyError, match=r"targets\.desk\.model.*a has no adapter `kiosk`.*Available: shop"):
        with_adapters(parse_policy(NAMED), lambda _: ("shop",))
    assert with_adapters(parse_policy(NAMED), lambda _: None).adapted == ()


@pytest.mark.parametrize("model", ["a+", "a+b+c", "a+B", "+b"])
def test_a_model_with_half_an_adapter_is_a_mistake(model: str) -> None:
    policy, problems = check_policy(NAMED.replace("a+kiosk", model))
    assert policy is None
    (error,) = [problem.message for problem in problems if problem.severity == "error"]
    assert "MODEL+ADAPTER" in error or "a model name of" in error


def test_no_shadow_request_follows_an_adapter_s_answer() -> None:
    text = NAMED + "shadow: {share: 1.0, usd_per_day: 1.0}\n"
    assert decide(adapted(text), chat(), Snapshot(), Estimates()).shadow is not None
    text = text.replace("use: [small, large]", "use: [desk, large]")
    assert decide(adapted(text), chat(), Snapshot(), Estimates()).shadow is None
