"""Sequential attempts against endpoints that fail on cue."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

from causeway_server.cloud_pool.dispatch.dispatcher import RetryBudget
from causeway_server.cloud_pool.upstreams.triton.errors import StubProcessDied
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    StreamBroken,
)

from .scripted import QUICK_S, Step, bed

REFUSED = CloudUnreachable("refused", phase="connect")
LOST = CloudUnreachable("lost", phase="first_token")
RAISED = CloudFailed("the model raised", phase="first_token")
GOOD: list[Step] = [QUICK_S, "good ", "answer"]


async def test_deltas_are_passed_on_as_they_come() -> None:
    async with bed([GOOD], [GOOD]) as it:
        assert await it.text() == "good answer"
    assert it.calls == "a"
    assert it.pool.leases[0].reports == ["first_token", "succeeded"]
    assert it.counted.retries == []


@pytest.mark.parametrize(
    "error",
    [
        REFUSED,
        LOST,
        RAISED,
        StubProcessDied("dead", phase="first_token"),
        EngineUnavailable("unloaded", phase="first_token"),
        QueueFull("full"),
        StreamBroken("its process died", phase="stream"),
    ],
    ids=lambda error: type(error).__name__ + getattr(error, "phase", ""),
)
async def test_a_retryable_error_is_answered_by_the_second_endpoint(error: CausewayError) -> None:
    async with bed([[error]], [GOOD]) as it:
        assert await it.text() == "good answer"
    assert it.pool.last_reports == [("a", error.code), ("b", "succeeded")]
    assert it.counted.retries == [error.code]


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("bad"), CloudRejected("bad tensor", phase="first_token"), DeadlineExceeded("over")],
    ids=lambda error: type(error).__name__,
)
async def test_an_unretryable_error_is_raised_as_it_is(error: CausewayError) -> None:
    async with bed([[error]], [GOOD]) as it:
        with pytest.raises(type(error)) as raised:
            await it.text()
    assert raised.value is error
    assert it.calls == "a"


@pytest.mark.parametrize("error", [LOST, RAISED], ids=["lost", "raised"])
async def test_a_request_that_breaks_two_endpoints_is_not_retried_again(error: CausewayError) -> None:
    async with bed([[error]], [[error]], [GOOD]) as it:
        with pytest.raises(type(error)):
            await it.text()
    assert it.calls == "ab"


async def test_attempts_end_at_max_attempts_with_the_last_error() -> None:
    last = QueueFull("the third is full")
    async with bed([[REFUSED]], [[REFUSED]], [[last]], [GOOD]) as it:
        with pytest.raises(QueueFull) as raised:
            await it.text()
    assert raised.value is last
    assert it.calls == "abc"


async def test_pauses_grow_and_are_short() -> None:
    """`rng` 1 is the longest pause."""
    async with bed([[REFUSED]], [[REFUSED]], [GOOD]) as it:
        await it.text()
    assert it.clock.slept == [0.02, 0.04]


async def test_a_single_endpoint_is_not_retried() -> None:
    async with bed([[REFUSED], GOOD]) as it:
        left = it.dispatch.retries_left
        with pytest.raises(CloudUnreachable):
            await it.text()
    assert it.clock.slept == []
    assert it.dispatch.retries_left == left


@pytest.mark.parametrize("error", [REFUSED, RAISED, StreamBroken("cut", phase="stream")], ids=lambda one: one.code)
async def test_nothing_is_retried_after_the_first_delta(error: CausewayError) -> None:
    async with bed([["a start", error]], [GOOD]) as it, aclosing(it.dispatch.generate(it.request())) as deltas:
        assert (await anext(deltas)).text == "a start"
        with pytest.raises(type(error)):
            await anext(deltas)
    assert it.calls == "a"
    assert it.pool.leases[0].reports == ["first_token", error.code]


async def test_an_answer_without_a_delta_is_retried() -> None:
    async with bed([[]], [GOOD]) as it:
        assert await it.text() == "good answer"
    assert it.pool.last_reports[0] == ("a", "cloud_failed")


async def test_a_defect_is_raised_and_not_retried() -> None:
    async with bed([[KeyError("a bug")]], [GOOD]) as it:
        with pytest.raises(KeyError):
            await it.text()
    assert it.calls == "a"


# --- the budget -------------------------------------------------------------------------------------------------------


async def test_an_empty_budget_ends_retries() -> None:
    async with bed([[REFUSED]], [GOOD], budget=RetryBudget(share=0.0, min_retries_per_s=0.0)) as it:
        with pytest.raises(CloudUnreachable):
            await it.text()
    assert it.calls == "a"
    assert it.counted.retries == []


@pytest.mark.slow
async def test_amplification_with_every_first_attempt_failing() -> None:
    """At 20 requests a second, endpoints get at most 1.2 attempts a request, and exactly the share that the budget pays
    for succeeds."""
    async with bed([[REFUSED]], [GOOD], budget=RetryBudget()) as it:
        answers = 0
        for _ in range(1000):
            it.clock.now += 0.05
            with suppress(CloudUnreachable):
                answers += await it.text() == "good answer"
    assert len(it.calls) <= 1200
    assert answers == it.calls.count("b") == len(it.counted.retries)
    assert 190 <= answers <= 200


# --- deadlines --------------------------------------------------------------------------------------------------------


async def test_every_attempt_has_the_same_deadline() -> None:
    async with bed([[3.0, REFUSED]], [GOOD]) as it:
        ends = it.clock.now + 10.0
        await it.text(10.0)
    assert [endpoint.requests[0].deadline for endpoint in it.endpoints] == [ends, ends]


async def test_a_late_request_starts_nothing() -> None:
    async with bed([GOOD]) as it:
        with pytest.raises(DeadlineExceeded):
            await it.text(0.0)
    assert it.calls == ""


async def test_no_retry_without_time() -> None:
    """The error is the deadline and not the endpoint's: many at once must not look as if the tier were broken."""
    async with bed([[5.0, REFUSED]], [[0.4, "slow"]]) as it:
        for _ in range(20):
            it.dispatch.latency.first_token("b", 0.4, it.clock.now + 5.0)
        with pytest.raises(DeadlineExceeded) as raised:
            await it.text(5.3)
    assert raised.value.__cause__ is REFUSED
    assert it.calls == "a"
    assert it.clock.slept == [0.02]


async def test_no_pause_beyond_the_deadline() -> None:
    async with bed([[5.0, REFUSED]], [GOOD]) as it:
        left = it.dispatch.retries_left
        with pytest.raises(CloudUnreachable):
            await it.text(5.01)
    assert it.clock.slept == []
    assert it.dispatch.retries_left == left


async def test_an_attempt_needs_time_for_a_first_token() -> None:
    async with bed([GOOD]) as it:
        for _ in range(8):
            await it.text()
            it.clock.now += 0.3
        it.endpoints[0].play(GOOD)
        with pytest.raises(DeadlineExceeded):
            await it.text(0.004)
        assert it.calls == ""
        assert await it.text(0.006) == "good answer"


async def test_a_faster_endpoint_is_used_when_time_is_short() -> None:
    async with bed([[0.4, "slow"]], [GOOD]) as it:
        for _ in range(20):
            await it.text()
        assert await it.text(0.3) == "good answer"
        assert await it.text(0.5) == "slow"
    assert it.pool.last_reports[-3:] == [("a", ""), ("b", "succeeded"), ("a", "succeeded")]
    assert it.clock.slept == []


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_closing_cancels_the_call_without_a_report() -> None:
    async with bed([["a", asyncio.Event()]], [GOOD]) as it, aclosing(it.dispatch.generate(it.request())) as deltas:
        await anext(deltas)
    assert it.endpoints[0].cancelled == 1
    assert it.pool.leases[0].reports == ["first_token"]


@pytest.mark.parametrize("script", [[asyncio.Event()], ["a", asyncio.Event()]], ids=["before", "after"])
async def test_cancelling_cancels_the_call(script: list[Step]) -> None:
    async with bed([script], [GOOD]) as it:
        task = asyncio.ensure_future(it.text())
        await it.endpoints[0].began.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert it.endpoints[0].cancelled == 1
    assert it.calls == "a"


@pytest.mark.parametrize("turns", range(12))
async def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(turns: int) -> None:
    async with bed([[asyncio.Event()]], [GOOD]) as it:
        comes = asyncio.Event()
        it.endpoints[0].play([comes, "x", asyncio.Event()])
        task = asyncio.ensure_future(it.text())
        await it.endpoints[0].began.wait()
        comes.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert it.endpoints[0].cancelled == 1


async def test_cancelling_during_the_pause_leaves_nothing() -> None:
    async with bed([[REFUSED]], [GOOD]) as it:
        it.clock.held = asyncio.Event()
        task = asyncio.ensure_future(it.text())
        await it.clock.sleeping.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert it.calls == "a"
