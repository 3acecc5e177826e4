"""Work in a process of its own: its result, and what becomes of work that needs too much."""

from __future__ import annotations

import math

import pytest

from causeway_server.router.checks.replay import DraftReport, report_draft
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.serving.console.apart import run_apart

POLICY = """
version: 1
name: p
targets: {{small: {{at: edge, model: assistant}}}}
routes:
  - {{name: first, use: [small]{}}}
"""


def draft(condition: str) -> DraftReport:
    more = f", when: '{condition}'" if condition else ""
    return run_apart(2.0, report_draft, POLICY.format(more), POLICY.format(""), (), {})


def test_the_result_comes_back() -> None:
    assert run_apart(30.0, math.factorial, 20) == math.factorial(20)
    report = run_apart(30.0, report_draft, POLICY.format(""), POLICY.format(""), (), {})
    assert (report.old, report.problems) == (report.policy, ())


def test_a_draft_without_end_is_given_up() -> None:
    """Its conditions hold the interpreter's lock: in a thread they would stop every request."""
    numbers = f"[{','.join(map(str, range(60)))}]"
    with pytest.raises(InvalidRequest, match="simplify its conditions"):
        draft(f"{numbers}.all(a, {numbers}.all(b, {numbers}.all(c, {numbers}.all(d, a + b + c + d >= 0))))")


def test_work_that_needs_too_much_memory_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more time or memory"):
        run_apart(30.0, bytes, 3 << 30)


def test_a_draft_beside_a_policy_that_cannot_be_read_is_checked_alone() -> None:
    report = report_draft(POLICY.format(""), "version: 0", (), {})
    assert (report.old, report.policy != "", report.replay is not None) == ("", True, True)
    assert [one.severity for one in report.problems] == ["warning"]
