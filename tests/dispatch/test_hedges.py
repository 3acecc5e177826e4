"""Hedges. The endpoints' recent first tokens took 5 ms, so a waiting request is hedged after 5 ms."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cloud_pool.dispatch.config import DispatchSettings, HedgeConfig, RetryBudgetConfig
from router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    DeadlineExceeded,
    EngineUnavailable,
)

from .scripted import FAST, QUICK_S, Bed, bed

REFUSED = CloudUnreachable("refused", phase="connect")
LONG_S = 0.3  # many times the hedging threshold


def soon() -> asyncio.Event:
    """Set after a time in which a hedge would have been made."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(LONG_S, event.set)
    return event


async def test_a_winning_hedge_answers_and_the_slow_call_is_cancelled() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play([asyncio.Event(), "never"])
        it.endpoints[1].play([QUICK_S, "from b, ", "whole"])
        async with aclosing(it.dispatch.generate(it.request())) as deltas:
            assert (await anext(deltas)).texts == ("from b, ",)
            # At once, and not when the answer has ended.
            assert it.endpoints[0].cancelled == 1
            assert it.endpoints[0].running == 0
            assert [one.texts[0] async for one in deltas] == ["whole"]
    assert it.pool.last_reports == [("a", ""), ("b", "succeeded")]
    assert it.counted.hedges == ["won"]
    assert it.counted.retries == []


async def test_the_hedge_is_cancelled_when_the_first_endpoint_is_faster() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        late = asyncio.Event()
        it.endpoints[0].play([late, "from a"])
        it.endpoints[1].play([asyncio.Event(), "never"])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        late.set()
        assert await task == "from a"
    assert it.endpoints[1].cancelled == 1
    assert it.pool.last_reports == [("a", "succeeded"), ("b", "")]
    assert it.counted.hedges == ["lost"]


async def test_two_first_deltas_in_one_turn_give_one_endpoints_answer() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        both = asyncio.Event()
        it.endpoints[0].play([both, "a", "a", "a"])
        it.endpoints[1].play([both, "b", "b", "b"])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        both.set()
        assert await task == "aaa"
    assert (it.endpoints[0].cancelled, it.endpoints[1].cancelled) == (0, 1)


async def test_no_hedge_after_the_first_delta() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play(["start ", soon(), "end"])
        it.endpoints[1].play(["other"])
        assert await it.text() == "start end"
    assert it.calls == "a"
    assert it.counted.hedges == []


@pytest.mark.parametrize("why", ["bulk", "off", "no share", "no budget", "alone", "cold"])
async def test_when_no_hedge_is_made(why: str) -> None:
    off = DispatchSettings(hedge=HedgeConfig(enabled=False, max_share=1.0))
    poor = DispatchSettings(
        hedge=HedgeConfig(max_share=1.0), retry_budget=RetryBudgetConfig(share=0.0, min_retries_per_s=0.0)
    )
    settings = {"off": off, "no share": DispatchSettings(hedge=HedgeConfig(max_share=0.0)), "no budget": poor}.get(
        why, FAST
    )
    async with bed(*[[[]]] * (1 if why == "alone" else 2), settings=settings) as it:
        if why != "cold":
            await it.warm()
        for endpoint in it.endpoints:
            endpoint.play([soon(), "late"])
        assert await it.text(hedged=why != "bulk") == "late"
    assert it.calls == "a"
    assert it.counted.hedges == (["refused"] if why in ("no share", "no budget") else [])


@pytest.mark.parametrize("is_slow", [True, False])
async def test_urgent_savings_are_spent_on_known_slow_endpoints(is_slow: bool) -> None:
    async with bed([[]], [[]], settings=DispatchSettings(hedge=HedgeConfig(max_share=0.1))) as it:
        await it.warm()
        it.dispatch.latency.urgent_hedge_after_s = lambda now: 10.0 * LONG_S  # type: ignore[method-assign]
        it.pool.slow = {"a"} if is_slow else set()
        it.endpoints[0].play([soon(), "from a"])
        it.endpoints[1].play(["from b"])
        assert await it.text() == ("from b" if is_slow else "from a")
    assert it.counted.hedges == (["won"] if is_slow else [])


@pytest.mark.slow
async def test_hedges_stay_within_two_in_a_hundred() -> None:
    async with bed([[]], [[]], settings=DispatchSettings()) as it:
        await it.warm()
        it.endpoints[1].play(["b"])
        for _ in range(200):
            # Slow by the real clock, hedged or not.
            event = asyncio.Event()
            it.endpoints[0].play([event, "a"])
            asyncio.get_running_loop().call_later(4 * QUICK_S, event.set)
            await it.text()
    made = [outcome for outcome in it.counted.hedges if outcome != "refused"]
    assert len(made) == len(it.endpoints[1].requests)
    assert 1 <= len(made) <= 0.02 * 225
    assert "refused" in it.counted.hedges


# --- when they fail ---------------------------------------------------------------------------------------------------


async def test_a_failed_first_attempt_leaves_the_race_to_the_hedge() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        breaks, late = asyncio.Event(), asyncio.Event()
        it.endpoints[0].play([breaks, EngineUnavailable("gone", phase="first_token")])
        it.endpoints[1].play([late, "from b"])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        breaks.set()
        while it.endpoints[0].running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late.set()
        assert await task == "from b"
    assert it.pool.last_reports == [("a", "engine_unavailable"), ("b", "succeeded")]
    assert it.counted.hedges == ["won"]
    assert it.counted.retries == []


async def test_a_failed_hedge_is_invisible_while_the_first_may_answer() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        late = asyncio.Event()
        it.endpoints[0].play([late, "from a"])
        it.endpoints[1].play([REFUSED])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        await asyncio.sleep(0)
        late.set()
        assert await task == "from a"
    assert it.counted.hedges == ["lost"]


async def test_a_round_that_failed_twice_counts_as_one_retry() -> None:
    async with bed([[]], [[]], [[]]) as it:
        await it.warm()
        breaks = asyncio.Event()
        it.endpoints[0].play([breaks, REFUSED])
        it.endpoints[1].play([breaks, EngineUnavailable("gone", phase="first_token")])
        it.endpoints[2].play(["from c"])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        breaks.set()
        assert await task == "from c"
    assert it.calls == "abc"
    assert it.counted.hedges == ["failed"]
    assert it.counted.retries == ["engine_unavailable"]


async def test_a_model_exception_on_two_endpoints_is_final() -> None:
    async with bed([[]], [[]], [[]]) as it:
        await it.warm()
        breaks = asyncio.Event()
        for endpoint in it.endpoints:
            endpoint.play([breaks, CloudFailed("raised", phase="first_token")])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        breaks.set()
        with pytest.raises(CloudFailed):
            await task
    assert it.calls == "ab"


@pytest.mark.parametrize("error", [CloudRejected("bad tensor"), DeadlineExceeded("over")], ids=lambda one: one.code)
async def test_an_unretryable_error_ends_the_race(error: CausewayError) -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        breaks = asyncio.Event()
        it.endpoints[0].play([breaks, error])
        it.endpoints[1].play([asyncio.Event()])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        breaks.set()
        with pytest.raises(type(error)) as raised:
            await task
    assert raised.value is error
    assert it.endpoints[1].cancelled == 1


async def test_a_defect_ends_the_race_unwrapped() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        breaks = asyncio.Event()
        it.endpoints[0].play([breaks, KeyError("a bug")])
        it.endpoints[1].play([asyncio.Event()])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        breaks.set()
        with pytest.raises(KeyError):
            await task
    assert it.endpoints[1].cancelled == 1


async def test_a_failure_before_the_hedge_is_a_retry() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play([REFUSED])
        it.endpoints[1].play(["from b"])
        assert await it.text() == "from b"
    assert it.counted.hedges == []
    assert it.counted.retries == ["cloud_unreachable"]


# --- leaving ----------------------------------------------------------------------------------------------------------


async def hanging(it: Bed) -> asyncio.Task[str]:
    """A task that waits for two endpoints."""
    await it.warm()
    for endpoint in it.endpoints:
        endpoint.play([asyncio.Event(), "never"])
    task = asyncio.ensure_future(it.text())
    await it.endpoints[1].began.wait()
    return task


async def test_cancelling_during_a_hedge_ends_both_calls() -> None:
    async with bed([[]], [[]]) as it:
        task = await hanging(it)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]
    assert it.pool.last_reports == [("a", ""), ("b", "")]
    assert it.counted.hedges == ["cancelled"]


async def until_both_have_begun(it: Bed) -> None:
    """Wait for the answer; the timeout passes as soon as both endpoints have been asked."""

    async def passes() -> None:
        await it.endpoints[1].began.wait()
        limit.reschedule(0.0)

    async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:
        tasks.create_task(passes())
        await it.text()


async def test_a_callers_timeout_ends_both_calls() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        for endpoint in it.endpoints:
            endpoint.play([asyncio.Event(), "never"])
        with pytest.raises(TimeoutError):
            await until_both_have_begun(it)
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]


@pytest.mark.parametrize("turns", range(12))
async def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(turns: int) -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        both = asyncio.Event()
        for endpoint in it.endpoints:
            endpoint.play([both, "x", asyncio.Event()])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[1].began.wait()
        both.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]


async def test_closing_the_answer_closes_the_winner() -> None:
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play([asyncio.Event()])
        it.endpoints[1].play(["b", asyncio.Event()])
        async with aclosing(it.dispatch.generate(it.request())) as deltas:
            await anext(deltas)
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]
