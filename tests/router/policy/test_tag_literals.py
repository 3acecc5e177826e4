"""Tags are compared without case: the request's are folded, and so are the texts that a policy compares with them."""

from __future__ import annotations

import pytest

from causeway_server.router.policy.compiled import check_policy
from causeway_server.router.policy.expression import compile_expression
from causeway_server.router.policy.signals import SIGNALS, SignalValues
from causeway_server.router.types import RoutingHints

POLICY = """
version: 1
name: p
targets:
  small: {{at: edge, model: a}}
  large: {{at: cloud, model: b}}
constraints:
  - {{name: stays, when: '{when}', keep: on_device}}
routes:
  - {{name: all, use: [small, large]}}
"""


def holds(source: str, *tags: str, client: str = "Kiosk") -> object:
    values = {"request.tags": [*RoutingHints(tags=tags).tags], "request.client": client}
    return compile_expression(source).evaluate(
        SignalValues({SIGNALS[name].variable: value for name, value in values.items()})  # type: ignore[misc]
    )


@pytest.mark.parametrize(
    "source",
    [
        '"Private" in request.tags',
        "r'PRIVATE' in request.tags",
        '"\\u0050rivate" in request.tags',
        'request.tags.exists(t, t == "Private")',
        'request.tags.exists(t, t.startsWith("PRIV"))',
        'request.tags.exists(t, t.matches("^PRIV\\\\w+$"))',
        '["PII", "Private"].exists(t, t in request.tags)',
        'request.tags == ["Private"]',
        'request.client == "Kiosk" && ("Private" in request.tags || false)',
    ],
)
@pytest.mark.parametrize("tag", ["private", "Private", "PRIVATE"])
def test_both_sides_are_folded(source: str, tag: str) -> None:
    assert holds(source, tag) is True
    assert holds(source, "public") is False


def test_a_pattern_keeps_the_meaning_of_its_classes() -> None:
    assert holds('request.tags.exists(t, t.matches("^A\\\\D$"))', "ab") is True
    assert holds('request.tags.exists(t, t.matches("^A\\\\D$"))', "a1") is False


@pytest.mark.parametrize(
    "source",
    [
        'request.tags.exists(t, t == "A" && request.client == "Kiosk")',
        'request.tags.exists(t, t == "A" && "Kiosk" == request.client)',
        'request.tags.exists(t, t == "A" && request.client.startsWith("K"))',
        'request.tags.exists(t, t == "A" && request.client in ["Other", "Kiosk"])',
    ],
)
def test_a_text_beside_another_signal_keeps_its_case(source: str) -> None:
    assert holds(source, "a") is True
    assert holds(source, "a", client="kiosk") is False


def test_lint_names_an_upper_case_literal() -> None:
    def warnings(when: str) -> list[str]:
        _, problems = check_policy(POLICY.format(when=when))
        return [problem.message for problem in problems]

    (found,) = warnings('"Private" in request.tags')
    assert '"Private" means "private"' in found
    assert warnings('"private" in request.tags') == []
    assert warnings('request.client == "Kiosk"') == []
    assert warnings('request.tags.exists(t, t.matches("^A.*"))') == []
