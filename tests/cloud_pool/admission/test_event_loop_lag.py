"""Time that the process lost itself, under a fake clock, and its effect on the limit."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.observability.metrics import INTERVAL_S, EventLoopLag

from .simulation import settings
from .waiters import acquire


class Late:
    """A loop's clock, and a sleep that wakes up late by each of `late_s`, and then never."""

    def __init__(self, *late_s: float) -> None:
        self.now = 10.0
        self._late_s = list(late_s)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if not self._late_s:
            raise EOFError
        self.now += seconds + self._late_s.pop(0)


async def test_lost_time_is_summed() -> None:
    loop = Late(0.0, 0.3, 0.0, 0.2)
    lag = EventLoopLag(clock=loop.clock, sleep=loop.sleep)
    with pytest.raises(EOFError):
        await lag.watch()
    assert lag.lost_s() == pytest.approx(0.5)
    loop.now += 99.0
    assert lag.lost_s() == pytest.approx(0.5)  # The watch has ended.


async def test_time_being_lost_counts_already() -> None:
    loop, seen = Late(), []

    async def stalled(seconds: float) -> None:
        loop.now += INTERVAL_S / 2
        seen.append(lag.lost_s())
        loop.now += INTERVAL_S / 2 + 0.4
        seen.append(lag.lost_s())
        raise EOFError

    lag = EventLoopLag(clock=loop.clock, sleep=stalled)
    with pytest.raises(EOFError):
        await lag.watch()
    assert seen == [0.0, pytest.approx(0.4)]


async def limit_after(first_token_s: float, lost_s: float) -> tuple[int, int]:
    """A full tier's limit before, and the lowest in forty rounds of first tokens at that time, each with so much lost
    time."""
    clock, lost = 0.0, 0.0
    admission = AdmissionController(16, 64, settings(16, objective_s=0.4), clock=lambda: clock, lost_s=lambda: lost)

    async def full(seconds: float, lost_in_it_s: float) -> None:
        nonlocal clock, lost
        async with AsyncExitStack() as stack:
            waits = [acquire(admission, "standard", 60.0) for _ in range(admission.limit)]
            permits = [await stack.enter_async_context(wait) for wait in waits]
            for permit in permits:
                stack.enter_context(permit)
            clock, lost = clock + seconds, lost + lost_in_it_s
            for permit in permits:
                permit.first_token(seconds)

    for _ in range(20):
        await full(0.2, 0.0)
    before = least = admission.limit
    for _ in range(40):
        await full(first_token_s, lost_s)
        least = min(least, admission.limit)
    return before, least


async def test_first_tokens_seen_while_time_was_lost_do_not_lower_the_limit() -> None:
    before, after = await limit_after(0.8, 0.0)
    assert after < before
    before, after = await limit_after(0.8, 0.3)
    assert after == before
    before, after = await limit_after(0.8, 0.01)  # Too little lost time to discard the sample.
    assert after < before
