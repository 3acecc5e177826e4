"""What answers cost whose clients leave: our engine in a real Triton behind a real gateway, and scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from causeway_server.cloud_pool.upstreams.inference import Consumption, TokenMeter
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.router.types import Usage
from tests.bed.abandoned import Gateway
from tests.waiting import until

from ..conftest import Pool
from .test_triton_client import Reply, StoppableModel, bed, infer_request, piece


@pytest.mark.triton
@pytest.mark.engine
@pytest.mark.slow
async def test_abandoned_answers_cost_what_was_generated(pool: Pool, tmp_path: Path) -> None:
    """Whole, streamed and with two choices, left at moments of a fixed seed: the bed in small."""
    gateway = Gateway(pool, tmp_path)
    try:
        figures = await gateway.leave(40, seed=1)
    finally:
        gateway.close()
    assert (figures.charged, figures.wrong_prompts) == (figures.generated, 0)
    assert figures.generated > 0
    assert figures.exact > 0


async def leave(triton: TritonClient, meter: TokenMeter, pieces: int) -> None:
    request = msgspec.structs.replace(infer_request(), prompt="p" * 80, meter=meter.sequence(0, 0))
    async with aclosing(triton.generate(request)) as deltas:
        for _ in range(pieces):
            await anext(deltas)


async def test_what_comes_after_the_client_has_left_is_counted() -> None:
    """Until the model has stopped; its last response tells the prompt's tokens."""

    class Counting(StoppableModel):
        async def __call__(self, request: object, context: object) -> AsyncIterator[Reply]:
            async for reply in super().__call__(request, context):
                if reply.error_message:
                    yield piece("b", tokens=2, inputs=0)
                    yield piece(tokens=1, inputs=23, final=True)
                else:
                    yield piece("a", tokens=4, inputs=0)

    meter = TokenMeter()
    async with bed(Counting()) as (_, triton):
        await leave(triton, meter, 1)
        assert not meter.settled
        await meter.wait()
    assert meter.consumption(abandoned=True) == Consumption(Usage(23, 7))


async def test_a_model_that_tells_nothing_costs_an_estimate_where_the_client_has_left() -> None:
    """Not where it failed: then the request got nothing."""

    async def silent(request: object, context: object) -> AsyncIterator[Reply]:
        await asyncio.Event().wait()
        yield piece("a")

    meter = TokenMeter()
    async with bed(silent, stop_s=0.05) as (fake, triton):
        leaving = asyncio.ensure_future(leave(triton, meter, 1))
        await until(lambda: bool(fake.requests))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await meter.wait()
    assert meter.consumption(abandoned=True) == Consumption(Usage(20), estimated=True)
    assert meter.consumption(abandoned=False) == Consumption()


def test_of_several_calls_for_a_sequence_one_is_billed() -> None:
    """A retried call and a tier that was given up cost nothing; a prompt counts once for its choices."""
    meter = TokenMeter()
    lost, won = (meter.sequence(0, 0).begin(9) for _ in range(2))
    lost.output_tokens, lost.input_tokens = 1, 50
    won.output_tokens, won.input_tokens = 12, 30
    other = meter.sequence(1, 0).begin(9)
    other.output_tokens = 5
    silent = meter.sequence(2, 1).begin(9)
    assert meter.consumption(abandoned=True) == Consumption(Usage(39, 17), estimated=True)
    assert meter.consumption(abandoned=False) == Consumption(Usage(30, 17))
    ended: list[str] = []
    meter.on_settled(lambda: ended.append("now"))
    for call in (lost, won, lost, other, silent):
        assert not ended
        call.end()
    silent.end()
    assert ended == ["now"]


def test_a_request_that_was_never_sent_costs_nothing() -> None:
    meter = TokenMeter()
    meter.sequence(0, 0)
    assert meter.settled
    assert meter.consumption(abandoned=True) == Consumption()
