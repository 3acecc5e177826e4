"""Conditions that can never hold, and signals that no device can read."""

from __future__ import annotations

import pytest

from causeway_server.router.policy.compiled import check_policy
from causeway_server.router.policy.lint import contradiction

POLICY = """
version: 1
name: p
targets:
  small: {at: edge, model: a}
  large: {at: cloud, model: b}
constraints:
  - {name: stay, keep: on_device, when: CONSTRAINT}
routes:
  - {name: first, use: [large, small], when: ROUTE}
  - {name: last, use: [small, large]}
"""


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("device.cpu > 1.5", "`device.cpu > 1.5`: device.cpu is 0 to 1"),
        ("1.5 < device.cpu", "`1.5 < device.cpu`: device.cpu is 0 to 1"),
        ("now.hour > 23", "`now.hour > 23`: now.hour is 0 to 23"),
        ("now.weekday == 0", "`now.weekday == 0`: now.weekday is 1 to 7"),
        ("request.prompt_tokens < 0", "`request.prompt_tokens < 0`: request.prompt_tokens is at least 0"),
        ("edge.queue <= -1", "`edge.queue <= -1`: edge.queue is at least 0"),
        ("request.temperature > 2.0", "`request.temperature > 2.0`: request.temperature is 0 to 2"),
        ("edge.queue > 5 && edge.queue < 3", "`edge.queue > 5` and `edge.queue < 3` exclude each other"),
        ("edge.queue > 5 && edge.queue < 6", "`edge.queue > 5` and `edge.queue < 6` exclude each other"),
        ("now.hour >= 22 && now.hour < 6", "`now.hour >= 22` and `now.hour < 6` exclude each other"),
        ("device.cpu < 0.5 && (device.cpu >= 0.5 && cloud.reachable)", "exclude each other"),
        ("edge.queue == 1 && edge.queue == 2", "`edge.queue == 1` and `edge.queue == 2` exclude each other"),
        ('request.kind == "chat" && request.kind == "embedding"', "exclude each other"),
        ("cloud.reachable && !cloud.reachable", "`cloud.reachable` and `!cloud.reachable` exclude each other"),
        ("!has(device.battery) && device.battery < 0.2", "requires to be absent"),
        ("device.cpu > 2.0 || now.hour > 30", "device.cpu is 0 to 1; `now.hour > 30`"),
        ("edge.queue > 1 && (device.cpu > 2.0 || now.hour > 30)", "device.cpu is 0 to 1"),
    ],
)
def test_a_condition_that_can_never_hold(condition: str, reason: str) -> None:
    assert reason in contradiction(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "device.cpu > 0.99",
        "device.cpu >= 1.0",
        "device.temperature_c < -20.0",
        "now.hour >= 22 || now.hour < 6",
        "edge.queue > 5 && edge.queue < 7",
        "device.cpu > 0.4 && device.cpu < 0.5",
        '"a" in request.tags && "b" in request.tags',
        "!(edge.queue > 5) && edge.queue < 3",
        "device.cpu > 2.0 ? cloud.reachable : !cloud.reachable",
        "device.cpu > 2.0 || cloud.reachable",
        "!has(device.battery) || device.battery < 0.2",
        "has(device.battery) && device.battery < 0.2",
        "edge.queue + 1 > 5 && edge.queue < 2",
        "request.n * 2 == 3",
    ],
)
def test_a_condition_that_may_hold(condition: str) -> None:
    assert contradiction(condition) == ""


def warnings(
    *,
    constraint: str = "\"'a' in request.tags\"",
    route: str = "edge.queue > 1",
    readable: frozenset[str] | None = None,
) -> list[str]:
    text = POLICY.replace("CONSTRAINT", constraint).replace("ROUTE", route)
    policy, problems = check_policy(text, "p.yaml", readable=readable)
    assert policy is not None
    return [f"{problem.location.path}: {problem.message}" for problem in problems]


def test_lint_warns_of_a_rule_that_never_holds() -> None:
    assert warnings(route="now.hour > 23") == [
        "routes[0].when: the rule never holds: `now.hour > 23`: now.hour is 0 to 23"
    ]
    (warning,) = warnings(constraint="edge.queue > 5 && edge.queue < 3")
    assert warning.startswith("constraints[0].when: the constraint never binds: ")


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("edge.queue > 1", []),
        ("device.cpu > 0.5", ["routes[0].when: no device can read device.cpu: the rule never holds"]),
        ("device.cpu > 0.5 || edge.queue > 1", ["routes[0].when: no device can read device.cpu"]),
        (
            "has(device.cpu) && device.cpu > 0.5",
            ["routes[0].when: no device can read device.cpu: the rule never holds"],
        ),
        ("request.n > 1 && now.hour > 5", []),
    ],
)
def test_lint_warns_of_signals_that_no_device_can_read(route: str, expected: list[str]) -> None:
    assert warnings(route=route, readable=frozenset({"edge.queue"})) == expected


def test_a_constraint_on_a_signal_that_no_device_can_read_always_binds() -> None:
    (warning,) = warnings(constraint="device.cpu > 0.5", readable=frozenset({"edge.queue"}))
    assert warning == "constraints[0].when: no device can read device.cpu: it always binds"


def test_a_signal_that_the_devices_can_read_is_not_likely_absent() -> None:
    assert len(warnings(route="device.battery < 0.2")) == 1
    assert warnings(route="device.battery < 0.2", readable=frozenset({"device.battery"})) == []
