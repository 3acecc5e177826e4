"""Endpoints that act in any order, and callers that leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.upstreams.inference import Delta
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    EngineUnavailable,
    QueueFull,
    StreamBroken,
)

from .scripted import Step, bed

ERRORS = st.sampled_from(
    [
        CloudUnreachable("refused", phase="connect"),
        CloudUnreachable("lost", phase="first_token"),
        CloudFailed("raised"),
        CloudRejected("bad tensor"),
        EngineUnavailable("dead"),
        QueueFull("full"),
        StreamBroken("ended"),
    ]
)
TURNS = st.integers(min_value=0, max_value=30)


@st.composite
def scripts(draw: st.DrawFn, address: str) -> list[Step]:
    """Some turns, then text or an error; an answer may break, and may stall for ever."""
    steps: list[Step] = [draw(TURNS)]
    for _ in range(draw(st.integers(min_value=0, max_value=3))):
        steps += [address, draw(TURNS)]
    if draw(st.booleans()):
        steps.append(draw(ERRORS))
    return steps


@given(scripts("a"), scripts("b"), scripts("c"), st.none() | st.integers(min_value=0, max_value=60))
def test_any_order_gives_one_endpoints_deltas_and_leaves_nothing(
    a: list[Step], b: list[Step], c: list[Step], leaves_after: int | None
) -> None:
    """No call, lease or task is left at the end, and no endpoint was used twice."""
    asyncio.run(_ask(a, b, c, leaves_after))


async def _ask(a: list[Step], b: list[Step], c: list[Step], leaves_after: int | None) -> None:
    async with bed([a], [b], [c]) as it:
        seen: list[str] = []
        task = asyncio.ensure_future(_read(it.dispatch.generate(it.request()), seen))
        if leaves_after is not None:
            for _ in range(leaves_after):
                await asyncio.sleep(0)
            task.cancel()
        with suppress(CausewayError, asyncio.CancelledError):
            await task
            assert "".join(seen) == "".join(step for step in {"a": a, "b": b, "c": c}[seen[0]] if isinstance(step, str))
    assert len(set(seen)) <= 1
    assert all(len(endpoint.requests) <= 1 for endpoint in it.endpoints)
    reports = [lease.reports for lease in it.pool.leases]
    assert sum("succeeded" in one for one in reports) <= 1


async def _read(deltas: AsyncGenerator[Delta, None], seen: list[str]) -> None:
    async with aclosing(deltas) as open_deltas:
        async for delta in open_deltas:
            seen.append(delta.text)  # noqa: PERF401  (what was seen before an error counts)
