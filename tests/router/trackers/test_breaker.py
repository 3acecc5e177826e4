"""The circuit breaker, on a fake clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.trackers import Breaker


def breaker_of(**settings: float) -> Breaker:
    breaker: Breaker = type("OtherBreaker", (Breaker,), settings)()
    return breaker


def opened(at: float = 0.0) -> Breaker:
    breaker = breaker_of(failures=3, open_s=5.0, max_open_s=20.0, probe_s=30.0)
    for _ in range(3):
        assert breaker.allow(at)
        breaker.failure(at)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = breaker_of(failures=3)
    for _ in range(2):
        breaker.failure(0.0)
    breaker.success(0.0)
    for _ in range(2):
        breaker.failure(0.0)
    assert breaker.state(0.0) == "closed"
    breaker.failure(0.0)
    assert breaker.state(0.0) == "open"
    assert not breaker.allow(0.0)
    assert breaker.retry_after_s(1.0) == 4.0


def test_a_share_of_failures_opens_it_too() -> None:
    """Every other call fails, so there are never two failures in a row."""
    breaker = breaker_of(failures=5, rate=0.5, min_calls=10, window_s=30.0)
    for index in range(9):
        (breaker.failure if index % 2 == 0 else breaker.success)(float(index))
    assert breaker.state(9.0) == "closed"
    breaker.failure(9.0)
    assert breaker.state(9.0) == "open"


def test_old_failures_are_forgotten() -> None:
    breaker = breaker_of(failures=100, rate=0.5, min_calls=4, window_s=10.0)
    for at in (0.0, 1.0, 2.0):
        breaker.failure(at)
    breaker.failure(12.5)
    assert breaker.state(12.5) == "closed"


def test_after_the_pause_one_call_may_probe() -> None:
    breaker = opened()
    assert not breaker.allow(4.9)
    assert breaker.state(5.0) == "half_open"
    assert breaker.allow(5.0)
    assert not breaker.allow(5.0)
    assert not breaker.allow(6.0)


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened()
    assert breaker.allow(5.0)
    breaker.success(5.1)
    assert breaker.state(5.1) == "closed"
    breaker.failure(5.2)
    breaker.failure(5.2)
    assert breaker.allow(5.2)


def test_a_probe_that_fails_opens_it_for_longer() -> None:
    breaker, now = opened(), 0.0
    for pause_s in (5.0, 10.0, 20.0, 20.0):
        assert not breaker.allow(now + pause_s - 0.1)
        now += pause_s
        assert breaker.allow(now)
        breaker.failure(now)
    now += 20.0
    assert breaker.allow(now)
    breaker.success(now)
    for _ in range(3):
        breaker.failure(now)
    assert breaker.retry_after_s(now) == 5.0


def test_after_a_cancelled_probe_another_call_may_probe() -> None:
    breaker = opened()
    assert breaker.allow(5.0)
    breaker.cancelled(6.0)
    assert breaker.allow(6.0)


def test_a_probe_that_never_reports_expires() -> None:
    breaker = opened()
    assert breaker.allow(5.0)
    assert not breaker.allow(34.9)
    assert breaker.allow(35.0)


def test_results_of_earlier_calls_do_not_count_while_open() -> None:
    breaker = opened()
    breaker.success(1.0)
    breaker.failure(1.0)
    breaker.cancelled(1.0)
    assert breaker.state(4.9) == "open"
    assert breaker.state(5.0) == "half_open"
    breaker.failure(5.0)  # no probe is under way: an earlier call
    assert breaker.state(5.0) == "half_open"


@given(
    st.lists(st.tuples(st.sampled_from(["allow", "success", "failure", "cancelled"]), st.floats(0, 20)), max_size=60)
)
def test_it_never_stays_open_forever(steps: list[tuple[str, float]]) -> None:
    """After the longest pause and the longest probe a call is always allowed again."""
    breaker, now = breaker_of(failures=2, open_s=1.0, max_open_s=8.0, probe_s=10.0), 0.0
    for step, wait_s in steps:
        now += wait_s
        getattr(breaker, step)(now)
        assert (breaker.state(now) == "open") == (breaker.retry_after_s(now) > 0.0)
    assert breaker.allow(now + 18.0)


def test_memory_is_bounded() -> None:
    breaker = Breaker()
    for index in range(10_000):
        breaker.success(index / 1000)
    assert len(vars(breaker)["_calls"]) <= 256
