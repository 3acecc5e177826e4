"""What the bed's client calls an answer, and what its tools count: a tool that sees no fault proves nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from .asking import Told, ask
from .figures import quantile
from .overload import changes, flips, recovery_s, swings

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
async def saying(*events: bytes, status: int = 200, cut: bool = False) -> AsyncIterator[str]:
    """The URL of a server that answers everything with these events."""

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


async def told(url: str) -> Told:
    async with aiohttp.ClientSession() as session:
        return await ask(session, url, kind="test", tier="assistant", token="x", tokens=TOKENS)


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ((TEXT, END, USAGE, DONE), "answer"),
        ((TEXT, STOP, USAGE, DONE), "false"),
        ((TEXT, END, SHORT, DONE), "false"),
        ((TEXT, END, END, USAGE, DONE), "false"),
        ((TEXT, END, USAGE, FAULT), "false"),
        ((TEXT, DONE), "false"),
        ((TEXT, FAULT), "broken"),
        ((TEXT,), "broken"),
        ((TEXT, END, USAGE), "broken"),
    ],
)
async def test_outcomes_of_streams(events: tuple[bytes, ...], outcome: str) -> None:
    """Only a stream that ends as it was asked to, once and whole, is an answer; one that ends too well is false."""
    async with saying(*events) as url:
        assert (await told(url)).outcome == outcome


async def test_outcomes_without_a_stream() -> None:
    """A refusal keeps its code and when to come back; a cut stream and a server that is not there have their own."""
    async with saying(status=503) as url:
        found = await told(url)
        assert (found.outcome, found.status, found.code, found.retry_after) == ("refused", 503, "overloaded", "3")
    async with saying(TEXT, cut=True) as url:
        assert (await told(url)).outcome == "broken"
    assert (await told("http://127.0.0.1:1")).outcome == "connection"


def answered(asked_at: float, tier: str = "assistant-large", ttft_s: float = 0.1) -> Told:
    return Told(mark="1", kind="test", asked_at=asked_at, outcome="answer", tier=tier, ttft_s=ttft_s)


def test_changes_of_tier_are_counted() -> None:
    """By the tier that most requests of a second got; what lies outside the span does not count."""
    large, small = "assistant-large", "assistant"
    seen = [answered(at + 0.1, tier) for at, tier in enumerate((large, small, small, large, small))]
    seen += [answered(3.2, small), answered(3.3, small)]
    assert flips(seen, 0.0, 5.0) == 1
    assert flips(seen, 1.0, 3.0) == 0


def test_a_divided_kind_has_not_changed_sides() -> None:
    """Two thirds have to come from one tier, and later from the other."""
    large, small = "assistant-large", "assistant"

    def second(at: int, larges: int) -> list[Told]:
        return [answered(at + 0.1 * n, large if n < larges else small) for n in range(6)]

    divided = [each for at, larges in enumerate((4, 3, 2, 3, 2, 3, 4)) for each in second(at, larges)]
    assert swings(divided, 0.0, 7.0) == 2
    even = [each for at in range(7) for each in second(at, 3)]
    assert swings(even, 0.0, 7.0) == 0


def test_a_devices_changes_are_its_own() -> None:
    """Devices on different tiers have not changed; one that is answered by another tier than before has, each time."""
    seen = []
    for at in range(10):
        for device, tier in ((0, "assistant-large"), (1, "assistant"), (2, ("assistant", "assistant-large")[at % 2])):
            told = answered(at + 0.1 * device, tier)
            told.device = device
            seen.append(told)
    assert changes(seen, 0.0, 10.0) == 9 / 3
    assert changes(seen[:1], 0.0, 10.0) == changes([], 0.0, 10.0) == 0


def test_recovery_is_the_last_request_that_was_not_well() -> None:
    """Late, by the wrong tier or refused: the last of them says when it was over; none is at once."""
    well = [answered(10.0 + at) for at in range(10)]
    assert recovery_s(well, 10.0, 0.2) == 0.0
    assert recovery_s([*well, answered(12.5, ttft_s=0.3)], 10.0, 0.2) == 2.5
    assert recovery_s([*well, answered(14.0, "assistant")], 10.0, 0.2) == 4.0
    refused = Told(mark="1", kind="test", asked_at=16.0, outcome="refused", status=503)
    assert recovery_s([*well, refused], 10.0, 0.2) == 6.0


def test_quantiles() -> None:
    """Of nothing 0; else the value with that share below it."""
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.99) == 99
