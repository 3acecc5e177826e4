"""What comparisons on a device find, and what follows for the judge's threshold."""

from __future__ import annotations

import math

import msgspec
import pytest

from causeway_server.models.semantic.judge import MAX_REQUESTS, Findings, likely_errors


@pytest.mark.parametrize(
    ("requests", "max_error", "likely"), [(0, 0.01, 0), (10, 0.01, 0), (11, 0.01, 1), (100, 0.01, 2), (1000, 0.01, 14)]
)
def test_the_count_of_errors_that_a_promise_explains(requests: int, max_error: float, likely: int) -> None:
    """11: the first n with 0.99 ** n < 0.9."""
    assert likely_errors(requests, max_error) == likely


def test_more_wrong_answers_than_explained_raise_the_bound_and_requests_lower_it() -> None:
    found = Findings("judge")
    assert found.least_log_odds(0.01) == -math.inf
    for log_odds, agreed in ((2.0, False), (9.0, True), (4.0, False), (3.0, False)):
        found.compare(log_odds, agreed=agreed)
    assert found.least_log_odds(0.01) == 4.0  # nothing as likely as the likeliest wrong one
    for _ in range(96):
        found.look_up(0.125)
    assert found.least_log_odds(0.01) == 3.0
    for _ in range(704):
        found.look_up(0.125)
    assert found.least_log_odds(0.01) == 2.0
    assert found.least_log_odds(0.05) == -math.inf
    assert (found.compared, found.wrong) == (4, [4.0, 3.0, 2.0])


def test_old_findings_count_half() -> None:
    found = Findings("judge", MAX_REQUESTS, 100, [5.0, 4.0, 3.0, 2.0])
    assert found.look_up(1.0)
    assert (found.requests, found.compared, found.wrong) == ((MAX_REQUESTS + 1) / 2, 50, [5.0, 3.0])


def test_those_of_an_earlier_run_are_added() -> None:
    earlier = msgspec.json.decode(msgspec.json.encode(Findings("judge", 10.5, 2, [3.0])), type=Findings)
    found = Findings("judge", 1.0, 1, [4.0])
    found.merge(earlier)
    assert found == Findings("judge", 11.5, 3, [4.0, 3.0])
