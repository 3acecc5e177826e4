"""What if a signal had been different: one recorded request, decided again."""

from __future__ import annotations

import math

import msgspec
import pytest

from causeway_server.router.checks.what_if import what_if
from causeway_server.router.decision.decide import decide, features_of
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.policy.signals import SIGNALS
from causeway_server.router.types import (
    DecisionRecord,
    DeviceSetup,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    Message,
    Outcome,
    Request,
    RoutingHints,
    Snapshot,
)

POLICY = """
version: 1
name: kiosk
targets:
  small: {at: edge, model: m-small}
  large: {at: cloud, model: m-large}
constraints:
  - {name: private-stays, when: '"private" in request.tags', keep: on_device}
routes:
  - {name: hot, when: device.temperature_c > 85.0, use: [large, small]}
  - {name: short, when: request.prompt_tokens < 30, use: [small, large]}
  - {name: otherwise, use: [large, small]}
cache:
  - {when: request.temperature == 0.0, exact: {ttl: 30s}}
"""


def policy(text: str = POLICY) -> Policy:
    return parse_policy(text, "policy.yaml")


COUNTED = Estimates(prompt_tokens=10)


def record(*, unrecorded: tuple[str, ...] = (), estimates: Estimates = COUNTED) -> DecisionRecord:
    request = Request(
        kind="chat", model="auto", messages=(Message("user", "secret"),), hints=RoutingHints(client="c", tags=("a",))
    )
    snapshot = Snapshot(
        device=DeviceSignals(temperature_c=60.0, memory_free_mb=math.inf),
        edge=EdgeSignals(queue=0, loaded=True),
        setup=DeviceSetup(engine=True, cloud=True),
    )
    return DecisionRecord(
        id="0" * 24,
        created=1.0,
        request=features_of(request),
        estimates=estimates,
        unrecorded=unrecorded,
        snapshot=snapshot,
        decision=decide(policy(), request, snapshot, estimates),
        outcome=Outcome("ok", 200, "edge"),
    )


def rules(changes: dict[str, object], **more: object) -> list[str]:
    decided = what_if(policy(), record(**more), changes).changed.decisions  # type: ignore[arg-type]
    return ["refused" if one is None else one.rule for one in decided]


def test_without_changes_the_decision_is_the_recorded_one() -> None:
    asked = record()
    answer = what_if(policy(), asked, {})
    assert answer.as_recorded == answer.changed
    assert answer.changed.decisions == (asked.decision,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device.temperature_c": 90}, "hot"),
        ({"device.temperature_c": None}, "short"),
        ({"request.prompt_tokens": 400}, "otherwise"),
        ({"request.prompt_tokens": 400, "device.temperature_c": 99.5}, "hot"),
    ],
)
def test_a_changed_signal_decides_again(changes: dict[str, object], expected: str) -> None:
    assert rules(changes) == [expected]


def test_a_constraint_binds_a_changed_request() -> None:
    (decision,) = what_if(policy(), record(), {"request.tags": ["private"]}).changed.decisions
    assert decision is not None
    assert decision.on_device
    assert [plan.target.name for plan in decision.attempts] == ["small"]


def test_a_cloud_that_goes_away_comes_last() -> None:
    (decision,) = what_if(policy(), record(), {"device.temperature_c": 90, "cloud.reachable": False}).changed.decisions
    assert decision is not None
    assert [plan.target.name for plan in decision.attempts] == ["small", "large"]


def test_a_signal_that_was_not_recorded_leaves_every_possible_decision() -> None:
    """Until it is set: then there is one."""
    unknown = {"unrecorded": ("request.prompt_tokens",), "estimates": Estimates()}
    answer = what_if(policy(), record(**unknown), {}).changed  # type: ignore[arg-type]
    assert ({one.rule for one in answer.decisions if one}, answer.hangs_on) == (
        {"short", "otherwise"},
        ("request.prompt_tokens",),
    )
    assert rules({"request.prompt_tokens": 5}, **unknown) == ["short"]


def test_the_cache_is_told() -> None:
    assert what_if(policy(), record(), {}).changed.cached is False
    assert what_if(policy(), record(), {"request.temperature": 0}).changed.cached is True


def test_every_signal_is_listed_with_its_recorded_value() -> None:
    """Named are those of the policy's rules; JSON takes every value."""
    listed = {each.name: each for each in what_if(policy(), record(), {}).signals}
    assert set(listed) == set(SIGNALS)
    assert listed["device.temperature_c"].value == 60.0
    assert listed["device.memory_free_mb"].value is None
    assert listed["request.prefer"].value == ""
    assert {name for name, each in listed.items() if each.named} == {
        "device.temperature_c",
        "request.prompt_tokens",
        "request.tags",
        "request.temperature",
    }
    msgspec.json.encode(tuple(listed.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_can_be_set_to_its_recorded_value(name: str) -> None:
    (value,) = [each.value for each in what_if(policy(), record(), {}).signals if each.name == name]
    answer = what_if(policy(), record(), {name: value})
    assert answer.as_recorded == answer.changed


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device.heat", 1, "not found"),
        ("device.temperature_c", "hot", "must be a number"),
        ("device.throttled", 1, "true or false"),
        ("request.prefer", "cloud", "must be one of"),
        ("request.kind", None, "cannot be absent"),
        ("request.tags", "a", "list of texts"),
        ("request.client", "c" * 300, "longer than"),
    ],
)
def test_a_value_that_the_signal_cannot_have_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        what_if(policy(), record(), {name: value})
    assert caught.value.param == name
