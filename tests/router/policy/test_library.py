"""Where the CEL library does otherwise than the language definition: what it does, and that lint says so."""

from __future__ import annotations

import pytest

from causeway_server.router.policy.compiled import check_policy
from causeway_server.router.policy.expression import compile_expression
from causeway_server.router.policy.signals import SIGNALS, EvaluationFailure, SignalValues

POLICY = """\
version: 1
name: p
targets: {{small: {{at: edge, model: assistant}}}}
routes:
  - {{name: first, when: '{when}', use: [small]}}
  - {{name: otherwise, use: [small]}}
"""


def warnings(when: str) -> list[str]:
    _, problems = check_policy(POLICY.format(when=when))
    assert not [one for one in problems if one.severity == "error"]
    return [one.message for one in problems]


def evaluated(source: str, tags: list[str]) -> bool | EvaluationFailure:
    return compile_expression(source).evaluate(SignalValues({SIGNALS["request.tags"].variable: tags}))


def test_an_absent_signal_in_a_macro_fails_before_another_element_decides() -> None:
    source = 'request.tags.exists(t, t == "a" || device.battery > 0.5)'
    assert evaluated(source, ["a", "x"]) is True
    assert isinstance(evaluated(source, ["x", "a"]), EvaluationFailure)
    assert evaluated('"a" in request.tags || device.battery > 0.5', ["x", "a"]) is True


@pytest.mark.parametrize(
    ("when", "warned"),
    [
        ('request.tags.exists(t, t == "a" || device.battery > 0.5)', True),
        ('request.tags.all(t, t != "a" || device.battery > 0.5)', True),
        ('has(device.battery) && request.tags.exists(t, t == "a" || device.battery > 0.5)', False),
        ('"a" in request.tags || device.battery > 0.5', False),
        ('request.tags.exists(t, t == "a") || device.battery > 0.5', False),
        ('request.tags.exists(t, request.stream && t == "a")', False),
    ],
)
def test_lint_warns_of_a_signal_in_a_macro(when: str, warned: bool) -> None:
    assert any("another element would decide" in message for message in warnings(when)) is warned


def test_size_of_a_text_counts_bytes() -> None:
    assert evaluated('size("é") == 2', []) is True
    assert evaluated('"é".size() == 2', []) is True


@pytest.mark.parametrize(
    ("when", "warned"),
    [
        ("size(request.client) > 8", True),
        ("request.client.size() > 8", True),
        ("request.tags.exists(t, size(t) > 8)", True),
        ("request.tags.exists(t, t.size() > 8)", True),
        ("size(request.tags) > 1", False),
        ("request.tags.size() > 1", False),
        ('request.tags.filter(t, t == "a").size() > 1', False),
    ],
)
def test_lint_warns_of_the_size_of_a_text(when: str, warned: bool) -> None:
    assert any("counts the bytes" in message for message in warnings(when)) is warned
