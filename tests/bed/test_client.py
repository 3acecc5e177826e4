"""The bed's client and checks recognise faults; a tool that sees none proves nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from .client import RequestResult, send
from .figures import quantile
from .overload import device_changes, majority_changes, recovery_s, side_changes

TOKENS = 3


def event(text: str = "", reason: str | None = None) -> bytes:
    return line({"choices": [{"delta": {"content": text}, "finish_reason": reason}]})


def line(document: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


TEXT = event("a")
END = event(reason="length")
STOP = event(reason="stop")
USAGE = line({"choices": [], "usage": {"completion_tokens": TOKENS}})
SHORT = line({"choices": [], "usage": {"completion_tokens": TOKENS - 1}})
FAULT = line({"error": {"code": "stream_broken"}})
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def serving(*events: bytes, status: int = 200, cut: bool = False) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every request with these events."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if status != 200:
            return web.json_response({"error": {"code": "overloaded"}}, status=status, headers={"retry-after": "3"})
        response = web.StreamResponse(headers={"x-causeway-tier": "assistant"})
        await response.prepare(request)
        for each in events:
            await response.write(each)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def result_of(url: str) -> RequestResult:
    async with aiohttp.ClientSession() as session:
        return await send(session, url, profile="test", tier="assistant", token="x", tokens=TOKENS)


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ((TEXT, END, USAGE, DONE), "answer"),
        ((TEXT, STOP, USAGE, DONE), "invalid"),
        ((TEXT, END, SHORT, DONE), "invalid"),
        ((TEXT, END, END, USAGE, DONE), "invalid"),
        ((TEXT, END, USAGE, FAULT), "invalid"),
        ((TEXT, DONE), "invalid"),
        ((TEXT, FAULT), "broken"),
        ((TEXT,), "broken"),
        ((TEXT, END, USAGE), "broken"),
    ],
)
async def test_outcomes_of_streams(events: tuple[bytes, ...], outcome: str) -> None:
    """Only a stream that ends as requested, once and complete, is an answer."""
    async with serving(*events) as url:
        assert (await result_of(url)).outcome == outcome


async def test_outcomes_without_a_stream() -> None:
    async with serving(status=503) as url:
        result = await result_of(url)
        assert (result.outcome, result.status, result.code, result.retry_after) == ("rejected", 503, "overloaded", "3")
    async with serving(TEXT, cut=True) as url:
        assert (await result_of(url)).outcome == "broken"
    assert (await result_of("http://127.0.0.1:1")).outcome == "connection"


def answered(sent_at: float, tier: str = "assistant-large", ttft_s: float = 0.1) -> RequestResult:
    return RequestResult(mark="1", profile="test", sent_at=sent_at, outcome="answer", tier=tier, ttft_s=ttft_s)


def test_majority_changes_count_within_the_span_only() -> None:
    large, small = "assistant-large", "assistant"
    seen = [answered(at + 0.1, tier) for at, tier in enumerate((large, small, small, large, small))]
    seen += [answered(3.2, small), answered(3.3, small)]
    assert majority_changes(seen, 0.0, 5.0) == 1
    assert majority_changes(seen, 1.0, 3.0) == 0


def test_side_changes_need_two_thirds_of_a_window() -> None:
    large, small = "assistant-large", "assistant"

    def second(at: int, larges: int) -> list[RequestResult]:
        return [answered(at + 0.1 * n, large if n < larges else small) for n in range(6)]

    divided = [each for at, larges in enumerate((4, 3, 2, 3, 2, 3, 4)) for each in second(at, larges)]
    assert side_changes(divided, 0.0, 7.0, window_s=1) == 2
    assert side_changes(divided, 0.0, 7.0, window_s=7) == 0
    even = [each for at in range(7) for each in second(at, 3)]
    assert side_changes(even, 0.0, 7.0, window_s=1) == 0


def test_device_changes_are_counted_per_device() -> None:
    seen = []
    for at in range(10):
        for device, tier in ((0, "assistant-large"), (1, "assistant"), (2, ("assistant", "assistant-large")[at % 2])):
            result = answered(at + 0.1 * device, tier)
            result.device = device
            seen.append(result)
    assert device_changes(seen, 0.0, 10.0) == 9 / 3
    assert device_changes(seen[:1], 0.0, 10.0) == device_changes([], 0.0, 10.0) == 0


def test_recovery_is_the_last_late_degraded_or_rejected_request() -> None:
    well = [answered(10.0 + at) for at in range(10)]
    assert recovery_s(well, 10.0, 0.2) == 0.0
    assert recovery_s([*well, answered(12.5, ttft_s=0.3)], 10.0, 0.2) == 2.5
    assert recovery_s([*well, answered(14.0, "assistant")], 10.0, 0.2) == 4.0
    rejected = RequestResult(mark="1", profile="test", sent_at=16.0, outcome="rejected", status=503)
    assert recovery_s([*well, rejected], 10.0, 0.2) == 6.0


def test_quantiles() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.99) == 99
