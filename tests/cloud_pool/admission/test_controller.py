from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.http.request_admission import read_headers
from causeway_server.router.errors import DeadlineExceeded, InvalidRequest, QueueFull
from causeway_server.router.types import Priority

from .waiters import acquire


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_free_permit_goes_to_the_most_urgent_then_the_oldest() -> None:
    admission = AdmissionController(permits=1, max_queued=8)
    order: list[str] = []

    async def ask(name: str, priority: Priority) -> None:
        async with acquire(admission, priority, 60.0):
            order.append(name)

    async with AsyncExitStack() as held:
        await held.enter_async_context(acquire(admission, "standard", 60.0))
        waiting = []
        asks: list[tuple[str, Priority]] = [
            ("b1", "bulk"),
            ("s1", "standard"),
            ("i1", "interactive"),
            ("s2", "standard"),
        ]
        for name, priority in asks:
            waiting.append(asyncio.ensure_future(ask(name, priority)))
            await settle()
        assert admission.scheduler.waiting == 4
    await asyncio.gather(*waiting)
    assert order == ["i1", "s1", "s2", "b1"]
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_full_queue_rejects_at_once_with_retry_after() -> None:
    admission = AdmissionController(permits=1, max_queued=0)
    async with acquire(admission, "standard", 60.0):
        with pytest.raises(QueueFull) as raised:
            async with acquire(admission, "interactive", 60.0):
                pass
    assert raised.value.retry_after_s is not None
    assert admission.scheduler.running == 0


async def test_a_wait_ends_with_the_deadline() -> None:
    admission = AdmissionController(permits=1, max_queued=4)
    async with acquire(admission, "standard", 60.0):
        with pytest.raises(DeadlineExceeded):
            async with acquire(admission, "standard", 0.0):
                pass
        assert admission.scheduler.waiting == 0
    assert admission.scheduler.running == 0


async def test_a_cancelled_waiter_passes_its_permit_on() -> None:
    admission = AdmissionController(permits=1, max_queued=4)

    async def ask() -> None:
        async with acquire(admission, "standard", 60.0):
            pass

    async with AsyncExitStack() as held:
        await held.enter_async_context(acquire(admission, "standard", 60.0))
        first, second = asyncio.ensure_future(ask()), asyncio.ensure_future(ask())
        await settle()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        third = asyncio.ensure_future(ask())
        await settle()
    # The permit was just granted to `second`, which has not run yet.
    second.cancel()
    await asyncio.gather(second, third, return_exceptions=True)
    assert third.exception() is None
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


def test_headers_are_read_with_defaults() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-causeway-deadline-ms": "250", "x-causeway-priority": "bulk", "traceparent": trace}
    inbound = read_headers(headers.items())
    assert (inbound.deadline_ms, inbound.priority, inbound.traceparent) == (250, "bulk", trace)
    plain = read_headers({"traceparent": "nonsense"}.items())
    assert plain.deadline_ms is None
    assert plain.priority == "standard"
    assert plain.traceparent == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"x-causeway-deadline-ms": "soon"},
        {"x-causeway-deadline-ms": "-1"},
        {"x-causeway-deadline-ms": "0"},
        {"x-causeway-tags": "a\x01b"},
        {"x-causeway-priority": "vip"},
        {"x-causeway-tag": "private"},
        {"X-Causeway-Prioirty": "bulk"},
    ],
)
def test_a_malformed_header_is_a_400(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        read_headers(headers.items())
