"""Two tries at once. The endpoints' first tokens were 5 ms away of late, so one that waits is hedged after 5 ms."""

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
LONG_S = 0.3  # many times what a slow first token needs to be hedged


def soon() -> asyncio.Event:
    """Set after a time in which a hedge would have been made."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(LONG_S, event.set)
    return event


async def test_the_hedge_answers_and_the_slow_one_is_cancelled() -> None:
    """The first endpoint says nothing, so the second is asked too; its answer alone reaches the caller."""
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play([asyncio.Event(), "never"])
        it.endpoints[1].play([QUICK_S, "from b, ", "whole"])
        async with aclosing(it.dispatch.generate(it.ask())) as deltas:
            assert (await anext(deltas)).texts == ("from b, ",)
            # At once, and not when the answer has ended.
            assert it.endpoints[0].cancelled == 1
            assert it.endpoints[0].running == 0
            assert [one.texts[0] async for one in deltas] == ["whole"]
    assert it.pool.said == [("a", ""), ("b", "succeeded")]
    assert it.counted.hedges == ["won"]
    assert it.counted.retries == []


async def test_the_slow_one_may_still_be_first() -> None:
    """The hedge is cancelled when the first endpoint's delta comes before its own."""
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
    assert it.pool.said == [("a", "succeeded"), ("b", "")]
    assert it.counted.hedges == ["lost"]


async def test_both_at_once() -> None:
    """Two first deltas in one turn of the loop: one endpoint's answer, and the other one closed."""
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


async def test_after_the_first_delta_nobody_is_asked() -> None:
    """An endpoint that stalls in its answer is not hedged: its start has reached the caller."""
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play(["start ", soon(), "end"])
        it.endpoints[1].play(["other"])
        assert await it.text() == "start end"
    assert it.calls == "a"
    assert it.counted.hedges == []


@pytest.mark.parametrize("why", ["bulk", "off", "no share", "no budget", "alone", "cold"])
async def test_when_no_hedge_is_made(why: str) -> None:
    """Bulk work, hedging off, the share or the retry budget used up, nobody else, nothing known yet: one is asked."""
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
async def test_where_the_endpoint_is_known_to_be_slow_late_is_late_enough(is_slow: bool) -> None:
    """What is kept for the very late is spent on who waits where others wait too: that is no chance."""
    async with bed([[]], [[]], settings=DispatchSettings(hedge=HedgeConfig(max_share=0.1))) as it:
        await it.warm()
        it.dispatch.latency.urgent_hedge_after_s = lambda now: 10.0 * LONG_S  # type: ignore[method-assign]
        it.pool.slow = {"a"} if is_slow else set()
        it.endpoints[0].play([soon(), "from a"])
        it.endpoints[1].play(["from b"])
        assert await it.text() == ("from b" if is_slow else "from a")
    assert it.counted.hedges == (["won"] if is_slow else [])


async def test_hedges_stay_within_two_in_a_hundred() -> None:
    """However many asks are slow: at most 2 % of them are asked twice."""
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


async def test_one_that_fails_leaves_the_race_to_the_other() -> None:
    """The slow endpoint breaks while the hedge runs: no retry, the hedge answers."""
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
    assert it.pool.said == [("a", "engine_unavailable"), ("b", "succeeded")]
    assert it.counted.hedges == ["won"]
    assert it.counted.retries == []


async def test_a_hedge_that_fails_is_nothing() -> None:
    """Its error stays unseen while the first endpoint may still answer."""
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


async def test_both_fail_and_a_third_answers() -> None:
    """A round that failed twice is one round: one retry, on an endpoint that neither of them was."""
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


async def test_both_raise_and_it_ends() -> None:
    """A model exception on two endpoints is the ask's own: the third never sees it."""
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
async def test_a_hopeless_error_ends_the_race(error: CausewayError) -> None:
    """Wrong here is wrong there: the other try is cancelled and not waited for."""
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


async def test_a_defect_ends_the_race() -> None:
    """An error that is not ours is raised as it is, not wrapped, and the other try is cancelled."""
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
    """An endpoint that fails sooner than it would be hedged is followed by a retry, not by a hedge."""
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


async def test_cancelled_while_two_run() -> None:
    """Who leaves in mid-hedge ends both calls; neither counts as a failure."""
    async with bed([[]], [[]]) as it:
        task = await hanging(it)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]
    assert it.pool.said == [("a", ""), ("b", "")]
    assert it.counted.hedges == ["cancelled"]


async def test_cancelled_by_a_deadline_of_the_caller() -> None:
    """A scope around the reader that runs out ends both calls, like a plain cancellation."""
    async with bed([[]], [[]]) as it:
        await it.warm()
        for endpoint in it.endpoints:
            endpoint.play([asyncio.Event(), "never"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10 * QUICK_S):
                await it.text()
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]


@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_at_any_turn_of_the_loop(turns: int) -> None:
    """From the moment that both deltas are on their way, whichever turn the cancellation hits: nothing is left."""
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


async def test_closed_after_the_hedge_won() -> None:
    """Closing the answer closes the winner; the loser was closed before."""
    async with bed([[]], [[]]) as it:
        await it.warm()
        it.endpoints[0].play([asyncio.Event()])
        it.endpoints[1].play(["b", asyncio.Event()])
        async with aclosing(it.dispatch.generate(it.ask())) as deltas:
            await anext(deltas)
    assert [endpoint.cancelled for endpoint in it.endpoints] == [1, 1]
